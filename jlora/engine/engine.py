"""The engine: one replica's scheduler, cache and device, stepped from one thread.

`step()` is the architecture. A step is planned and dispatched while the one before it still
runs; the host reads sampled tokens one step late and never makes the device wait for Python.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jlora.adapters.adapter import Adapter
from jlora.adapters.packing import Packed
from jlora.adapters.registry import AdapterRegistry, Record
from jlora.cache import inspect
from jlora.cache.manager import CacheManager
from jlora.cache.swapper import Swapper
from jlora.cache.tree import AdapterNode, Origin
from jlora.engine.plan import ROW, Drawn
from jlora.engine.runner import Pending, Runner
from jlora.engine.scheduler import Scheduler
from jlora.errors import NotFound, ResourceExhausted
from jlora.layout import PoolLayout
from jlora.types import AdapterInfo, CacheState, EngineStats, PrefetchResult, Request, TokenEvent

log = logging.getLogger(__name__)

WAIT_S = 0.002  # a step with nothing to run sleeps so long, or until a copy lands; a submit waits no longer


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """An adapter read, checked and packed, on its way into the engine; `read_s`: seconds that took."""

    name: str
    adapter: Adapter
    packed: Packed
    read_s: float


@dataclass(slots=True)
class _Counts:
    committed: float = 0.0  # when the last step was
    steps: int = 0
    generated: int = 0
    prompt: int = 0
    host_s: float = 0.0


class Engine:
    """Everything one replica owns.

    `step` belongs to one thread. Every other method may be called from any thread that holds
    `lock`, which a step holds only while Python works, never while it waits for the device.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: AdapterRegistry,
        runner: Runner,
        swapper: Swapper,
        layout: PoolLayout,
        overlap: bool,
    ):
        self.layout = layout
        self.runner = runner
        self._scheduler = scheduler
        self._manager: CacheManager = scheduler.manager
        self._registry = registry
        self._swapper = swapper
        self.lock = threading.Lock()
        self._overlap = overlap
        self._in_flight: Pending | None = None
        self._ended: list[TokenEvent] = []  # final events of aborted and stopped completions
        self._counts = _Counts()

    # -- the step ---------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.live > 0 or self._in_flight is not None or bool(self._ended)

    def step(self) -> list[TokenEvent]:
        """Plans and dispatches one step, takes in the one before; the events it brought."""
        with self.lock:
            started = time.monotonic()
            self._manager.landed(self._swapper.landed())
            self._ended += self._scheduler.expire(started)
            plan = self._scheduler.plan(started)
            self._swapper.start(plan.copies)
            launches = self.runner.build(plan)
        pending = self.runner.run(plan, launches, self._swapper) if plan.work else None
        done, self._in_flight = (self._in_flight, pending) if self._overlap else (pending, None)
        self._counts.host_s += time.monotonic() - started
        if pending is None and done is None:
            self.rest()
        drawn = done.read() if done is not None else []  # waits for the device, without the lock
        with self.lock:
            committed = self._commit(done, drawn) if done is not None else []
            events, self._ended = committed + self._ended, []
            self._registry.purge(self._manager.adapters)
        return events

    def tend(self) -> None:
        """What an idle engine does: takes in copies that have landed, starts those worth starting."""
        with self.lock:
            self._manager.landed(self._swapper.landed())
            self._swapper.start(self._scheduler.tend(time.monotonic()))
            self._registry.purge(self._manager.adapters)

    @property
    def copying(self) -> bool:
        """Whether copies between the tiers are under way."""
        return self._manager.flying

    def rest(self) -> None:
        """Sleeps a little, or until a copy lands. Call without the lock."""
        self._swapper.wait(WAIT_S)

    def _commit(self, done: Pending, drawn: list[Drawn]) -> list[TokenEvent]:
        now = time.monotonic()
        events = self._scheduler.commit(done.plan, drawn, now)
        counts = self._counts
        prompt = sum(w.count for w in done.plan.prefill)
        if prompt >= ROW:  # what a prompt token costs beside the running sequences
            self._manager.policy.meter.observe_prefill(prompt, now - max(counts.committed, done.dispatched))
        counts.committed = now
        counts.steps += 1
        counts.prompt += prompt
        counts.generated += sum(w.samples for w in done.plan.work)
        counts.host_s += time.monotonic() - now
        return events

    # -- requests ---------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queues a validated request; its handle.

        Raises:
            NotFound, InvalidArgument: see `AdapterRegistry.resolve`.
            AlreadyExists, ResourceExhausted: see `Scheduler.submit`.
        """
        now = time.monotonic()
        record, origin = self._origin(request)
        handle = self._scheduler.submit(request, origin.adapter, now, origin.activation)
        if record is not None:
            record.last_used = now
        return handle

    def abort(self, request_id: str, handle: int | None = None) -> bool:
        """Ends a request and frees its blocks at once; whether it was live."""
        ended = self._scheduler.abort(request_id, time.monotonic(), handle)
        self._ended += ended
        return bool(ended)

    def stop_completion(self, request_id: str, index: int, outputs: int, handle: int | None = None) -> None:
        """A stop string was found in a completion's text after `outputs` tokens."""
        self._ended += self._scheduler.stop(request_id, index, outputs, time.monotonic(), handle)

    def capacity(self, request: Request) -> int:
        """Tokens of the longest request the pool can hold beside this one's adapter.

        Raises:
            NotFound, InvalidArgument: see `AdapterRegistry.resolve`.
        """
        return self._manager.capacity(self._origin(request)[1].adapter)

    def _origin(self, request: Request) -> tuple[Record | None, Origin]:
        """The adapter version that answers a request, None for the base, and what its KV depends on."""
        if request.adapter is None:
            return None, Origin(self._manager.base, request.tenant)
        record, activation = self._registry.resolve(request.adapter, request.prompt, request.invocation)
        return record, Origin(self._manager.base if record is None else record.node, request.tenant, activation)

    # -- adapters ---------------------------------------------------------------------------

    def add_adapter(self, new: NewAdapter, pinned: bool = False, replace: bool = False) -> AdapterInfo:
        """Makes a packed adapter servable; with `replace` it takes over the name.

        Raises:
            AlreadyExists: the name is taken and `replace` is False.
            ResourceExhausted: it can never fit the pool, the host tier is full, or pinning it finds no
                room now.
        """
        if not replace:
            self._registry.check_free(new.name)
        adapter = new.adapter
        node = self._place(new)
        record = Record(
            name=new.name,
            digest=adapter.digest,
            ranks=adapter.ranks,
            target_modules=adapter.target_modules,
            alora_invocation_tokens=adapter.alora_invocation_tokens,
            projections=new.packed.projections,
            bytes=new.packed.data.nbytes,
            node=node,
            load_cost_s=new.read_s,
        )
        old = self._registry.remove(new.name) if self.has_adapter(new.name) else None
        self._registry.add(record)
        self._take_over(record, old, pinned)
        self._registry.purge(self._manager.adapters)
        log.info("adapter %s loaded: uid=%d rank=%d blocks=%d", new.name, node.uid, adapter.rank, node.size)
        return record.info(time.monotonic())

    def remove_adapter(self, name: str) -> list[int]:
        """Takes an adapter out of service; it is gone when its last user is.

        Returns:
            uids of the versions that still live: this one and those it replaced (see `are_gone`).
        """
        record = self._registry.remove(name)
        uids = self._registry.versions(name)
        self._manager.kill(record.node)
        return uids

    def are_gone(self, uids: Sequence[int]) -> bool:
        """Whether these adapter versions' blocks, KV and host copies are all freed."""
        self._registry.purge(self._manager.adapters)
        return not any(uid in self._manager.adapters for uid in uids)

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists if the name is taken."""
        self._registry.check_free(name)

    def invocation(self, name: str) -> tuple[int, ...]:
        """The tokens that an activated LoRA acts from; () for one that acts on every token. Raises NotFound."""
        return self._registry.get(name).alora_invocation_tokens

    def has_adapter(self, name: str) -> bool:
        """Whether an adapter of that name is in service."""
        try:
            self._registry.get(name)
        except NotFound:
            return False
        return True

    def pin_adapter(self, name: str, pinned: bool) -> AdapterInfo:
        """Pins (and brings in) or unpins. Raises NotFound, ResourceExhausted."""
        record = self._registry.get(name)
        self._pin(record, pinned)
        return record.info(time.monotonic())

    def hasten(self, name: str) -> None:
        """Somebody waits for the adapter's copy, if one is under way. Raises NotFound."""
        self._manager.hasten(self._registry.get(name).node)

    def adapter(self, name: str) -> AdapterInfo:
        """Raises NotFound."""
        return self._registry.get(name).info(time.monotonic())

    def adapters(self) -> list[AdapterInfo]:
        """In order of name."""
        now = time.monotonic()
        return [record.info(now) for record in self._registry.all()]

    def prefetch(self, request: Request) -> PrefetchResult:
        """A hint: starts the copies the request would need, over idle blocks and an idle link; says what is there."""
        origin = self._origin(request)[1]
        resident = origin.adapter.ready
        cached = self._manager.cached_tokens(origin, request.prompt)
        coming = self._manager.hint(origin, request.prompt)
        return PrefetchResult(resident, cached, coming * self.layout.block_bytes)

    def _place(self, new: NewAdapter) -> AdapterNode:
        """The adapter's node, its master copy written into the host tier."""
        size = len(new.packed.projections)
        most = self._manager.adapter_limit
        if size > most:
            raise ResourceExhausted(
                f"adapter {new.name!r} needs {size} blocks, and at most {most} of the pool's {self._manager.total} "
                f"can hold an adapter; raise cache.hbm_blocks{self._manager.share_hint}"
            )
        blocks = self._manager.reserve(size)
        if blocks is None:
            raise ResourceExhausted(
                f"adapter {new.name!r} needs {size} blocks of the host tier, which has no room beside its adapters "
                f"and the KV in use ({self._manager.host_use}); unload one, try again, or raise cache.host_blocks"
            )
        self._swapper.fill(blocks, new.packed.data)
        return self._manager.add_adapter(self._registry.new_uid(), blocks)

    def _take_over(self, record: Record, old: Record | None, pinned: bool) -> None:
        """Brings a new version in and ends the old one; all as before if there is no room for it."""
        was_pinned = old is not None and old.node.pinned
        if old is not None:  # its blocks may make room for the new version
            self._manager.pin(old.node, False)
        try:
            if pinned:
                self._pin(record, True)
            else:
                self._manager.bring_in(record.node)
        except ResourceExhausted:
            self._registry.remove(record.name)
            self._manager.kill(record.node)
            if old is not None:
                self._registry.add(old)
                self._manager.pin(old.node, was_pinned)
            raise
        if old is not None:
            self._manager.kill(old.node)

    def _pin(self, record: Record, pinned: bool) -> None:
        fits = not pinned or self._scheduler.can_pin(record.node)
        if not (fits and self._manager.pin(record.node, pinned)):
            raise ResourceExhausted(
                f"adapter {record.name!r} needs {record.node.size} blocks to be pinned, which the pool cannot spare "
                "now; try again later, or raise cache.hbm_blocks"
            )

    # -- the cache and the counters -----------------------------------------------------------

    def cache_state(self) -> CacheState:
        """Blocks by class and counters."""
        return inspect.state(self._manager, self.layout.block_bytes)

    def flush_cache(self) -> int:
        """Drops KV that no request uses; blocks freed."""
        return self._manager.flush()

    def check_integrity(self) -> None:
        """Raises AssertionError if a tier or the tree is inconsistent."""
        inspect.check_integrity(self._manager)

    def stats(self) -> EngineStats:
        """Counters since start."""
        c, s = self._counts, self._scheduler
        return EngineStats(
            running=len(s.running),
            waiting=s.waiting,
            live_requests=s.live,
            steps=c.steps,
            generated_tokens=c.generated,
            prompt_tokens=c.prompt,
            preemptions=s.preemptions,
            compiles_after_warmup=self.runner.compiles_after_warmup,
            host_step_s=c.host_s / max(c.steps, 1),
        )

    def close(self) -> None:
        """Ends the copies and frees the device; no other method may be called after it."""
        self._swapper.close()
        self.runner.close()
