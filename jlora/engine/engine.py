"""The engine: one replica's scheduler, cache and device, stepped from one thread. No jax, no clock of its own.

`step()` is the architecture. The engine plans and dispatches a step while the one before still
runs. The host reads sampled tokens one step late, so the device never waits for Python.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace

from jlora.cache import inspect
from jlora.cache.owners import owners
from jlora.cache.tree import Origin
from jlora.engine.faults import Faults
from jlora.engine.loading import Adapters
from jlora.engine.plan import ROW
from jlora.engine.ports import Parts, Pending
from jlora.engine.records import NewAdapter
from jlora.engine.shelf import Reading
from jlora.engine.switching import Switching
from jlora.errors import InvalidArgument, JloraError, ResourceExhausted
from jlora.types import CacheState, EngineStats, MergeState, Owners, PrefetchResult, Request, TokenEvent

WAIT_S = 0.002  # the longest pause of a step that has nothing to run
STALLED = 0.1  # of a step's time: after a longer wait for copies, its time says little of its work


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine's constants.

    Attributes:
        max_len: tokens of the longest context.
        block_bytes: of one block of the pool, all layers.
        overlap: plan the next step while one runs.
    """

    max_len: int
    block_bytes: int
    overlap: bool = True


@dataclass(slots=True)
class _Counts:
    committed: float = 0.0  # when the last step was committed
    steps: int = 0
    generated: int = 0
    prompt: int = 0
    plan_s: float = 0.0
    dispatch_s: float = 0.0
    read_s: float = 0.0
    commit_s: float = 0.0
    stalled_s: float = 0.0  # that the last dispatch waited for copies

    @property
    def host_s(self) -> float:
        return self.plan_s + self.dispatch_s + self.commit_s


class Engine:
    """Everything that one replica owns. All methods belong to one thread."""

    def __init__(self, parts: Parts, shape: Shape, switching: Switching | None = None):
        self._scheduler = parts.scheduler
        self._manager = parts.scheduler.manager
        self._registry = parts.registry
        self._runner = parts.runner
        self._swapper = parts.swapper
        self._clock = parts.clock
        self._shape = shape
        self._faults = Faults(parts)
        self._in_flight: Pending | None = None
        self._ended: list[TokenEvent] = []  # final events of aborted and stopped completions
        self._counts = _Counts()
        self._switching = switching
        self.adapters = Adapters(parts, switching)

    # -- the step ---------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is work for a step."""
        if self._switching is not None and self._switching.busy:
            return True
        return self._scheduler.live > 0 or self._in_flight is not None or bool(self._ended or self._faults.ended)

    def step(self) -> list[TokenEvent]:
        """Plans and dispatches a step, then commits the one before it.

        Without overlap, it commits the new step too. Returns the events of the committed steps, and of requests that
        ended in between.
        """
        counts, began = self._counts, self._clock()
        self._manager.landed(self._swapper.landed())
        self._faults.copies()
        self._ended += self._scheduler.expire(began)
        self._switch(began)
        self._manager.forecast.busy = self._in_flight is not None
        plan = self._faults.plan(began)
        self._swapper.start(plan.copies)
        planned = self._clock()
        pending = self._faults.run(plan) if plan.decode or plan.prefill else None
        counts.stalled_s = stalled_s = 0.0 if pending is None else pending.stalled_s
        counts.plan_s += planned - began
        counts.dispatch_s += self._clock() - planned - stalled_s
        # The dispatch of a helped step has waited for the host's part: overlapping it would only delay its tokens.
        overlaps = self._shape.overlap and not plan.helps
        done = [step for step in (self._in_flight, None if overlaps else pending) if step is not None]
        self._in_flight = pending if overlaps else None
        if pending is None and not done:
            self.rest()
        committed = [event for step in done for event in self._commit(step)]
        events, self._ended, self._faults.ended = committed + self._ended + self._faults.ended, [], []
        self._registry.purge(self._manager.adapters)
        return events

    def tend(self) -> bool:
        """Lets an idle engine's copies land and starts prefetches; returns whether it started any."""
        self._manager.landed(self._swapper.landed())
        self._faults.copies()
        if self._switching is not None:
            self._switching.decide(self._clock())
        copies = self._faults.tend(self._clock())
        self._swapper.start(copies)
        self._registry.purge(self._manager.adapters)
        return bool(copies)

    @property
    def copying(self) -> bool:
        """Whether copies between the tiers are under way."""
        return self._manager.flying

    @property
    def host_s(self) -> float:
        """Seconds that steps have taken since start, without waits for the device and for copies."""
        return self._counts.host_s

    def rest(self) -> None:
        """Pauses until a copy lands, for `WAIT_S` at most."""
        self._swapper.wait(WAIT_S)

    def _commit(self, done: Pending) -> list[TokenEvent]:
        waits = self._clock()
        drawn = done.read()
        self._counts.read_s += self._clock() - waits
        self._faults.copies()  # first: a step that read a copy that failed drew wrong tokens
        now = self._clock()
        events = self._faults.commit(done.plan, drawn, now)
        counts = self._counts
        prompt = sum(work.count for work in done.plan.prefill)
        if not done.plan.helps:
            step_s = now - max(counts.committed, done.dispatched)
            switches = self._switching is not None and self._switching.moved
            stalled = max(done.stalled_s, counts.stalled_s) > STALLED * step_s  # the last dispatch came before this
            meter = self._manager.policy.meter
            if not (prompt or switches or stalled):
                meter.observe_decode(step_s)
            if prompt >= ROW and not (switches or stalled):
                meter.observe_prefill(prompt, step_s)  # what a prompt token costs beside the running sequences
            if self._switching is not None:
                self._switching.observe(done.plan, step_s, stalled)
        counts.committed = now
        counts.steps += 1
        counts.prompt += prompt
        counts.generated += len([event for event in events if event.token_id is not None])
        counts.commit_s += self._clock() - now
        return events

    def _switch(self, now: float) -> None:
        """Changes the weights a little, if they are to change; steps on their way read the old ones."""
        if self._switching is None:
            return
        self._switching.decide(now)
        if not self._switching.advance():
            self._manager.flush()  # KV may be of wrong weights

    # -- requests ---------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises what `submit` raises, except for a full queue."""
        origin = self._origin(request)
        self._fitted(request, origin)
        if origin.adapter.gone:
            self.adapters.check_host(origin.adapter.uid)

    def submit(self, request: Request, arrived: float | None = None) -> int:
        """Queues a validated request and returns its handle. `arrived` is when it came; None is now.

        An unset `max_tokens` becomes the room that the context, and the pool beside the adapter, leave.

        Raises:
            NotFound, InvalidArgument: see `AdapterRegistry.resolve`.
            ResourceExhausted: the pool can never hold it beside its adapter, the host tier can never hold the
                adapter beside pinned ones, or the queue is full.
        """
        origin = self._origin(request)
        fitted = self._fitted(request, origin)
        if origin.adapter.gone or origin.adapter.reading:
            origin = origin._replace(adapter=self.adapters.expect(origin.adapter.uid))
        arrived = self._clock() if arrived is None else arrived
        handle = self._scheduler.submit(fitted, origin.adapter, arrived, origin.activation)
        self._registry.touch(origin.adapter.uid, arrived)
        return handle

    def abort(self, handle: int, moved: bool = False) -> bool:
        """Ends a request, frees its blocks at once, and returns whether it was live.

        `moved`: another replica continues it.
        """
        ended = self._scheduler.abort(handle, self._clock(), moved)
        self._ended += ended
        return bool(ended)

    def stop(self, handle: int, index: int, outputs: int) -> None:
        """Ends one completion after `outputs` tokens: its text has a stop string there."""
        self._ended += self._scheduler.stop(handle, index, outputs, self._clock())

    def prefetch(self, request: Request) -> PrefetchResult:
        """A hint: starts the copies that the request would need, over idle blocks and an idle link."""
        origin = self._origin(request)
        self._fitted(request, origin)
        if origin.adapter.gone or origin.adapter.reading:
            coming = self.adapters.hint(origin.adapter.uid)
            return PrefetchResult(False, 0, coming * self._shape.block_bytes)
        resident = origin.adapter.ready
        cached = self._manager.cached_tokens(origin, request.prompt)
        coming = self._manager.hint(origin, request.prompt)
        return PrefetchResult(resident, cached, coming * self._shape.block_bytes)

    def arrived(self, reading: Reading, new: NewAdapter) -> None:
        """Marks an adapter as read from the disk into its host blocks."""
        if self.adapters.arrive(reading, new):
            self._scheduler.arrived(reading.node, self._clock())

    def unread(self, reading: Reading, error: Exception) -> None:
        """Ends the requests that wait for an adapter that could not be read from the disk."""
        self._ended += self._scheduler.fail_adapter(reading.node, error, self._clock())
        self.adapters.missed(reading, error)

    def _origin(self, request: Request) -> Origin:
        """What the request's KV depends on: the adapter version that answers it, its tenant, its activation."""
        if request.adapter is None:
            return Origin(self._manager.base, request.salt)
        record, activation = self._registry.resolve(request.adapter, request.prompt, request.invocation)
        return Origin(self._manager.base if record is None else record.node, request.salt, activation)

    def _fitted(self, request: Request, origin: Origin) -> Request:
        """The request with `max_tokens` set. Raises ResourceExhausted if the pool can never hold it."""
        sampling, prompt = request.sampling, len(request.prompt)
        capacity = self._manager.capacity(origin.adapter)
        if sampling.max_tokens is None:
            most = max(1, min(capacity, self._shape.max_len) - prompt)
            if sampling.min_tokens > most:
                raise InvalidArgument(f"min_tokens = {sampling.min_tokens}: must be at most max_tokens, here {most}")
            if any(not done.ended and len(done.tokens) >= most for done in request.done):
                raise ResourceExhausted(f"done: another replica has drawn more than the {most} tokens that fit here")
            sampling = replace(sampling, max_tokens=most)
            request = replace(request, sampling=sampling)
        length = prompt + (sampling.max_tokens or 1)
        if length > capacity:
            adapter, pinned = origin.adapter, self._manager.pins(without=origin.adapter).pinned
            beside = f" beside the {pinned} blocks of pinned adapters; unpin one, or" if pinned else ";"
            raise ResourceExhausted(
                f"prompt + max_tokens = {length} tokens (and the adapter's {adapter.size} blocks) can never "
                f"fit the pool of {self._manager.total} blocks{beside} raise cache.hbm_blocks"
            )
        return request

    # -- the cache and the counters -----------------------------------------------------------

    def cache_state(self) -> CacheState:
        """Blocks by class, adapters by tier, and counters."""
        return inspect.state(self._manager, self._shape.block_bytes, self._where())

    def _where(self) -> dict[str, int]:
        manager, registry = self._manager, self._registry
        removed = [node for node in registry.removed if node.uid in manager.adapters]
        return inspect.where(manager, registry.count, self.adapters.shelf.reading, removed)

    def owners(self) -> Owners:
        """The owner of each block of the device; takes milliseconds."""
        return owners(self._manager)

    @property
    def countable(self) -> bool:
        """Whether `cache_state` takes constant time."""
        return inspect.countable(self._manager)

    def flush_cache(self) -> int:
        """Drops KV that no request uses; returns the number of blocks freed."""
        return self._manager.flush()

    def check_integrity(self) -> None:
        """Raises AssertionError if a tier, the tree or the scheduler is inconsistent."""
        inspect.check_integrity(self._manager)
        counted, found = self._where(), self.adapters.records()
        tiers = Counter(f"adapters_{record.tier.lower()}" for record in found)
        reading = sum(record.node.reading for record in found)
        tiers.update({"adapters_registered": len(found), "adapters_reading": reading})
        assert counted == {name: tiers[name] for name in counted}, f"adapters are miscounted: {counted}, not {tiers}"
        self._scheduler.check_integrity()
        if self._switching is not None:
            self._switching.check()

    def survive(self, error: Exception) -> None:
        """Handles an error that a command raised.

        A refusal changes nothing. After any other error, it raises AssertionError if something is left half done.
        """
        if not isinstance(error, JloraError | CancelledError):  # a refusal, and a caller that has gone
            self._faults.survive(error)

    def stats(self) -> EngineStats:
        """Counters since start."""
        c, s = self._counts, self._scheduler
        merge = MergeState() if self._switching is None else self._switching.state()
        return EngineStats(
            running=s.active,
            waiting=s.pending,
            live_requests=s.live,
            steps=c.steps,
            generated_tokens=c.generated,
            prompt_tokens=c.prompt,
            preemptions=s.preemptions,
            compiles_after_warmup=self._runner.compiles_after_warmup,
            programs_left=self._runner.programs_left,
            host_step_s=c.host_s / max(c.steps, 1),
            plan_s=c.plan_s,
            dispatch_s=c.dispatch_s,
            read_s=c.read_s,
            commit_s=c.commit_s,
            merge=merge,
        )

    def close(self) -> None:
        """Ends the copies' threads and frees the device. Nothing else may be called afterwards."""
        self.adapters.save()
        self._swapper.close()
        self._runner.close()
