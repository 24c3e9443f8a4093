"""Runs plans on the device: pads, dispatches, and reads back one step later."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from jlora.cache.pool import DevicePool
from jlora.cache.transfer import Copy
from jlora.engine.batch import BatchBuilder, Launch, uses_tables
from jlora.engine.plan import Drawn, Sequence, StepPlan
from jlora.model.llama import Params
from jlora.model.sampling import Sampled, SlotState
from jlora.model.step import Programs, group_layers
from jlora.types import TokenLogprob

BIASES = 1024  # most logit_bias entries of a request


class Arrivals(Protocol):
    """Where streamed copies come in (`Swapper`)."""

    def place(self, copy: Copy, group: int) -> None:
        """Enqueues what has come of the copy up to this group of layers; waits until it has."""
        ...


@dataclass(frozen=True, slots=True)
class Pending:
    """A dispatched step: when that was, its launches, the device arrays that will hold their results."""

    plan: StepPlan
    dispatched: float
    launches: list[Launch]
    sampled: list[Sampled | None]
    scores: list[tuple[jax.Array, jax.Array, jax.Array] | None]

    def read(self) -> list[Drawn]:
        """Waits for the step; results in the order of `plan.work`."""
        drawn: dict[tuple[int, int], Drawn] = {}
        for launch, sampled, score in zip(self.launches, self.sampled, self.scores, strict=True):
            tokens = np.asarray(sampled.token).tolist() if sampled is not None else []
            report = _read_report(launch, sampled)
            for row, work in enumerate(launch.works):
                key = (work.sequence.order, work.start)
                token = tokens[row] if work.samples else None
                logprob = report(row, token) if token is not None else None
                drawn[key] = Drawn(token, logprob, _prompt_logprobs(launch, score))
        return [drawn[w.sequence.order, w.start] for w in self.plan.work]


class Runner:
    """The device side of an engine: weights, pool, slot state and the jitted programs."""

    def __init__(self, params: Params, programs: Programs, pool: DevicePool, state: SlotState, builder: BatchBuilder):
        self._params = params
        self._programs = programs
        self._pool = pool
        self._state = state
        self._builder = builder
        self._vocab = state.seen.shape[1]
        self._warmed = 0

    def build(self, plan: StepPlan) -> list[Launch]:
        """A step's launches: reads the sequences as they are now."""
        for work in plan.work:
            if not work.sequence.set_up:
                self._set_up(work.sequence)
        return self._builder.launches(plan.decode, plan.prefill)

    def run(self, plan: StepPlan, launches: list[Launch], arrivals: Arrivals) -> Pending:
        """Dispatches a step; returns at once, or when the last of `plan.streams` has come."""
        results = []
        for launch in launches:
            streams = plan.streams if launch.batch.tokens.shape[1] > 1 else ()
            results.append(self._dispatch(launch, streams, arrivals))
        return Pending(plan, time.monotonic(), launches, [s for s, _ in results], [s for _, s in results])

    def warm_up(self) -> Iterator[str]:
        """Compiles and calls every program; yields a name after each. Touches no live block."""
        buckets = self._builder.buckets
        for rows, chunk in buckets.shapes:
            blank = self._builder.blank(rows, chunk)
            self._dispatch(blank)
            if chunk > 1 and self._pool.groups > 1:
                self._streamed(blank, (), None)
            yield f"{rows}x{chunk}"
        for rows in buckets.bare:
            self._dispatch(self._builder.blank(rows, 1, bare=True))
            yield f"{rows}x1 without adapters"
        self._reset(0, (), (), {})
        self._pool.warm_up()
        jax.block_until_ready(self._pool.array)
        self._warmed = self._compiled()
        yield "copies"

    def close(self) -> None:
        """Frees the device: weights, pool and slot state."""
        for leaf in jax.tree.leaves((self._params, self._pool.array, self._state)):
            leaf.delete()

    @property
    def programs(self) -> int:
        """How many names `warm_up` yields."""
        return len(self._builder.buckets.shapes) + len(self._builder.buckets.bare) + 1

    @property
    def compiles_after_warmup(self) -> int:
        """Programs compiled since warm-up: 0, or a shape was missed."""
        return self._compiled() - self._warmed

    def _compiled(self) -> int:
        return sum(f._cache_size() for f in self._programs)  # pyright: ignore[reportFunctionMemberAccess]

    def _dispatch(self, launch: Launch, streams: Iterable[Copy] = (), arrivals: Arrivals | None = None):
        sampled = scores = None
        if streams:
            rows, hidden = self._streamed(launch, streams, arrivals)
        else:
            pool, last = self._pool.array, self._state.last
            self._pool.array, rows, hidden = self._programs.forward(self._params, pool, last, launch.batch)
        if launch.sampling is not None:
            self._state, sampled = self._programs.sample(self._params, rows, self._state, launch.sampling)
        if launch.score_targets is not None:
            scores = self._programs.score(self._params, hidden, launch.score_targets)
        return sampled, scores

    def _streamed(self, launch: Launch, streams: Iterable[Copy], arrivals: Arrivals | None):
        """A forward in groups of layers, each behind the arrival of what it reads."""
        programs, size = self._programs, self._pool.group_layers
        batch = jax.device_put(launch.batch)  # once for all groups
        x = programs.embed(self._params["embed"], self._state.last, batch)
        for group in range(self._pool.groups):
            for copy in streams:
                assert arrivals is not None
                arrivals.place(copy, group)
            weights = group_layers(self._params, group, size)
            first = np.int32(group * size)
            self._pool.array, x = programs.layers(weights, self._pool.array, x, first, batch)
        return programs.finish(self._params["norm"], x, batch)

    def _set_up(self, sequence: Sequence) -> None:
        self._builder.slots.set(sequence)
        if uses_tables(sequence):
            prompt, output = sequence.request.prompt, sequence.tokens[sequence.prompt_len :]
            self._reset(sequence.slot, prompt, output, sequence.request.sampling.logit_bias)
        sequence.set_up = True

    def _reset(self, slot: int, prompt, output, bias: Mapping[int, float]) -> None:
        length = self._builder.max_len
        ids = _padded(list(bias), BIASES, self._vocab, np.int32)
        values = _padded(list(bias.values()), BIASES, 0, np.float32)
        prompt, output = (_padded(t, length, self._vocab, np.int32) for t in (prompt, output))
        self._state = self._programs.reset_slot(self._state, np.int32(slot), prompt, output, (ids, values))


def _padded(values, size: int, pad: int, dtype) -> np.ndarray:
    out = np.full(size, pad, dtype)
    out[: len(values)] = values
    return out


def _read_report(launch: Launch, sampled: Sampled | None):
    """A function (row, token) -> TokenLogprob or None; reads the device only if someone asked."""
    wanted = [w.sequence.request.sampling.logprobs for w in launch.works]
    if sampled is None or all(k is None for k in wanted):
        return lambda row, token: None
    own, ids, tops = (np.asarray(a) for a in (sampled.logprob, sampled.top_ids, sampled.top_logprobs))

    def report(row: int, token: int) -> TokenLogprob | None:
        k = wanted[row]
        if k is None:
            return None
        return TokenLogprob(token, float(own[row]), _pairs(ids[row], tops[row], k))

    return report


def _prompt_logprobs(launch: Launch, score) -> tuple[TokenLogprob, ...]:
    if score is None or launch.score_targets is None:
        return ()
    work = launch.works[0]
    k = work.sequence.request.sampling.prompt_logprobs or 0
    own, ids, tops = (np.asarray(a) for a in score)
    count = min(work.count, work.sequence.prompt_len - 1 - work.start)
    targets = launch.score_targets
    return tuple(TokenLogprob(int(targets[i]), float(own[i]), _pairs(ids[i], tops[i], k)) for i in range(count))


def _pairs(ids: np.ndarray, values: np.ndarray, k: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[:k].tolist(), values[:k].tolist(), strict=True))
