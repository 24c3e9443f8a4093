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
    InvalidArgument,
    NotFound,
    QueueFull,
    ResourceExhausted,
    Unavailable,
)
from jlora.sim.world.disk import Disk
from jlora.sim.world.sites import Planted, Shortage
from jlora.sim.world.struck import Struck
from jlora.types import Request

SIZED = ("load", "pin", "prefetch")  # commands for which there may be no room


@dataclass(slots=True, eq=False)
class Command:
    """A command of a client. `name`: the adapter's; `replaces`: a load that may take a name over."""

    kind: str
    name: str
    began: float
    future: Future[Any]
    replaces: bool = True
    cancelled: bool = False  # by its client

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Excuses:
    """Answers for one replica, on its engine's thread."""

    def __init__(self, struck: Struck, parts: Parts, disk: Disk):
        self._struck = struck
        self._disk = disk
        self._registry: AdapterRegistry = parts.registry
        self._scheduler: Any = parts.scheduler

    def request(self, handle: int | None) -> bool:
        """Whether an accepted request may have ended with an error just now (P4)."""
        return handle is not None and self._struck.ends(handle)

    def refusal(self, request: Request, error: BaseException, again: bool) -> bool:
        """Whether a submission may have failed just now. `again`: its tenant has used its name before."""
        if isinstance(error, Planted | Shortage):
            return self._struck.reaches(error, f"request {request.id}")
        if isinstance(error, NotFound):
            return request.adapter is not None and request.adapter not in self._registry
        if isinstance(error, InvalidArgument):
            return self._activated(request.adapter)
        if isinstance(error, QueueFull):
            scheduler = self._scheduler
            return len(scheduler.queue) + request.sampling.n > scheduler.config.max_queue
        return isinstance(error, ResourceExhausted) or (isinstance(error, AlreadyExists) and again)

    def command(self, command: Command, error: BaseException) -> bool:
        """Whether a command may fail."""
        struck, kind, name, began = self._struck, command.kind, command.name, command.began
        if isinstance(error, Planted | Shortage):
            return struck.reaches(error, name or kind) or struck.was_unread(name, began)
        if isinstance(error, CancelledError):
            return command.cancelled or (kind == "pin" and struck.was_gone(name, began))
        if isinstance(error, ResourceExhausted):
            return kind in SIZED
        if kind == "load":
            taken = isinstance(error, AlreadyExists) and not command.replaces
            unread = isinstance(error, NotFound | DataLoss | InvalidArgument | Unavailable)
            return taken or (unread and (struck.disturbed(name, began) or not self._disk.digest(name)))
        if isinstance(error, NotFound) and (name not in self._registry or struck.was_gone(name, began)):
            return kind in ("unload", "pin", "prefetch")
        if kind == "prefetch":
            return isinstance(error, InvalidArgument) and self._activated(name)
        return kind == "pin" and struck.was_unread(name, began)

    def _activated(self, name: str | None) -> bool:
        return bool(name and self._registry.invocation(name))
