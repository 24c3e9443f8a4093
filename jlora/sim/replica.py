"""One replica under a virtual clock: the product's scheduler, cache and policy; the device is modelled.

`Replica.step` is `Engine.step` line by line: copies that have landed, expiry, plan, copies to
start, dispatch, then the results of the step before. What differs is where time comes from:

    dispatch      the step begins when the device is free, and lasts as long as `StepModel` says
    read          moves the clock to the end of the step that is read
    rest          moves the clock to the next copy that lands, or a little

So plan N+1 is made when N-1 has ended, while N runs; a request that comes meanwhile waits for the
next plan; the meter measures virtual seconds. A token is a hash of its request and position: the
same after a preemption, different between requests, and repeated by the session's next prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.policies import Policy
from jlora.cache.tree import AdapterNode, Origin
from jlora.config import CacheConfig, EngineConfig
from jlora.engine.plan import ROW, Drawn, StepPlan, Work
from jlora.engine.scheduler import Scheduler
from jlora.errors import ConfigError
from jlora.sim.hardware import StepLoad, StepModel
from jlora.sim.link import Link, LinkSpec
from jlora.types import Request, TokenEvent

REST_S = 0.002  # as `Engine.rest`
START_S = 1.0  # the clock at the start: 0 means "never" in the cache's records
IDLE_ROUNDS = 50  # rounds of the monitor that are passed over once one of an idle replica has decided nothing
NOTHING = Drawn()


class Clock:
    """Virtual seconds; they only grow."""

    def __init__(self, now: float = START_S):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, to: float) -> None:
        """Moves on to `to`, if that is later."""
        self.now = max(self.now, to)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica is made of.

    Attributes:
        sizes: blocks of both tiers, tokens of a block.
        adapters: blocks of each adapter, by its index.
    """

    model: StepModel
    link: LinkSpec
    sizes: Sizes
    adapters: tuple[int, ...]
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()


@dataclass(slots=True)
class Counts:
    """Since the start. `busy_s`: of the device; `batch`: sum over steps of the sequences in them."""

    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    batch: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Pending:
    plan: StepPlan
    prompt: int
    dispatched: float
    end: float


@dataclass(slots=True)
class _Batch:
    """Adds up a step's work."""

    context: int = 0
    pairs: float = 0.0
    adapter_tokens: int = 0
    adapters: dict[int, int] = field(default_factory=dict)

    def add(self, work: Work) -> None:
        sequence, start, count, _ = work
        self.context += start + count
        self.pairs += count * (start + (count + 1) / 2)
        node = sequence.adapter
        acted_on = min(count, start + count - (sequence.activation or 0))  # an activated LoRA's part of the chunk
        if acted_on > 0:
            self.adapters[node.uid] = node.size
            self.adapter_tokens += acted_on * node.size


class Replica:
    """Scheduler, cache and modelled device of one replica.

    Raises:
        ConfigError: the host tier cannot hold the adapters.
    """

    def __init__(self, spec: ReplicaSpec, policy: Policy):
        self.spec = spec
        self.clock = Clock()
        self.counts = Counts()
        self.manager = CacheManager(
            spec.sizes, policy, self.clock, spec.cache.prefix_reuse, spec.link.groups > 1, spec.cache.monitor_s
        )
        self.scheduler = Scheduler(self.manager, spec.engine, eos_ids=())
        self._free_at = 0.0  # when the device will have done all that was dispatched
        self._committed = 0.0
        self._in_flight: _Pending | None = None
        self._settled = False  # idle, and the monitor has nothing to do
        self.link = Link(spec.link, self.clock, lambda: self._free_at)
        self.adapters = [self._add(uid, size) for uid, size in enumerate(spec.adapters, 1)]

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.live > 0 or self._in_flight is not None

    def submit(self, request: Request, adapter: int | None, at: float, activation: int | None = None) -> None:
        """Queues a request that came at `at`, not later than now; as `Scheduler.submit`."""
        node = self.manager.base if adapter is None else self.adapters[adapter]
        self.scheduler.submit(request, node, at, activation)

    def hint(self, tokens: Sequence[int], adapter: int | None, tenant: str, activation: int | None = None) -> None:
        """`Prefetch`: somebody is about to go on from these tokens."""
        self._settled = False
        node = self.manager.base if adapter is None else self.adapters[adapter]
        self.manager.hint(Origin(node, tenant, activation), tokens)

    def step(self, until: float) -> list[TokenEvent]:
        """One engine step; rests, if there is nothing to run, until `until` at most."""
        clock, manager, scheduler = self.clock, self.manager, self.scheduler
        self._settled = False
        manager.landed(self.link.landed())
        events = scheduler.expire(clock.now)
        plan = scheduler.plan(clock.now)
        self.link.start(plan.copies)
        pending = self._dispatch(plan) if plan.decode or plan.prefill else None
        overlap = self.spec.engine.overlap
        done, self._in_flight = (self._in_flight, pending) if overlap else (pending, None)
        if done is not None:
            clock.advance(done.end)
            return events + self._commit(done)
        if pending is None:
            clock.advance(min(until, clock.now + REST_S, self.link.next_landing()))
        return events

    def idle(self, until: float) -> None:
        """What an idle engine does until `until`, or until its monitor's next round.

        While nothing is used and nothing lands, a round decides what the one before decided: after
        one that decided nothing, only every so many are made.
        """
        pause = self.spec.cache.monitor_s * (IDLE_ROUNDS if self._settled else 1)
        self.clock.advance(min(until, self.clock.now + pause, self.link.next_landing()))
        self.manager.landed(self.link.landed())
        copies = self.scheduler.tend(self.clock.now)
        self.link.start(copies)
        self._settled = not copies and not self.manager.flying

    # -- inside -----------------------------------------------------------------------------

    def _add(self, uid: int, size: int) -> AdapterNode:
        blocks = self.manager.reserve(size)
        if blocks is None:
            raise ConfigError(
                f"the adapters need {sum(self.spec.adapters)} blocks of host memory, and the host tier has "
                f"{self.spec.sizes.host}; raise --host-gb"
            )
        node = self.manager.add_adapter(uid, blocks)
        self.manager.bring_in(node)  # a loaded adapter goes to blocks that are free anyway
        return node

    def _dispatch(self, plan: StepPlan) -> _Pending:
        batch = _Batch()
        for work in plan.decode:
            batch.add(work)
        for work in plan.prefill:
            batch.add(work)
        prompt = sum(work.count for work in plan.prefill)
        blocks = sum(batch.adapters.values())
        load = StepLoad(prompt, len(plan.decode), batch.context, batch.pairs, blocks, batch.adapter_tokens)
        seconds = self.spec.model.seconds(load)
        begin = max(self.clock.now, self._free_at)
        self._free_at = self._stream(plan, begin, seconds) if plan.streams else begin + seconds
        counts = self.counts
        counts.steps += 1
        counts.prompt_tokens += prompt
        counts.batch += len(plan.decode) + len(plan.prefill)
        counts.busy_s += seconds
        return _Pending(plan, prompt, self.clock.now, self._free_at)

    def _stream(self, plan: StepPlan, begin: float, seconds: float) -> float:
        """When a step ends whose groups of layers wait for what they read; the host waits for the last to come."""
        groups = self.spec.link.groups
        end = begin
        for group in range(groups):
            came = max(self.link.arrival(copy, group) for copy in plan.streams)
            self.clock.advance(came)
            end = max(end, came) + seconds / groups
        return end

    def _commit(self, done: _Pending) -> list[TokenEvent]:
        now = self.clock.now
        drawn = [_drawn(work) for work in done.plan.work]
        events = self.scheduler.commit(done.plan, drawn, now)
        if done.prompt >= ROW:  # what a prompt token costs beside the running sequences, as the engine measures it
            seconds = now - max(self._committed, done.dispatched)
            self.manager.policy.meter.observe_prefill(done.prompt, seconds)
        self._committed = now
        self.counts.tokens += sum(event.token_id is not None for event in events)
        return events


def token(seed: int, position: int) -> int:
    """The token that a request of this seed has at this position: a hash, in [0, 2^30)."""
    mixed = (seed * 0x9E3779B1 + position * 0x85EBCA6B) & 0xFFFFFFFF
    return ((mixed ^ mixed >> 15) * 0x2C1B3C6D >> 2) & 0x3FFFFFFF


def answer(seed: int, prompt: int, count: int) -> Sequence[int]:
    """The first `count` tokens after a prompt of so many."""
    return [token(seed, prompt + i) for i in range(count)]


def _drawn(work: Work) -> Drawn:
    if not work.samples:
        return NOTHING
    return Drawn(token(work.sequence.seed, work.start + work.count))
