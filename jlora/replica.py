"""What a front talks to: one replica, or a router of many.

Every command returns a `concurrent.futures.Future`. An asyncio front awaits it with
`asyncio.wrap_future`; a thread calls `result()`. No command blocks its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from jlora.config import Config
from jlora.types import AdapterInfo, CacheState, EngineStats, Owners, PrefetchResult, ProfileResult, Request, TokenEvent
from jlora.validation import Limits

Sink = Callable[[list[TokenEvent]], None]


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What never changes while a replica lives.

    Attributes:
        model: the name that requests for the base model use.
        limits: for `jlora.validation.validate`.
        eos_ids: the model's own end tokens.
        block_tokens, block_bytes: of one block of the pool.
        platform, devices: where it runs; each device is its kind and number.
        base: a fingerprint of the model's weights; "" if it has none.
        start_s: seconds of the start by phase, in order.
    """

    model: str
    dtype: str
    limits: Limits
    eos_ids: tuple[int, ...]
    block_tokens: int
    block_bytes: int
    platform: str
    devices: tuple[str, ...]
    config: Config
    base: str = ""
    start_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Member:
    """One replica behind a router, as its last message shows it.

    Attributes:
        health: loading, up, suspect, draining or down.
        sent: this router's live requests there.
        running, waiting: sequences, of all routers.
        adapters: on the device.
        step_s: mean time of a step.
    """

    name: str
    address: str
    health: str
    sent: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    blocks: int = 0
    adapters: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterStats:
    """What a router has done since its start.

    Attributes:
        moves: requests that its balance has moved.
        resumed: attempts after a first one, because a replica was lost, drained, or refused the request.
        fetches: adapters that the placement has had replicas fetch; counted at the controller's router.
        solve_s: the longest time that a plan of moves has taken; candidates: requests of the largest.
    """

    moves: int = 0
    resumed: int = 0
    fetches: int = 0
    solve_s: float = 0.0
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One snapshot of a replica's cache and counters; `longest_gap_s` is between two steps, in the last minute.

    `members` are the replicas behind a router, in order of name, and `router` what it has done; an engine has neither.
    """

    cache: CacheState
    stats: EngineStats
    longest_gap_s: float
    members: tuple[Member, ...] = ()
    router: RouterStats | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """An adapter that a caller wants loaded; fields as of `Replica.load_adapter`."""

    name: str
    path: str
    pinned: bool = False
    replace: bool = False
    lazy: bool = False


class Replica(Protocol):
    """Serves one base model and its adapters.

    Every future fails with Unavailable once the replica has stopped or failed.
    """

    @property
    def info(self) -> ReplicaInfo:
        """Constants."""
        ...

    def check(self, request: Request) -> Future[None]:
        """Fails as `submit` would, a full queue and a used id aside. Submits nothing."""
        ...

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        """Queues a request that `validate(request, info.limits)` returned.

        Args:
            sink: receives the events on the replica's own thread; it must not block. A sink that raises
                aborts its request.

        Returns:
            A handle: the replica's own name for the request, never used again.

        Fails with:
            NotFound: no such adapter. InvalidArgument: the prompt does not invoke its activated LoRA.
            AlreadyExists: a live request of the tenant has this id. ResourceExhausted: see `Scheduler.submit`.
            Unavailable: the replica drains.
        """
        ...

    def abort(self, handle: int, moved: bool = False) -> Future[bool]:
        """Ends a request and frees its blocks. False: it is not live.

        `moved`: another replica goes on with it, so its tenant is not charged here for a prompt without an answer.
        """
        ...

    def abort_named(self, request_id: str, tenant: str = "") -> Future[bool]:
        """The same for a tenant's request by its id, submitted or still on its way; answers at once."""
        ...

    def stop(self, handle: int, index: int, outputs: int) -> Future[None]:
        """Ends one completion after `outputs` tokens: a front found a stop string there."""
        ...

    def prefetch(self, request: Request) -> Future[PrefetchResult]:
        """A hint that the request will come. Fails with NotFound."""
        ...

    def load_adapter(
        self, name: str, path: str, pinned: bool = False, replace: bool = False, lazy: bool = False
    ) -> Future[AdapterInfo]:
        """Loads a PEFT directory; done when requests can use it and its copy to the device has landed.

        With `lazy` it is read, checked and left on the disk until a request needs it.

        The answer describes the version that was loaded, also if it has been unloaded meanwhile. The caller
        can cancel the load until requests can use the adapter; a cancelled load leaves nothing behind.
        """
        ...

    def unload_adapter(self, name: str) -> Future[AdapterInfo]:
        """Takes an adapter out of service; done when all that it held is free. Fails with NotFound."""
        ...

    def pin_adapter(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        """Pins an adapter and waits for its copy, or unpins it.

        Fails with NotFound, ResourceExhausted; FailedPrecondition if it is unpinned before it is read from the disk.
        """
        ...

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        """The adapters in service in order of name: those behind the name `after`, at most `most`."""
        ...

    def adapter(self, name: str) -> Future[AdapterInfo]:
        """One adapter. Fails with NotFound."""
        ...

    def check_adapter(self, name: str) -> None:
        """Raises NotFound for an adapter that is not in service. Waits for nothing; any thread may ask."""
        ...

    def state(self) -> Future[ReplicaState]:
        """A snapshot; while a step is under way, the one from before that step, at once."""
        ...

    def owners(self) -> Future[Owners]:
        """Who has each block of the device."""
        ...

    def flush_cache(self) -> Future[int]:
        """Drops KV that no request uses; the number of device blocks freed."""
        ...

    def profile(self, steps: int, replica: str = "") -> Future[ProfileResult]:
        """Traces the next steps into `serve.profile_dir`, for a minute at most.

        `replica` names one of many. Fails with NotFound if there is none of that name, with FailedPrecondition if
        the directory is unset or a trace is being made, and with InvalidArgument.
        """
        ...

    def drain(self, timeout_s: float | None = None) -> Future[bool]:
        """Refuses new requests from now on; True when the live ones have ended, False after `timeout_s`."""
        ...

    def heartbeat_age(self) -> float:
        """Seconds since the engine last made progress: it grows while the engine hangs. Infinite once it has ended."""
        ...

    @property
    def compiling(self) -> bool:
        """Whether the step under way compiles a program first, which may hold up the whole process."""
        ...

    @property
    def programs_left(self) -> int:
        """Shapes of steps that still compile beside them, as `EngineStats.programs_left`; any thread, at once."""
        ...

    @property
    def failure(self) -> Future[BaseException]:
        """Why the replica has failed; pending as long as it has not. A replica never recovers."""
        ...

    def close(self) -> None:
        """Ends live requests, the threads and the device's use. A second call does nothing."""
        ...
