"""Turns a plan's work into the padded arrays of a launch. numpy only; the runner ships them.

A launch is a number of rows of equally many tokens. A decoding sequence is a row of one token. A
prompt chunk takes as many rows of `ROW` tokens as it needs, so long and short prompts share a
launch and only each one's last row has padding. The numbers of rows come from short lists, so
that everything is compiled at start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from jlora.cache.tree import AdapterNode
from jlora.config import EngineConfig
from jlora.engine.plan import NOTHING, ROW, SCORED_CHUNK, StepPlan, Work
from jlora.engine.slots import PageTables, SlotTable
from jlora.layout import PoolLayout
from jlora.model.packed import Packed
from jlora.model.spec import PROJECTIONS, ModelSpec
from jlora.model.step import Batch, record_type

# adapter uid -> for each of its device blocks, the projection whose units it holds
Projections = Callable[[int], Sequence[str]]


SETS = 8  # of adapters that decode together or whose prompts are computed together: their lists are kept


@dataclass(slots=True, eq=False)
class Lists:
    """The blocks of the adapters that act in a launch: see `jlora.model.step.Batch`.

    Attributes:
        host: [2, M]. offsets: [8]. device: the runner's copy of `host`; launches of the same adapters share it.
    """

    host: np.ndarray
    offsets: np.ndarray
    device: Any = None


class Form(NamedTuple):
    """The compiled form of a launch: rows of `chunk` tokens; `bare`: without adapters."""

    rows: int
    chunk: int
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """Every compiled number of rows: `decode` with one token each, `prefill` with ROW tokens each.

    `bare` are decode sizes that are also compiled without adapters, for launches that have none.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    bare: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig, bare: bool = False) -> Buckets:
        """Powers of two with half steps: rows up to max_seqs, prompts up to max_step_tokens.

        One decoding sequence is padded to two rows unless `config.one_row` is "on".

        Decode has half steps only above 16 rows: below, a step costs the reading of the weights.
        `bare` has every other decode size and the largest: a padding row costs little where it is
        used (`device.has_bare`), a program seconds of compilation.
        """
        most = -(-config.max_step_tokens // ROW)
        small = (2, 4, 8, 16) if config.one_row != "on" else (1, 2, 4, 8, 16)
        rows = _up_to(config.max_seqs, [n for n in _sizes(2 * config.max_seqs) if n > 16 or n in small])
        return cls(rows, _up_to(most, _sizes(2 * most)), rows[::-2][::-1] if bare else ())

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens per row) of every forward program with adapters."""
        return [(rows, 1) for rows in self.decode] + [(rows, ROW) for rows in self.prefill]

    @property
    def largest(self) -> Buckets:
        """The fewest that serve every launch. A scored chunk needs a small one: its logits take memory.

        With the largest bare one: else a request without an adapter pays for adapters while the others compile.
        """
        scored = _fitting(self.prefill, min(-(-SCORED_CHUNK // ROW), self.prefill[-1]))
        return Buckets(self.decode[-1:], tuple(sorted({scored, self.prefill[-1]})), self.bare[-1:])

    def forms(self) -> list[Form]:
        """Small ones first: they serve one client."""
        bare = [Form(rows, 1, bare=True) for rows in self.bare]
        return sorted([Form(*shape) for shape in self.shapes] + bare, key=lambda form: form.rows * form.chunk)

    def having(self, form: Form) -> Buckets:
        """These and one more."""
        name = "bare" if form.bare else "decode" if form.chunk == 1 else "prefill"
        return replace(self, **{name: tuple(sorted({*getattr(self, name), form.rows}))})


def _sizes(limit: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to `limit`."""
    powers = [1 << i for i in range(limit.bit_length())]
    return sorted(n for n in {*powers, *(p * 3 // 2 for p in powers[1:])} if n <= max(limit, 2))


def _up_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes up to the first that holds `most`."""
    return tuple(n for n in sizes if n <= next(size for size in sizes if size >= most))


def _fitting(sizes: Sequence[int], rows: int) -> int:
    return next(n for n in sizes if n >= rows)


def _rows(work: Work) -> int:
    return -(-work.count // ROW)


def _scores(work: Work) -> bool:
    """Whether the chunk brings prompt log-probabilities: its hidden states are read one by one."""
    sequence = work.sequence
    return sequence.prompt_logprobs is not None and work.start < sequence.prompt_len - 1


def _adapters(works: Sequence[Work]) -> tuple[AdapterNode, ...]:
    return tuple(dict.fromkeys(w.sequence.adapter for w in works if w.adapted))


Draws = Literal["greedy", "drawn", "sample"]  # fields of `Programs`, from the least to what serves every launch


@dataclass(frozen=True, slots=True)
class Launch:
    """One forward: its work in row order and its arrays; `sampling` says which rows draw a token, and how.

    Attributes:
        reports: whether a row that draws a token reports log-probabilities.
        helped: the host computes its adapters' part.
    """

    works: tuple[Work, ...]
    form: Form
    record: Packed
    lists: Lists
    sampling: Packed | None
    score_targets: np.ndarray | None = None
    reports: bool = False
    helped: bool = False

    @property
    def batch(self) -> Batch:
        """As the host has it."""
        return Batch(self.record, self.lists.host)

    @property
    def draws(self) -> Draws:
        """The least of the programs that draw its tokens, where there are several."""
        assert self.sampling is not None
        f = self.sampling.fields()
        hot = f["temperature"] > 0
        cut = hot & ((f["top_k"] > 0) | (f["top_p"] < 1) | (f["min_p"] > 0))
        if (cut | (f["tables"] > 0) | (f["logprobs"] > 0) | (f["position"] < f["until"])).any():
            return "sample"
        return "drawn" if hot.any() else "greedy"

    @property
    def adapters(self) -> tuple[AdapterNode, ...]:
        """The adapters that act on any of its tokens, by their index in the batch."""
        return _adapters(self.works)


class Standing:
    """The last launch of sequences that decode. The next one of the same sequences says nearly the same.

    Attributes:
        key: what the launch says, but for positions, tokens and blocks.
    """

    def __init__(self, key: tuple[Any, ...], launch: Launch, works: Sequence[Work], pages: PageTables):
        self.key = key
        self._launch = launch
        self._pages = pages
        self._record = launch.record.copy()  # the device may still read the launch's own
        self._fields = self._record.fields()
        self._slots = np.array([w.sequence.slot for w in launch.works], np.int32)
        places = {work: place for place, work in enumerate(works)}
        self._order = [places[work] for work in launch.works]
        self._tokens: list[int] = []  # what the record says of them, once it has been written to
        self._blocks: list[tuple[int, ...]] = []

    def again(self, works: Sequence[Work]) -> Launch:
        """The launch of the next step; `works` are of the same sequences, in the same order."""
        works, count = tuple([works[place] for place in self._order]), len(works)
        starts, known = [w.start for w in works], [w.sequence.tokens for w in works]
        self._fields["starts"][:count] = starts
        at = zip(known, starts, strict=True)
        tokens = [of[start] if start < len(of) else -1 for of, start in at]  # -1: on the device
        if tokens != self._tokens:
            self._tokens, ids = tokens, np.array(tokens, np.int32)
            self._fields["tokens"][:count, 0] = np.maximum(ids, 0)
            self._fields["source"][:count] = np.where(ids < 0, self._slots, -1)
        blocks = [lease.blocks for w in works if (lease := w.sequence.lease) is not None]
        if blocks != self._blocks:
            self._blocks, self._fields["table"][:count] = blocks, self._pages.rows(works)
        launch, sampling = self._launch, self._launch.sampling
        if sampling is not None:
            sampling = sampling.copy()
            sampling.words[:count, sampling.first_word("position")] = self._fields["starts"][:count] + 1
        return Launch(works, launch.form, self._record.copy(), launch.lists, sampling, reports=launch.reports)


class BatchBuilder:
    """Assembles launches for one engine; `bare`: decode launches without adapters have programs of their own."""

    def __init__(
        self, layout: PoolLayout, config: EngineConfig, spec: ModelSpec, projections: Projections, bare: bool = False
    ):
        self.buckets = self.compiled = Buckets.of(config, bare)  # a launch takes the smallest compiled that holds it
        self.slots = SlotTable(config.max_seqs, frozenset(spec.eos_ids))
        self.max_len = spec.max_len
        self._pages = PageTables(config.max_seqs, layout.blocks_for(spec.max_len))
        self._layout = layout
        self._max_seqs = config.max_seqs
        self._width = layout.blocks_for(spec.max_len)
        self._projections = projections
        self._merged = NOTHING  # of the step whose launches are laid out
        self._standing: Standing | None = None  # the last launch of sequences that decode
        self._kept: dict[tuple[Any, bool], Lists] = {}  # the last used last

    def by_projection(self, uid: int, blocks: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """An adapter's blocks of either tier by the projection whose units they hold."""
        held: dict[str, tuple[int, ...]] = {}
        for name, block in zip(self._projections(uid), blocks, strict=True):
            held[name] = (*held.get(name, ()), block)
        return held

    def launches(self, plan: StepPlan) -> list[Launch]:
        """Every launch of a step, decode first; together they hold each work once."""
        self._merged = plan.merged
        if not plan.helps:
            return self._launches(plan.decode, plan.prefill)
        parts = plan.decode, plan.prefill
        cold = [[w for w in works if w.helped] for works in parts]
        warm = [[w for w in works if not w.helped] for works in parts]
        # Layers of the cold ones run in parts: the others keep the usual programs.
        return [*self._launches(*warm), *(replace(launch, helped=True) for launch in self._launches(*cold))]

    def _launches(self, decode: Sequence[Work], prefill: Sequence[Work]) -> list[Launch]:
        out = [self._decode(decode)] if decode else []
        # A scored chunk runs alone: logits are taken of every token of its launch.
        groups = [[w] for w in prefill if _scores(w)] + [[w for w in prefill if not _scores(w)]]
        for group in filter(None, groups):
            out.append(self.launch(group, _fitting(self.compiled.prefill, sum(map(_rows, group))), ROW))
        return out

    def _decode(self, works: Sequence[Work]) -> Launch:
        """The launch of sequences that decode, made from the last one if that was of the same sequences."""
        key = [w.sequence for w in works], self.slots.version, self._merged, self.compiled
        if self._standing is not None and self._standing.key == key:
            return self._standing.again(works)
        # While programs compile, the bare ones may all be too small.
        bare = max(self.compiled.bare, default=0) >= len(works) and not any(self._merged.acts(w) for w in works)
        rows = _fitting(self.compiled.bare if bare else self.compiled.decode, len(works))
        launch = self.launch(works, rows, 1, bare)
        self._standing = Standing(key, launch, works, self._pages)
        return launch

    def blank(self, rows: int, chunk: int, bare: bool = False) -> Launch:
        """A launch of nothing but padding, for warm-up; scored where scoring is possible."""
        launch = self.launch((), rows, chunk, bare)
        scored = chunk > 1 and (rows - 1) * chunk < SCORED_CHUNK
        targets = np.zeros(rows * chunk, np.int32) if scored else None
        return replace(launch, sampling=self._sampling((), rows), score_targets=targets)

    def launch(self, works: Sequence[Work], rows: int, chunk: int, bare: bool = False) -> Launch:
        """Lays `works` into `rows` rows of `chunk` tokens; `bare`: for the program without adapters.

        Rows of one adapter follow each other, so that few tiles of rows hold its tokens (`reference.lora`).
        """
        nodes = tuple(dict.fromkeys(w.sequence.adapter for w in works if self._merged.acts(w)))
        index = {node: i for i, node in enumerate(nodes)}
        if len(index) > 1:
            works = sorted(works, key=lambda work: index.get(work.sequence.adapter, len(index)))
        lists = self._lists(() if bare else tuple((node.uid, node.device) for node in nodes), bare)
        record = Packed.zeros(record_type(rows, chunk, self._width, self._reads(rows)))
        fields = record.fields()
        fields["source"][:] = fields["adapters"][:] = -1
        fields["offsets"][:], fields["merged"][...] = lists.offsets, self._merged.done
        if works:
            self._fill(fields, works, index)
        sampling = self._sampling(works, rows) if any(w.samples for w in works) else None
        targets = self._targets(works, rows * chunk)
        reports = any(w.samples and w.sequence.request.sampling.logprobs is not None for w in works)
        return Launch(tuple(works), Form(rows, chunk, bare), record, lists, sampling, targets, reports)

    def _fill(self, fields: Mapping[str, np.ndarray], works: Sequence[Work], index: Mapping[AdapterNode, int]) -> None:
        """Writes the works' rows into a launch's record. A work's rows follow each other."""
        chunk, tokens = fields["tokens"].shape[1], fields["tokens"].reshape(-1)
        starts, counts = np.array([w.start for w in works]), np.array([w.count for w in works])
        rows = -(-counts // chunk)
        after = np.cumsum(rows)  # each work's last row, and one
        of, n = np.repeat(np.arange(len(works)), rows), after[-1]
        at = (np.arange(n) - (after - rows)[of]) * chunk  # tokens of the work before the row
        fields["starts"][:n] = starts[of] + at
        fields["counts"][:n] = np.minimum(chunk, counts[of] - at)
        fields["last"][: len(works)] = (after - rows) * chunk + counts - 1
        for work, end in zip(works, after.tolist(), strict=True):
            known = work.sequence.tokens[work.start : work.start + work.count]
            if len(known) < work.count:  # the last one is still on the device
                fields["source"][end - 1] = work.sequence.slot
            if known:
                first = (end - -(-work.count // chunk)) * chunk
                tokens[first : first + len(known)] = known
        fields["table"][:n] = self._pages.rows(works)[of]
        fields["adapters"][:n] = np.array([index.get(w.sequence.adapter, -1) for w in works])[of]
        fields["acting"][:n] = np.array([w.sequence.activation or 0 for w in works])[of]

    def _reads(self, rows: int) -> int:
        """Rows that a launch samples from, with padding: one alone may be slow, and no sequence has two."""
        return max(self.buckets.decode[0], min(rows, self.buckets.decode[-1]))

    def _lists(self, adapters: tuple[tuple[int, tuple[int, ...]], ...], bare: bool) -> Lists:
        """The lists of these adapters, kept for later launches of the same."""
        key = adapters, bare
        self._kept[key] = lists = self._kept.pop(key, None) or self._group(adapters, bare)
        if len(self._kept) > SETS:
            del self._kept[next(iter(self._kept))]
        return lists

    def _group(self, adapters: Sequence[tuple[int, Sequence[int]]], bare: bool) -> Lists:
        """The blocks of these adapters, by uid, grouped by projection."""
        by_projection: dict[str, list[tuple[int, int]]] = {name: [] for name in PROJECTIONS}
        for owner, (uid, blocks) in enumerate(adapters):
            for name, block in zip(self._projections(uid), blocks, strict=True):
                by_projection[name].append((block, owner))
        entries = [entry for name in PROJECTIONS for entry in by_projection[name]]
        lists = np.zeros((2, 0 if bare else self._layout.blocks), np.int32)
        lists[:, : len(entries)] = np.array(entries, np.int32).reshape(-1, 2).T
        return Lists(lists, np.cumsum([0] + [len(by_projection[name]) for name in PROJECTIONS], dtype=np.int32))

    def _sampling(self, works: Sequence[Work], rows: int) -> Packed:
        slots = np.full(self._reads(rows), self._max_seqs, np.int32)  # outside: dropped
        slots[: len(works)] = [w.sequence.slot if w.samples else self._max_seqs for w in works]
        return self.slots.rows(slots, np.array([w.start + w.count for w in works], np.int32))

    def _targets(self, works: Sequence[Work], size: int) -> np.ndarray | None:
        """For a scored chunk, the token after each of its tokens."""
        if not works or not _scores(works[0]):
            return None
        first = works[0]
        targets = np.zeros(size, np.int32)
        after = first.sequence.request.prompt[first.start + 1 : first.start + first.count + 1]
        targets[: len(after)] = after
        return targets
