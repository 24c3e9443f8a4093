"""A modelled device, which is the engine's runner under a virtual clock. No jax.

A step begins when the device is free, and lasts as long as `StepModel` says.
A token is a hash of its request's seed and its position. So it survives a preemption, it differs
between requests, and the session's next prompt can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jlora.cache.transfer import Copy
from jlora.engine.cold_start import Costs
from jlora.engine.plan import NOTHING, ROW, Drawn, Merged, StepPlan, Work
from jlora.engine.ports import Swapper
from jlora.sim.clock import VirtualClock
from jlora.step_model import FittedSteps, StepLoad, StepModel


@dataclass(slots=True)
class DeviceCounts:
    """Totals since the start. `batch`: sum over steps of their sequences; `busy_s`: seconds of computing."""

    steps: int = 0
    prompt_tokens: int = 0
    batch: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """A dispatched step; see `jlora.engine.ports.Pending`. `end`: time at which the device finishes it."""

    plan: StepPlan
    dispatched: float
    stalled_s: float
    end: float
    clock: VirtualClock

    def read(self) -> list[Drawn]:
        self.clock.advance(self.end)
        return [
            Drawn(token(work.sequence.seed, work.start + work.count)) if work.samples else Drawn()
            for work in self.plan.work
        ]


class ModelledDevice:
    """Runs plans in the time of a step model; at `free_at` it finishes all dispatched steps."""

    compiling = False
    compiled_at = 0.0
    compiles_after_warmup = 0
    programs_left = 0
    kernel: Callable[[StepPlan], float] | None = None  # seconds that another kernel adds for the adapters of a plan

    def __init__(
        self, model: StepModel | FittedSteps, groups: int, clock: VirtualClock, host: HelpingHost | None = None
    ):
        self.counts = DeviceCounts()
        self.free_at = 0.0
        self._model = model
        self._groups = groups  # of layers in a streamed copy
        self._clock = clock
        self._host = host

    def run(self, plan: StepPlan, swapper: Swapper) -> ModelledStep:
        began = self._clock.now
        seconds = seconds_of(self._model, plan) + (self.kernel(plan) if self.kernel else 0.0)
        begin = max(began, self.free_at)
        self.free_at = self._stream(plan, swapper, begin, seconds) if plan.streams or plan.helps else begin + seconds
        counts = self.counts
        counts.steps += 1
        counts.prompt_tokens += sum(work.count for work in plan.prefill)
        counts.batch += len(plan.decode) + len(plan.prefill)
        counts.busy_s += seconds
        now = self._clock.now
        return ModelledStep(plan, now, now - began, self.free_at, self._clock)

    def keep(self, seconds: float) -> None:
        """Computes something else for so long, after what was dispatched."""
        self.free_at = max(self._clock.now, self.free_at) + seconds
        self.counts.busy_s += seconds

    def close(self) -> None:
        """Holds no resources."""

    def _stream(self, plan: StepPlan, swapper: Swapper, begin: float, seconds: float) -> float:
        """End of a step whose groups of layers wait for the streamed copies that they read.

        The host's part of a group adds to its time, as long as the adapter's copy of the group has not come.
        """
        end = begin
        for group in range(self._groups):
            for copy in plan.streams:
                swapper.place(copy, group)
            end = max(end, self._clock.now)
            added = self._host.seconds(plan, group, end) if self._host else 0.0
            end += (seconds + added) / self._groups
        return end


@dataclass(frozen=True, slots=True)
class HelpingHost:
    """The host's part of a cold start, for adapters that act at `places` of a layer.

    `arrival` gives the time at which a group of layers of a copy has come.
    """

    costs: Costs
    places: int
    arrival: Callable[[Copy, int], float]

    def seconds(self, plan: StepPlan, group: int, now: float) -> float:
        """What it adds to a step if it computes every layer as it does this group's."""
        missing = {copy.adapter for copy in plan.helps if self.arrival(copy, group) > now}
        added = 0.0
        for work in plan.work:
            adapter = work.sequence.adapter
            if adapter in missing:
                added += self.places * self.costs.place.at(work.count)
                added += adapter.size * self.costs.block.at(work.count)
        return added


def seconds_of(model: StepModel | FittedSteps, plan: StepPlan) -> float:
    """Of a step."""
    if not isinstance(model, FittedSteps):
        return model.seconds(load_of(plan.decode, plan.prefill, plan.merged))
    launches = ((plan.decode, ()), ((), plan.prefill))
    return model.seconds(*(load_of(*works, plan.merged) for works in launches if any(works)))


def load_of(decode: Sequence[Work], prefill: Sequence[Work], merged: Merged = NOTHING) -> StepLoad:
    """The work of a step, or of one of its launches."""
    context, pairs, adapter_tokens = 0, 0.0, 0
    adapters: dict[int, int] = {}
    for work in (*decode, *prefill):
        sequence, start, count = work.sequence, work.start, work.count
        context += start + count
        pairs += count * (start + (count + 1) / 2)
        node = sequence.adapter
        acted_on = min(count, start + count - (sequence.activation or 0))  # an activated LoRA's part of the chunk
        if acted_on > 0 and merged.acts(work):
            adapters[node.uid] = node.size
            adapter_tokens += acted_on * node.size
    prompt, rows = sum(work.count for work in prefill), len(decode) + sum(-(-work.count // ROW) for work in prefill)
    return StepLoad(prompt, len(decode), context, pairs, sum(adapters.values()), adapter_tokens, rows)


def token(seed: int, position: int) -> int:
    """The token at this position of a request with this seed, in [0, 2^30)."""
    mixed = (seed * 0x9E3779B1 + position * 0x85EBCA6B) & 0xFFFFFFFF
    return ((mixed ^ mixed >> 15) * 0x2C1B3C6D >> 2) & 0x3FFFFFFF


def answer(seed: int, prompt: int, count: int) -> Sequence[int]:
    """The first `count` tokens after a prompt of `prompt` tokens."""
    return [token(seed, prompt + i) for i in range(count)]
