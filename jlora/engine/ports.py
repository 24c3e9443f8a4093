"""The parts that an engine needs. The product and the simulator each bring their own. No jax.

part        product                         simulator
clock       time.monotonic                  virtual seconds
runner      jitted programs on a device     a model of a step's seconds
swapper     copies over the link            a model of the link
scheduler   the same object in both, and the cache behind it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jlora.adapters.catalogue import Catalogue
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.manager import CacheManager
from jlora.cache.transfer import Copy
from jlora.cache.tree import AdapterNode
from jlora.engine.plan import Drawn, StepPlan, Work
from jlora.engine.plan import Sequence as Running
from jlora.ports import Clock
from jlora.types import Request, TokenEvent


class Scheduler(Protocol):
    """Decides who runs. See `jlora.engine.scheduler.Scheduler` for the meaning of each method."""

    @property
    def manager(self) -> CacheManager: ...
    @property
    def live(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def active(self) -> int: ...
    @property
    def preemptions(self) -> int: ...

    def submit(self, request: Request, adapter: AdapterNode, now: float, activation: int | None) -> int: ...
    def abort(self, handle: int, now: float, moved: bool) -> list[TokenEvent]: ...
    def stop(self, handle: int, index: int, outputs: int, now: float) -> list[TokenEvent]: ...
    def expire(self, now: float) -> list[TokenEvent]: ...
    def can_pin(self, adapter: AdapterNode) -> bool: ...
    def plan(self, now: float) -> StepPlan: ...
    @property
    def suspect(self) -> Running | None: ...
    def undo(self, works: Iterable[Work]) -> None: ...
    def arrived(self, adapter: AdapterNode, now: float) -> None: ...
    def fail_adapter(self, adapter: AdapterNode, error: Exception, now: float) -> list[TokenEvent]: ...
    def fail(self, handle: int, error: Exception, now: float) -> list[TokenEvent]: ...
    def fail_copy(self, copy: Copy, error: Exception, now: float) -> list[TokenEvent]: ...
    def retract(self) -> bool: ...
    def check_integrity(self) -> None: ...
    def commit(self, plan: StepPlan, drawn: list[Drawn], now: float) -> list[TokenEvent]: ...
    def tend(self, now: float) -> tuple[Copy, ...]: ...


class Pending(Protocol):
    """A dispatched step."""

    @property
    def plan(self) -> StepPlan:
        """The plan that it carries out."""
        ...

    @property
    def dispatched(self) -> float:
        """When its dispatch was complete, seconds of the clock."""
        ...

    @property
    def stalled_s(self) -> float:
        """Seconds that its dispatch waited for streamed copies."""
        ...

    def read(self) -> list[Drawn]:
        """Waits for the step; its results in the order of `plan.work`."""
        ...


class Swapper(Protocol):
    """Copies blocks between the tiers, beside the steps."""

    def fill(self, blocks: tuple[int, ...], data: Any) -> None:
        """Writes an adapter's master copy into blocks of the host tier that nothing reads yet. Any thread may call."""
        ...

    def read(self, blocks: Sequence[int], layers: slice = slice(None)) -> Any:
        """A copy of the data of some layers in blocks of the host tier."""
        ...

    def start(self, copies: Iterable[Copy]) -> None:
        """Begins copies."""
        ...

    def landed(self) -> list[Copy]:
        """The copies completed since the last call; a step dispatched from now on sees them."""
        ...

    def failed(self) -> list[tuple[Copy, Exception]]:
        """The copies that have failed since the last call, and why. What they were to bring is undefined."""
        ...

    def arrived(self, copy: Copy, group: int) -> bool:
        """Whether `place` of a copy under way would not wait. False for a copy that comes as a whole."""
        ...

    def place(self, copy: Copy, group: int) -> float:
        """Makes a streamed copy visible up to this group of layers; the seconds that it waited for the copy.

        Raises:
            Lost: it has failed.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Returns when a copy is complete, or after so many seconds."""
        ...

    def close(self) -> None:
        """Ends its threads."""
        ...


class Undone(Exception):
    """Work of a step was not dispatched; its cause says why.

    A MemoryError: the device or the host lacks memory. `Lost`: what it reads does not come.

    Attributes:
        pending: the part of the step that was; None if there is none.
        works: the others.
        sequence: the one that it is due to, if that is known.
    """

    def __init__(self, pending: Pending | None, works: tuple[Work, ...], sequence: Running | None):
        super().__init__(f"{len(works)} works were not dispatched")
        self.pending, self.works, self.sequence = pending, works, sequence


class Runner(Protocol):
    """Runs plans on a device."""

    def run(self, plan: StepPlan, swapper: Swapper) -> Pending:
        """Dispatches a step and returns at once, or when the last of `plan.streams` has come.

        Raises:
            Undone: work was not dispatched, and the device's state is as if it had never been planned.
        """
        ...

    @property
    def compiling(self) -> bool:
        """Whether the dispatch under way has to compile a program first. Any thread may ask."""
        ...

    @property
    def compiled_at(self) -> float:
        """When the last dispatch that compiled ended, seconds of the clock; 0 if none has. Any thread may ask."""
        ...

    @property
    def compiles_after_warmup(self) -> int:
        """Programs compiled since warm-up."""
        ...

    @property
    def programs_left(self) -> int:
        """Forms of launches that are still being compiled; larger ones stand in for them."""
        ...

    def close(self) -> None:
        """Frees the device."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """What merging an adapter loses.

    Attributes:
        error: the error of the merged path's logits against float32, over the unmerged path's; 1 for a float32 model.
        lost: the share of entries that taking it out has to correct, over the share that it may be.
    """

    error: float
    lost: float


class Price(NamedTuple):
    """Seconds of a piece: merging it, and taking it out."""

    into_s: float
    out_s: float


# (indices of an adapter's blocks, layers) -> a copy of their data [n, l, B, 2K, H]
Read = Callable[[Sequence[int], slice], Any]


class Merger(Protocol):
    """Merges one adapter into the base's weights, piece by piece. Between two steps only.

    Attributes:
        pieces: pieces of the weights.
        done: the first so many are merged.
        reloads: times that the weights were loaded anew, because taking an adapter out had left others, or memory
            ended in the middle of a piece.
        host_bytes: what the merged adapter takes of the host.
    """

    done: int
    reloads: int

    @property
    def pieces(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def price(self, projections: Sequence[str], lost: float) -> Price:
        """What a piece is expected to take of an adapter whose blocks are of these projections; (): all, not yet read.

        `lost` is `Loss.lost`, or 0 before that was measured: putting entries back takes time.
        """
        ...

    def begin(self, projections: Sequence[str], read: Read) -> None:
        """Names the adapter: the projection of each of its blocks, and what reads them from the host tier.

        `measure` and `forward` read, and only one layer; `back` needs none of it any more.
        """
        ...

    def forget(self) -> None:
        """Nobody wants the adapter any more, and nothing of it is merged: a measurement under way ends."""
        ...

    def measure(self) -> Loss | None:
        """Goes one piece on with measuring what the merge would lose; the loss when it is known."""
        ...

    def forward(self) -> None:
        """Merges the next piece. Raises MemoryError if memory ends; nothing is merged any more then."""
        ...

    def collect(self) -> None:
        """Lets what `back` will need come to the host. Called between steps while everything is merged."""
        ...

    def back(self) -> None:
        """Takes the last merged piece out. Raises as `forward`."""
        ...

    def whole(self) -> bool:
        """Whether what was taken out has left the base's own weights. If not, they have been loaded anew."""
        ...

    def audit(self) -> None:
        """Raises AssertionError if the weights are not the base's, with the first `done` pieces merged once."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is put together from.

    Attributes:
        readers: adapters read from the disk at once.
        catalogue: remembers the registered adapters; None: they end with the engine.
        wall: seconds since 1970.
    """

    scheduler: Scheduler
    registry: AdapterRegistry
    runner: Runner
    swapper: Swapper
    clock: Clock
    readers: int = 1
    catalogue: Catalogue | None = None
    wall: Clock = time.time
