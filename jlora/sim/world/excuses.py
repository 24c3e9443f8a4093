"""Which errors a client of a replica may get, by what has struck its request or its command.

While the engine lives, that is: once it has failed, everything ends with UNAVAILABLE.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from jlora.adapters.registry import AdapterRegistry
from jlora.engine.ports import Parts
from jlora.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QueueFull,
    ResourceExhausted,
    Unavailable,
)
from jlora.sim.world.disk import BLOCK_TOKENS, Disk
from jlora.sim.world.sites import Planted, Shortage
from jlora.sim.world.struck import Struck
from jlora.types import Request

SIZED = ("load", "pin", "register", "keep")  # commands for which there may be no room


@dataclass(slots=True, eq=False)
class Command:
    """A command of a client.

    Attributes:
        name: the adapter's.
        replaces: a load that may take a name over.
        cancelled: by its client.
        hint: what a prefetch announces.
    """

    kind: str
    name: str
    began: float
    future: Future[Any]
    replaces: bool = True
    cancelled: bool = False
    hint: Request | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Excuses:
    """Answers for one replica, on its engine's thread."""

    def __init__(self, struck: Struck, parts: Parts, disk: Disk):
        self._struck = struck
        self._disk = disk
        self._registry: AdapterRegistry = parts.registry
        self._scheduler: Any = parts.scheduler  # the world looks behind the protocol

    def request(self, handle: int | None) -> bool:
        """Whether an accepted request may have ended with an error just now (P4)."""
        return handle is not None and self._struck.ends(handle)

    def refusal(self, request: Request, error: BaseException, again: bool) -> bool:
        """Whether a submission may have failed just now. `again`: its tenant has used its name before."""
        if isinstance(error, Planted | Shortage):
            return self._struck.reaches(error, f"request {request.id}")
        if isinstance(error, NotFound):
            return request.adapter is not None and request.adapter not in self._registry
        if isinstance(error, QueueFull):
            scheduler, engine = self._scheduler, self._scheduler.config
            return scheduler.pending + scheduler.active + request.sampling.n > engine.max_queue + engine.max_seqs
        return self._unfit(request, error) or (isinstance(error, AlreadyExists) and again)

    def command(self, command: Command, error: BaseException) -> bool:
        """Whether a command may fail."""
        struck, kind, name, began = self._struck, command.kind, command.name, command.began
        if isinstance(error, Planted | Shortage):
            return struck.reaches(error, name or kind) or struck.was_unread(name, began)
        if isinstance(error, CancelledError):
            return command.cancelled or (kind == "pin" and struck.was_gone(name, began))
        if command.hint is not None and self._unfit(command.hint, error):
            return True
        if isinstance(error, ResourceExhausted):
            return kind in SIZED
        if kind == "load":
            taken = isinstance(error, AlreadyExists) and not command.replaces
            unread = isinstance(error, NotFound | DataLoss | InvalidArgument | Unavailable)
            return taken or (unread and (struck.disturbed(name, began) or not self._disk.digest(name)))
        if isinstance(error, NotFound) and (name not in self._registry or struck.was_gone(name, began)):
            return kind in ("unload", "pin", "prefetch", "keep")
        if isinstance(error, AlreadyExists):
            return kind == "register" and name in self._registry
        if isinstance(error, FailedPrecondition):
            return kind == "pin" and struck.was_unpinned(name, began)
        return kind == "pin" and struck.was_unread(name, began)

    def unpins(self, name: str) -> None:
        """A client asks that an adapter be unpinned."""
        self._struck.unpin(name)

    def _unfit(self, request: Request, error: BaseException) -> bool:
        """Whether a request can never run as things are now: its prompt lacks the invocation, or the pool is small."""
        if request.adapter is not None and request.adapter not in self._registry:
            return False
        if isinstance(error, InvalidArgument):
            tokens = self._registry.invocation(request.adapter or "")
            spans = (request.prompt[at : at + len(tokens)] for at in range(len(request.prompt)))
            return bool(tokens) and tokens not in spans
        return isinstance(error, ResourceExhausted) and (self._too_long(request) or self._too_large(request))

    def _too_large(self, request: Request) -> bool:
        """Whether its adapter is on the disk, and larger than what pinned ones leave of the host."""
        if request.adapter is None:
            return False
        manager, node = self._scheduler.manager, self._registry.get(request.adapter).node
        pinned = [each.size for each in manager.adapters.values() if each.host and each.pinned]
        return node.gone and node.size > manager.host.total - sum(pinned)

    def _too_long(self, request: Request) -> bool:
        """Whether its longest answer passes what the pool has beside its adapter and the pinned ones."""
        manager = self._scheduler.manager
        held = {node for node in manager.adapters.values() if node.pinned}
        if request.adapter is not None:
            held.add(self._registry.get(request.adapter).node)
        adapters, total = sum(node.size for node in held), manager.device.total
        most = total - adapters
        if (share := manager.policy.share) is not None:  # what is not the adapters' is KV's
            room = max(1, round(share * total))
            most = min(most, total - room) if adapters <= room else 0
        return len(request.prompt) + (request.sampling.max_tokens or 1) > most * BLOCK_TOKENS
