"""A replica without an engine, whose answers are exact: a token is a hash of what the product says it depends on.

That is the adapter's weights, the prompt, the seed, the completion, and the tokens before. So a token of another
version, of another request, twice, or behind a gap is seen at once.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from jlora.config import Config
from jlora.engine.futures import done, running, settle
from jlora.errors import AlreadyExists, DataLoss, NotFound, QueueFull
from jlora.replica import ReplicaInfo, ReplicaState, Sink
from jlora.sim.world.cluster.loop import Loop
from jlora.types import (
    AdapterInfo,
    CacheState,
    EngineStats,
    FinishReason,
    PrefetchResult,
    Request,
    TierState,
    Timing,
    TokenEvent,
    Usage,
)
from jlora.validation import Limits

VOCAB = 1000
STEP_S = (0.01, 0.06)
LOAD_S = (0.005, 0.2)  # to read, check and copy an adapter
BLOCKS = 64
SPOILED = "spoiled"  # the digest of files that are others for a while


def info(max_seqs: int, max_queue: int, stall_s: float) -> ReplicaInfo:
    """The constants of every replica of a world."""
    config = Config()
    engine = replace(config.engine, max_seqs=max_seqs, max_queue=max_queue)
    config = replace(config, serve=replace(config.serve, stall_s=stall_s, heartbeat_s=4.0))
    return ReplicaInfo(
        "base", "float32", Limits(VOCAB, 4096, 4096), (2,), 16, 4096, "cpu", ("cpu:0",), replace(config, engine=engine)
    )  # fmt: skip


def token(digest: str, request: Request, index: int, before: Sequence[int]) -> int:
    """The next token of a completion behind these."""
    said = f"{digest}|{request.prompt}|{request.sampling.seed}|{index}|{len(before)}"
    return zlib.crc32(bytes(str(before[-8:]), "ascii"), zlib.crc32(bytes(said, "ascii"))) % VOCAB


def answer(digest: str, request: Request, index: int) -> list[int]:
    """A completion that nothing disturbs."""
    tokens: list[int] = []
    while len(tokens) < (request.sampling.max_tokens or 1):
        tokens.append(token(digest, request, index, tokens))
    return tokens


@dataclass(slots=True)
class Held:
    """An adapter version of a replica, as `jlora.cluster.tiers` reads its records."""

    name: str
    digest: str
    tier: Any = "HOST"
    pinned: bool = False
    ranks: dict[str, int] = field(default_factory=lambda: {"q_proj": 8})


@dataclass(slots=True, eq=False)
class Run:
    """A request in the replica."""

    handle: int
    request: Request
    sink: Sink
    digest: str
    tokens: list[list[int]]
    ended: list[bool]
    arrived: float


@dataclass(slots=True)
class Disk:
    """What every process reads: path -> digest of what is there. One that is missing is gone."""

    files: dict[str, str] = field(default_factory=dict)


@dataclass
class ModelReplica:
    """The engine of one process, as a link sees a `Replica`. Its thread is timers of the process's loop.

    Attributes:
        hung: the engine stands, and its process speaks.
        compiles: a step compiles until then.
        struck: hears of a request that the model itself fails, and with which kind of error.
        dropped: hears of a version that is unloaded.
        fails: what the next step does to one request of it.
        live: by handle; `steps` counts.
    """

    loop: Loop
    disk: Disk
    draw: random.Random
    constants: ReplicaInfo
    struck: Callable[[str, str], None]
    dropped: Callable[[str], None]
    step_s: float = 0.02
    hung: bool = False
    compiles: float = 0.0
    fails: Exception | None = None
    adapters_here: dict[str, Held] = field(default_factory=dict)
    live: dict[int, Run] = field(default_factory=dict)
    steps: int = 0
    handles: int = 0
    moved: float = 0.0
    stepping: bool = False

    def __post_init__(self) -> None:
        self.moved = self.loop.time()

    @property
    def info(self) -> ReplicaInfo:
        return self.constants

    @property
    def compiling(self) -> bool:
        return self.loop.time() < self.compiles

    @property
    def failure(self) -> Future[BaseException]:
        return running()

    def heartbeat_age(self) -> float:
        return self.loop.time() - self.moved if self.hung else 0.0

    def state(self) -> Future[ReplicaState]:
        running = min(len(self.live), self.info.config.engine.max_seqs)
        stats = EngineStats(running, len(self.live) - running, len(self.live), self.steps, 0, 0, 0, 0, 0, 0.0)
        tier = TierState(BLOCKS, max(0, BLOCKS - len(self.live)), 0, 0, 0)
        return done(ReplicaState(CacheState("jlora", tier, tier, *[0] * 21), stats, 0.0))

    def records(self) -> list[Any]:
        """Of its adapters."""
        return list(self.adapters_here.values())

    # -- requests -------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        return self._between_steps(lambda: self._queue(request, sink))

    def _queue(self, request: Request, sink: Sink) -> int:
        engine = self.info.config.engine
        if request.adapter is not None and request.adapter not in self.adapters_here:
            raise NotFound(f"adapter {request.adapter!r} is not loaded")
        if any((r.request.tenant, r.request.id) == (request.tenant, request.id) for r in self.live.values()):
            raise AlreadyExists(f"request_id {request.id!r} is in use by a live request")
        if len(self.live) >= engine.max_seqs + engine.max_queue:
            self.struck(request.id, "QueueFull")
            raise QueueFull("queue is full")
        digest = self.adapters_here[request.adapter].digest if request.adapter is not None else "base"
        self.handles += 1
        tokens = [list(one.tokens) for one in request.done] or [[] for _ in range(request.sampling.n)]
        ended = [one.ended for one in request.done] or [False] * request.sampling.n
        self.live[self.handles] = Run(self.handles, request, sink, digest, tokens, ended, self.loop.time())
        self._go_on()
        return self.handles

    def abort(self, handle: int, moved: bool = False) -> Future[bool]:
        def end() -> bool:
            run = self.live.get(handle)
            if run is not None:
                self._end(run, "abort")
            return run is not None

        return self._between_steps(end)

    def prefetch(self, request: Request) -> Future[PrefetchResult]:
        """A replica has what it knows in memory."""

        def look() -> PrefetchResult:
            if request.adapter is not None:
                self._info(request.adapter)
            return PrefetchResult(True, 0, 0)

        return self._between_steps(look)

    def stop(self, handle: int, index: int, outputs: int) -> Future[None]:
        def end() -> None:
            run = self.live.get(handle)
            if run is not None and not run.ended[index]:
                self._tell(run, [self._last(run, index, "stop", None, min(outputs, len(run.tokens[index])))])

        return self._between_steps(end)

    # -- adapters -------------------------------------------------------------------------------

    def adopt(self, key: str, path: str, digest: str) -> None:
        """Reads a version. Raises NotFound, DataLoss, AlreadyExists."""
        if key in self.adapters_here:
            raise AlreadyExists(f"adapter {key!r} is loaded already")
        here = self.disk.files.get(path)
        if here is None:
            raise NotFound(f"{path}: no such directory")
        if digest and here != digest:
            raise DataLoss(f"adapter {key!r}: its files have changed on the disk")
        self.adapters_here[key] = Held(key, here)

    def load_adapter(
        self, name: str, path: str, pinned: bool = False, replace: bool = False, lazy: bool = False
    ) -> Future[AdapterInfo]:
        def load() -> AdapterInfo:
            self.adapters_here.pop(name, None)
            self.adopt(name, path, "")
            self.adapters_here[name].pinned = pinned
            return self._info(name)

        return self._between_steps(load, self.draw.uniform(*LOAD_S))

    def unload_adapter(self, name: str) -> Future[AdapterInfo]:
        """What uses it runs on."""

        def unload() -> AdapterInfo:
            told = self._info(name)
            del self.adapters_here[name]
            self.dropped(name)
            return told

        return self._between_steps(unload)

    def pin_adapter(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        def pin() -> AdapterInfo:
            told = self._info(name)
            self.adapters_here[name].pinned = pinned
            self.adapters_here[name].tier = "HBM" if pinned else "HOST"
            return told

        return self._between_steps(pin)

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        names = sorted(name for name in self.adapters_here if name > after)[:most]
        return self._between_steps(lambda: [self._info(name) for name in names if name in self.adapters_here])

    def adapter(self, name: str) -> Future[AdapterInfo]:
        return self._between_steps(lambda: self._info(name))

    def keep(self, name: str, lost: bool = False) -> Future[AdapterInfo]:
        """What it knows is in memory."""
        return self.adapter(name)

    def _info(self, name: str) -> AdapterInfo:
        if name not in self.adapters_here:
            raise NotFound(f"adapter {name!r} is not loaded")
        held = self.adapters_here[name]
        return AdapterInfo(
            name, 1, held.digest, 8, held.ranks, ("q_proj",), 1 << 20, 1, held.tier, held.pinned, 0, 0, 0, 0.0, 0.0
        )  # fmt: skip

    # -- the engine's thread ----------------------------------------------------------------------

    def _between_steps(self, command: Callable[[], Any], seconds: float = 0.0) -> Future[Any]:
        answer: Future[Any] = Future()
        self.loop.call_later(seconds + self.draw.uniform(0.0, self.step_s), settle, answer, command)
        return answer

    def _go_on(self) -> None:
        if not self.stepping and self.live:
            self.stepping = True
            self.loop.call_later(self.step_s, self._step)

    def _step(self) -> None:
        self.stepping = False
        if self.hung or self.compiling:
            self.stepping = True
            self.loop.call_later(self.step_s, self._step)
            return
        self.steps += 1
        self.moved = self.loop.time()
        now = self.loop.time()
        for run in list(self.live.values())[: self.info.config.engine.max_seqs]:
            if run.request.deadline is not None and now > run.request.deadline:
                self._end(run, "abort")
            elif self.fails is not None:
                error, self.fails = self.fails, None
                self.struck(run.request.id, type(error).__name__)
                self._end(run, "abort", error)
            else:
                self._decode(run)
        self._go_on()

    def _decode(self, run: Run) -> None:
        events = []
        for index, tokens in enumerate(run.tokens):
            if run.ended[index]:
                continue
            tokens.append(token(run.digest, run.request, index, tokens))
            if len(tokens) >= (run.request.sampling.max_tokens or 1):
                events.append(self._last(run, index, "length", tokens[-1], len(tokens)))
            else:
                events.append(TokenEvent(run.request.id, index, tokens[-1], handle=run.handle))
        self._tell(run, events)

    def _last(self, run: Run, index: int, why: FinishReason, token: int | None, count: int) -> TokenEvent:
        run.ended[index] = True
        usage, timing = Usage(len(run.request.prompt), 0, count), Timing(ttft=self.loop.time() - run.arrived)
        return TokenEvent(
            run.request.id, index, token, finish_reason=why, usage=usage, timing=timing, handle=run.handle
        )

    def _end(self, run: Run, why: FinishReason, error: Exception | None = None) -> None:
        events = [
            replace(self._last(run, i, why, None, len(run.tokens[i])), error=error)
            for i, ended in enumerate(run.ended)
            if not ended
        ]
        self._tell(run, events)

    def _tell(self, run: Run, events: list[TokenEvent]) -> None:
        if all(run.ended):
            self.live.pop(run.handle, None)
        if events:
            run.sink(events)
