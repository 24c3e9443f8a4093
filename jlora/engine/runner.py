"""Runs plans on the device: pads, dispatches, and reads back one step later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from threading import get_ident
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Wrapped

from jlora.cache.pool import DevicePool, as_shortage
from jlora.cache.transfer import Copy
from jlora.engine.ahead import Ahead, First
from jlora.engine.assist import Assist, Shares
from jlora.engine.batch import BatchBuilder, Form, Launch
from jlora.engine.compiles import COMPILES
from jlora.engine.host_lora import Share
from jlora.engine.plan import ROW, Drawn, StepPlan, Work
from jlora.engine.plan import Sequence as Running
from jlora.engine.ports import Swapper, Undone
from jlora.engine.slots import uses_tables
from jlora.model.llama import Params
from jlora.model.sampling import Sampled, SlotState
from jlora.model.spec import PROJECTIONS
from jlora.model.step import Batch, group_layers, head_of
from jlora.ports import Clock
from jlora.types import TokenLogprob

_Scores = tuple[jax.Array, jax.Array, jax.Array]
_Result = tuple[Sampled | None, _Scores | None]

BIASES = 1024  # most logit_bias entries of a request


@dataclass(frozen=True, slots=True)
class Weights:
    """The base model's parameters on the device. Every swap makes a new version, from 0 on."""

    version: int
    params: Params


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step on its way: see `jlora.engine.ports.Pending`.

    Attributes:
        weights: the version that it computes with.
        launches: its launches. sampled, scores: the device arrays that will hold their results.
    """

    plan: StepPlan
    dispatched: float
    stalled_s: float
    weights: int
    launches: list[Launch]
    sampled: list[Sampled | None]
    scores: list[_Scores | None]

    def read(self) -> list[Drawn]:
        """Waits for the step; results in the order of `plan.work`."""
        drawn: dict[Running, Drawn] = {}
        for launch, sampled, score in zip(self.launches, self.sampled, self.scores, strict=True):
            drawn.update(zip([w.sequence for w in launch.works], _drawn(launch, sampled, score), strict=True))
        return [drawn[work.sequence] for work in self.plan.work]


class Left(NamedTuple):
    """What `Runner.warm_up` leaves for later.

    Attributes:
        grouped: the form's programs for launches behind copies on their way, not those that it always runs.
    """

    form: Form
    grouped: bool = False


class Runner:
    """The device side of an engine: weights, pool, slot state and the jitted programs."""

    def __init__(
        self,
        params: Params,
        pool: DevicePool,
        state: SlotState,
        builder: BatchBuilder,
        ahead: Ahead,
        clock: Clock,
    ):
        self._weights = Weights(0, params)
        self._programs = ahead.programs
        self.pool = pool
        self.builder = builder  # lays launches out
        self._state = state
        self._clock = clock
        self._vocab = state.seen.shape[1]
        self._met: set[tuple] = set()  # kinds of launches whose programs are compiled
        self._ahead = ahead
        self._assist: Assist | None = None
        self._left: dict[Left, Launch] = {}
        self._whole = True  # no form lacks programs that did not compile
        self._warmed = get_ident(), COMPILES.count  # by thread: compilations before it began to serve
        self.compiling = False
        self.compiled_at = 0.0

    @property
    def weights(self) -> Weights:
        """The parameters that the next step computes with."""
        return self._weights

    def swap_weights(self, params: Params) -> Weights:
        """Replaces the parameters from the next step on, without a recompile. Call it between two steps.

        Steps on their way finish with the version that they were dispatched with. KV in the pool stays
        as the versions before computed it: the caller flushes what must not outlive them.

        Raises:
            ValueError: an array differs from the present one in place, shape, dtype or sharding.
        """
        if _shapes(params) != _shapes(self._weights.params):
            raise ValueError("params: every array must have the place, shape, dtype and sharding of the present one")
        self._weights = Weights(self._weights.version + 1, params)
        return self._weights

    def accept(self, assist: Assist) -> None:
        """Lets the host help with adapters that are on their way; call it before `warm_up`."""
        self._assist, self._ahead.helps = assist, True

    def run(self, plan: StepPlan, swapper: Swapper) -> Dispatched:
        """Dispatches a step. See `jlora.engine.ports.Runner`."""
        at: Sequence[Work] = ()  # what a failure is due to, if that is one sequence's work
        launches: list[Launch] = []
        arrivals = _Arrivals(swapper)
        results: list[_Result] = []
        try:
            for work in [work for work in plan.work if not work.sequence.set_up]:  # first: a launch reads their slots
                at = (work,)
                self._set_up(work.sequence)
            at = plan.work
            launches = self.builder.launches(plan)
            with self._watched(launches, bool(plan.streams)):
                for launch in launches:
                    at = launch.works
                    results.append(self._dispatch(launch, _copies_of(launch, plan), arrivals))
        except Exception as error:
            if self.pool.lost or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
                raise  # a failed program has taken them: nothing is left to go on with
            launches = launches[: len(results)]
            part, undone = _split(plan, launches)
            done = self._dispatched(part, launches, results, arrivals) if results else None
            sequence = at[0].sequence if len(at) == 1 else None
            raise Undone(done, undone, sequence) from as_shortage(error)
        return self._dispatched(plan, launches, results, arrivals)

    def _dispatched(
        self, plan: StepPlan, launches: list[Launch], results: list[_Result], arrivals: _Arrivals
    ) -> Dispatched:
        sampled, scores = [s for s, _ in results], [s for _, s in results]
        return Dispatched(plan, self._clock(), arrivals.waited_s, self._weights.version, launches, sampled, scores)

    @contextmanager
    def _watched(self, launches: Sequence[Launch], streamed: bool = False) -> Iterator[None]:
        """Says so while launches compile programs that no launch has run yet."""
        programs = set[tuple]()
        for launch in launches:
            programs.update(_programs_of(launch, launch.helped or (streamed and launch.form.chunk > 1)))
        self.compiling = not programs <= self._met
        try:
            yield
        finally:
            if self.compiling:
                self._met |= programs
                self.compiled_at = self._clock()
            self.compiling = False

    def warm_up(self, first: First) -> Iterator[str]:
        """Calls the programs that serve every launch as they come from `Ahead.begin`; yields their names.

        The others are `left`: until they are admitted, a launch takes a larger one, and none runs behind copies
        on their way. Touches no live block.
        """
        blanks = first.blanks
        self.builder.compiled = self.builder.buckets.largest
        self._left = {Left(form): blank for form, blank in blanks.items() if form not in first.compiled}
        self._left |= {Left(form, True): blank for form, blank in blanks.items() if self._ahead.grouped(form)}
        self._reset(0, (), (), {})
        self.pool.warm_up()
        yield "copies"
        for form, compiled in first.compiled.items():
            compiled.result()
            with self._watched([blanks[form]]):
                self._dispatch(blanks[form], _Copies(), _Arrivals(None))
            yield f"{form.rows}x{form.chunk}{' bare' * form.bare}"
        jax.block_until_ready(self.pool.array)
        self._warmed = get_ident(), COMPILES.count

    def rehearse(self, tokens: int, blocks: int | None) -> float:
        """Seconds of a forward with the host's help, for an adapter of so many blocks per projection; 0: of the base.

        None: of the base as a whole. It touches no live block. Call it between two steps.
        """
        chunk = min(ROW, tokens)
        blank = self.builder.blank(tokens // chunk, chunk)
        share = Share(np.arange(tokens), dict.fromkeys(PROJECTIONS, (0,) * (blocks or 0)))
        batch = jax.device_put(blank.batch, self._state.last.sharding)
        jax.block_until_ready(self.pool.array)  # what was dispatched before is not measured
        began = self._clock()
        if blocks is None:
            jax.block_until_ready(self._forward(blank))
            return self._clock() - began
        assert self._assist is not None
        x = self._programs.embed(self._weights.params["embed"], self._state.last, batch)
        layers, shares = range(self.pool.group_layers), [share] if blocks else []  # of one group: a step goes on sooner
        jax.block_until_ready(self._assist.run(self._weights.params, layers, self.pool, (x, batch), shares))
        return self.pool.groups * (self._clock() - began)

    @property
    def largest(self) -> tuple[int, ...]:
        """Tokens of the prompt forms that `warm_up` compiles."""
        return tuple(rows * ROW for rows in self.builder.buckets.largest.prefill)

    @property
    def needed(self) -> int:
        """How many names `warm_up` yields."""
        return 1 + len(self.builder.buckets.largest.forms())

    @property
    def left(self) -> tuple[Left, ...]:
        """What `warm_up` has left: compile each on any thread, then admit it."""
        return tuple(self._left)

    @property
    def programs_left(self) -> int:
        return len(self._left)

    @property
    def takes_groups(self) -> bool:
        """Whether every launch may run in groups of layers, behind copies on their way."""
        return self._whole and not any(left.grouped for left in self._left)

    def compile(self, left: Left) -> None:
        """Compiles what is left of a form. Any thread may call it while steps run."""
        compile_it = self._ahead.compile_groups if left.grouped else self._ahead.compile
        compile_it(self._left[left])

    def admit(self, left: Left) -> None:
        """Lets launches take what is compiled from now on. Call it between two steps."""
        self._met |= set(_programs_of(self._left.pop(left), left.grouped))
        if not left.grouped:
            self.builder.compiled = self.builder.compiled.having(left.form)

    def drop(self, left: Left) -> None:
        """Does without what does not compile: larger forms stand in; without groups of layers, launches wait."""
        del self._left[left]
        self._whole = self._whole and not left.grouped

    def close(self) -> None:
        """Frees the device: weights, pool and slot state."""
        if self._assist is not None:
            self._assist.close()
        for leaf in jax.tree.leaves((self._weights.params, self.pool.array, self._state)):
            leaf.delete()

    @property
    def compiles_after_warmup(self) -> int:
        """Programs compiled since warm-up: 0, or a shape was missed. Counts the calling thread's, the engine's."""
        thread, count = self._warmed
        return COMPILES.count - (count if thread == get_ident() else 0)

    def forward(self, launch: Launch) -> jax.Array:
        """Dispatches a launch's forward pass alone; its rows' hidden states."""
        return self._forward(launch)[0]

    def _forward(self, launch: Launch) -> tuple[jax.Array, jax.Array]:
        pool, last = self.pool.array, self._state.last
        if launch.lists.device is None:
            launch.lists.device = jax.device_put(launch.lists.host, last.sharding)
        batch = Batch(launch.record, launch.lists.device)
        self.pool.array, rows, hidden = self._programs.forward(self._weights.params, pool, last, batch)
        return rows, hidden

    def _drawing(self, launch: Launch) -> list[Wrapped]:
        """The program that draws a launch's tokens; of a warm-up's, all that may."""
        p = self._programs
        if p.greedy is None or p.drawn is None:
            return [p.sample]
        return [getattr(p, launch.draws)] if launch.works else [p.greedy, p.drawn, p.sample]

    def _dispatch(self, launch: Launch, copies: _Copies, arrivals: _Arrivals) -> _Result:
        sampled = scores = None
        if copies:
            shares = self._shares(launch, copies.helped) if copies.helped else None
            rows, hidden = self._grouped(launch, copies, arrivals, shares)
        else:
            rows, hidden = self._forward(launch)
        head = head_of(self._weights.params)
        if launch.score_targets is not None:
            scores = self._programs.score(head, hidden, launch.score_targets)
        if launch.sampling is not None:  # last: until then, the launch can be dispatched again
            for draw in self._drawing(launch):
                self._state, sampled = draw(head, rows, self._state, launch.sampling)
        return sampled, scores

    def _grouped(self, launch: Launch, copies: _Copies, arrivals: _Arrivals, shares: Shares | None = None):
        """A forward in groups of layers, each behind the arrival of what it reads.

        With `shares`, the host computes these as long as not all of `copies.helped` has come.
        """
        programs, params, size = self._programs, self._weights.params, self.pool.group_layers
        batch = jax.device_put(launch.batch, self._state.last.sharding)  # once for all groups
        x = programs.embed(params["embed"], self._state.last, batch)
        for group in range(self.pool.groups):
            for copy in copies.streamed:
                arrivals.place(copy, group)
            first = group * size
            if shares is not None and not arrivals.complete(copies.helped, group):
                assert self._assist is not None
                x = self._assist.run(params, range(first, first + size), self.pool, (x, batch), shares)
            else:
                weights = group_layers(params, group, size)
                self.pool.array, x = programs.layers(weights, self.pool.array, x, np.int32(first), batch)
        return programs.finish(params["norm"], x, batch)

    def _shares(self, launch: Launch, helped: Sequence[Copy]) -> list[Share]:
        """What the host computes of a launch: each adapter's tokens, and its blocks in the host tier."""
        sources, shares = {copy.adapter: copy.source for copy in helped}, list[Share]()
        fields = launch.batch.fields(self.pool.layout.block_tokens)
        for index, adapter in enumerate(launch.adapters):
            rows = np.flatnonzero((fields.adapters == index) & (fields.write_rows >= 0))
            shares.append(Share(rows, self.builder.by_projection(adapter.uid, sources[adapter])))
        return shares

    def _set_up(self, sequence: Running) -> None:
        self.builder.slots.set(sequence)
        if uses_tables(sequence):
            prompt, output = sequence.request.prompt, sequence.tokens[sequence.prompt_len :]
            self._reset(sequence.slot, prompt, output, sequence.request.sampling.logit_bias)
        sequence.set_up = True

    def _reset(self, slot: int, prompt, output, bias: Mapping[int, float]) -> None:
        length = self.builder.max_len
        ids = _padded(list(bias), BIASES, self._vocab, np.int32)
        values = _padded(list(bias.values()), BIASES, 0, np.float32)
        prompt, output = (_padded(t, length, self._vocab, np.int32) for t in (prompt, output))
        self._state = self._programs.reset_slot(self._state, np.int32(slot), prompt, output, (ids, values))


class _Arrivals:
    """Where a step's streamed copies come in, and how long the host waited for them."""

    def __init__(self, swapper: Swapper | None):
        self._swapper = swapper
        self.waited_s = 0.0

    def place(self, copy: Copy, group: int) -> None:
        assert self._swapper is not None, "a warm-up streams nothing"
        self.waited_s += self._swapper.place(copy, group)

    def complete(self, copies: Sequence[Copy], group: int) -> bool:
        """Whether a group of layers of all these copies has come, and makes it visible then."""
        if self._swapper is None or not all(self._swapper.arrived(copy, group) for copy in copies):
            return False
        for copy in copies:
            self.place(copy, group)
        return True


class _Copies(NamedTuple):
    """The copies under way that a launch reads: it waits for the streamed ones, the host helps with the others."""

    streamed: tuple[Copy, ...] = ()
    helped: tuple[Copy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.streamed or self.helped)


def _copies_of(launch: Launch, plan: StepPlan) -> _Copies:
    streams = plan.streams if launch.form.chunk > 1 else ()
    if not launch.helped:
        return _Copies(streams)
    return _Copies(streams, tuple(copy for copy in plan.helps if copy.adapter in launch.adapters))


def _split(plan: StepPlan, launches: Sequence[Launch]) -> tuple[StepPlan, tuple[Work, ...]]:
    """The part of the plan that these launches carry out, and the other works."""
    done = {work for launch in launches for work in launch.works}
    decode, prefill = (tuple(work for work in works if work in done) for works in (plan.decode, plan.prefill))
    return replace(plan, decode=decode, prefill=prefill), tuple(work for work in plan.work if work not in done)


def _programs_of(launch: Launch, grouped: bool) -> Iterator[tuple]:
    """The programs that a launch runs, in groups of layers or not, each by what tells its compiled forms apart."""
    form = launch.form
    yield "forward", form, grouped
    if launch.sampling is not None:
        yield "sample", len(launch.sampling.words)
    if launch.score_targets is not None:
        yield "score", form


def _shapes(params: Params) -> list:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(path, leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in leaves]


def _padded(values, size: int, pad: int, dtype) -> np.ndarray:
    out = np.full(size, pad, dtype)
    out[: len(values)] = values
    return out


def _drawn(launch: Launch, sampled: Sampled | None, score: _Scores | None) -> list[Drawn]:
    """Waits for a launch; the results of its works."""
    scored = _prompt_logprobs(launch, score)
    if sampled is None:
        return [Drawn(prompt_logprobs=scored) for _ in launch.works]
    tokens = np.asarray(sampled.token).tolist()
    reports = _reports(launch.works, tokens, sampled) if launch.reports else repeat(None)
    rows = zip(launch.works, tokens, reports, strict=False)  # behind them is padding
    return [Drawn(token if work.samples else None, report, scored) for work, token, report in rows]


def _reports(works: Sequence[Work], tokens: list[int], sampled: Sampled) -> list[TokenLogprob | None]:
    """The log-probabilities of each work that asks for them."""
    wanted = [w.sequence.request.sampling.logprobs if w.samples else None for w in works]
    own, ids, tops = (np.asarray(a) for a in (sampled.logprob, sampled.top_ids, sampled.top_logprobs))
    return [
        None if k is None else TokenLogprob(tokens[row], float(own[row]), _pairs(ids[row], tops[row], k))
        for row, k in enumerate(wanted)
    ]


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
