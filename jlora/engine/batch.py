"""Turns a plan's work into the padded arrays of a launch. numpy only; the runner ships them.

A launch is a number of rows of equally many tokens. A decoding sequence is a row of one token. A
prompt chunk takes as many rows of `ROW` tokens as it needs, so long and short prompts share a
launch and only each one's last row has padding. The numbers of rows come from short lists, so
that everything is compiled at start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jlora.cache.tree import AdapterNode
from jlora.config import EngineConfig
from jlora.engine.plan import NOTHING, ROW, SCORED_CHUNK, Merged, Work
from jlora.engine.plan import Sequence as Seq
from jlora.layout import PoolLayout
from jlora.model.sampling import SampleBatch
from jlora.model.spec import PROJECTIONS, ModelSpec
from jlora.model.step import Batch
from jlora.validation import MAX_STOP_TOKENS

# adapter uid -> for each of its device blocks, the projection whose units it holds
Projections = Callable[[int], Sequence[str]]


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
        """The fewest that serve every launch. A scored chunk needs a small one: its logits take memory."""
        scored = _fitting(self.prefill, min(-(-SCORED_CHUNK // ROW), self.prefill[-1]))
        return Buckets(self.decode[-1:], tuple(sorted({scored, self.prefill[-1]})))

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


@dataclass(frozen=True, slots=True)
class Launch:
    """One forward: its work in row order and its arrays; `samples` are the rows that draw a token."""

    works: tuple[Work, ...]
    batch: Batch
    sampling: SampleBatch | None
    score_targets: np.ndarray | None = None

    @property
    def adapters(self) -> tuple[AdapterNode, ...]:
        """The adapters that act on any of its tokens, by their index in the batch."""
        return _adapters(self.works)

    @property
    def helped(self) -> bool:
        """Whether the host computes these adapters' part."""
        return any(work.helped for work in self.works)


@dataclass(slots=True)
class SlotTable:
    """Sampling parameters by slot, written when a sequence gets its slot, read every step."""

    values: Mapping[str, np.ndarray]
    eos_ids: frozenset[int]
    banned: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, slots: int, eos_ids: frozenset[int]) -> SlotTable:
        f, i = np.float32, np.int32
        kinds = {"temperature": f, "top_p": f, "min_p": f, "repetition": f, "presence": f, "frequency": f}
        kinds |= {"top_k": i, "completion": i, "tables": np.bool_, "logprobs": np.bool_}
        values: dict[str, Any] = {name: np.zeros(slots + 1, kind) for name, kind in kinds.items()}  # last row pads
        values["seed"] = np.zeros((slots + 1, 2), np.uint32)
        for name in ("top_p", "repetition"):
            values[name][slots] = 1
        return cls(values, eos_ids, [()] * slots)

    def set(self, sequence: Seq) -> None:
        """Writes a sequence's parameters into its slot."""
        p, slot = sequence.request.sampling, sequence.slot
        row = {
            "temperature": p.temperature,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition": p.repetition_penalty,
            "presence": p.presence_penalty,
            "frequency": p.frequency_penalty,
            "top_k": p.top_k,
            "completion": sequence.index,
            "tables": uses_tables(sequence),
            "logprobs": p.logprobs is not None,
            "seed": (sequence.seed >> 32, sequence.seed & 0xFFFFFFFF),
        }
        for name, value in row.items():
            self.values[name][slot] = value
        ends = set(p.stop_token_ids) | (set() if p.ignore_eos else self.eos_ids)
        self.banned[slot] = tuple(sorted(ends)) if p.min_tokens else ()


def uses_tables(sequence: Seq) -> bool:
    """Whether penalties or logit_bias need the slot's tables on the device."""
    p = sequence.request.sampling
    return bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


class BatchBuilder:
    """Assembles launches for one engine; `bare`: decode launches without adapters have programs of their own."""

    def __init__(
        self, layout: PoolLayout, config: EngineConfig, spec: ModelSpec, projections: Projections, bare: bool = False
    ):
        self.buckets = self.compiled = Buckets.of(config, bare)  # a launch takes the smallest compiled that holds it
        self.slots = SlotTable.of(config.max_seqs, frozenset(spec.eos_ids))
        self.max_len = spec.max_len
        self._layout = layout
        self._max_seqs = config.max_seqs
        self._width = layout.blocks_for(spec.max_len)
        self._vocab = spec.vocab
        self._banned = MAX_STOP_TOKENS + len(spec.eos_ids)  # most end tokens that min_tokens holds back
        self._projections = projections
        self._merged = NOTHING  # of the step whose launches are laid out
        self._adapters: tuple[tuple, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def by_projection(self, uid: int, blocks: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """An adapter's blocks of either tier by the projection whose units they hold."""
        held: dict[str, tuple[int, ...]] = {}
        for name, block in zip(self._projections(uid), blocks, strict=True):
            held[name] = (*held.get(name, ()), block)
        return held

    def launches(self, decode: Sequence[Work], prefill: Sequence[Work], merged: Merged = NOTHING) -> list[Launch]:
        """Every launch of a step, decode first; together they hold each work once."""
        self._merged = merged
        cold = [[w for w in works if w.helped] for works in (decode, prefill)]
        if any(cold):  # their layers run in parts: the others keep the usual programs
            warm = ([w for w in works if not w.helped] for works in (decode, prefill))
            return [*self._launches(*warm), *self._launches(*cold)]
        return self._launches(decode, prefill)

    def _launches(self, decode: Sequence[Work], prefill: Sequence[Work]) -> list[Launch]:
        out, merged = [], self._merged
        if decode:
            bare = bool(self.compiled.bare) and not any(merged.acts(w) for w in decode)
            rows = _fitting(self.compiled.bare if bare else self.compiled.decode, len(decode))
            out.append(self.launch(decode, rows, 1, bare))
        # A scored chunk runs alone: logits are taken of every token of its launch.
        groups = [[w] for w in prefill if _scores(w)] + [[w for w in prefill if not _scores(w)]]
        for group in filter(None, groups):
            out.append(self.launch(group, _fitting(self.compiled.prefill, sum(map(_rows, group))), ROW))
        return out

    def blank(self, rows: int, chunk: int, bare: bool = False) -> Launch:
        """A launch of nothing but padding, for warm-up; scored where scoring is possible."""
        launch = self.launch((), rows, chunk, bare)
        scored = chunk > 1 and (rows - 1) * chunk < SCORED_CHUNK
        targets = np.zeros(rows * chunk, np.int32) if scored else None
        return replace(launch, sampling=self._sampling((), len(launch.batch.last)), score_targets=targets)

    def launch(self, works: Sequence[Work], rows: int, chunk: int, bare: bool = False) -> Launch:
        """Lays `works` into `rows` rows of `chunk` tokens; `bare`: for the program without adapters."""
        size = self._layout.block_tokens
        tokens = np.zeros((rows, chunk), np.int32)
        source = np.full(rows, -1, np.int32)
        starts, counts = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        table = np.zeros((rows, self._width), np.int32)
        row_of = np.full(rows, -1, np.int32)  # index of the row's work
        last = np.zeros(max(self.buckets.decode[0], rows), np.int32)
        row = 0
        for i, (seq, start, count, _) in enumerate(works):
            blocks = seq.lease.blocks if seq.lease else ()
            table[row, : len(blocks)] = blocks
            for at in range(start, start + count, chunk):
                part = seq.tokens[at : min(at + chunk, start + count)]
                tokens[row, : len(part)] = part
                starts[row], counts[row], row_of[row] = at, min(chunk, start + count - at), i
                table[row] = table[row - 1] if at > start else table[row]
                row += 1
            if start + count > len(seq.tokens):  # the last token is still on the device
                source[row - 1] = seq.slot
            last[i] = (row - 1) * chunk + counts[row - 1] - 1
        offsets = np.arange(chunk, dtype=np.int32)
        positions = starts[:, None] + offsets
        page = np.take_along_axis(table, np.minimum(positions // size, self._width - 1), axis=1)
        adapters, (blocks, owners, ends) = self._active(works, row_of, positions)
        batch = Batch(
            tokens=tokens,
            source=source,
            starts=starts,
            lengths=starts + counts,
            write_rows=np.where(offsets < counts[:, None], page, -1).reshape(-1),
            write_slots=(positions % size).reshape(-1),
            table=table,
            adapters=adapters,
            blocks=blocks[:0] if bare else blocks,
            owners=owners[:0] if bare else owners,
            offsets=ends,
            last=last,
            merged=np.int32(self._merged.done),
        )
        sampling = self._sampling(works, len(last)) if any(w.samples for w in works) else None
        return Launch(tuple(works), batch, sampling, self._targets(works, rows * chunk))

    def _active(
        self, works: Sequence[Work], row_of: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Adapter index per token [T], and the blocks of the adapters that act on any, grouped by projection."""
        nodes = _adapters([w for w in works if self._merged.acts(w)])
        index = {node: i for i, node in enumerate(nodes)}
        of_work = np.array([index.get(w.sequence.adapter, -1) for w in works] + [-1], np.int32)
        acts_from = np.array([w.sequence.activation or 0 for w in works] + [0], np.int32)
        adapters = np.where(positions >= acts_from[row_of][:, None], of_work[row_of][:, None], -1).reshape(-1)
        key = tuple((node.uid, node.device) for node in nodes)
        if self._adapters is None or self._adapters[0] != key:
            self._adapters = (key, self._group(key))
        return adapters, self._adapters[1]

    def _group(self, key: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        by_projection: dict[str, list[tuple[int, int]]] = {name: [] for name in PROJECTIONS}
        for owner, (uid, blocks) in enumerate(key):
            for name, block in zip(self._projections(uid), blocks, strict=True):
                by_projection[name].append((block, owner))
        entries = [entry for name in PROJECTIONS for entry in by_projection[name]]
        lists = np.zeros((2, self._layout.blocks), np.int32)
        lists[:, : len(entries)] = np.array(entries, np.int32).reshape(-1, 2).T
        offsets = np.cumsum([0] + [len(by_projection[name]) for name in PROJECTIONS], dtype=np.int32)
        return lists[0], lists[1], offsets

    def _sampling(self, works: Sequence[Work], rows: int) -> SampleBatch:
        slot = np.full(rows, self._max_seqs, np.int32)  # outside: dropped
        position = np.zeros(rows, np.int32)
        banned = np.full((rows, self._banned), self._vocab, np.int32)
        for i, (seq, start, count, samples) in enumerate(works):
            if samples:
                slot[i] = seq.slot
                position[i] = start + count
                ids = self.slots.banned[seq.slot]
                if ids and start + count - seq.prompt_len < seq.request.sampling.min_tokens:
                    banned[i, : len(ids)] = ids
        v: dict[str, Any] = {name: values[slot] for name, values in self.slots.values.items()}
        v["logprobs"] = np.bool_(v["logprobs"].any())
        return SampleBatch(slot=slot, position=position, banned=banned, **v)

    def _targets(self, works: Sequence[Work], size: int) -> np.ndarray | None:
        """For a scored chunk, the token after each of its tokens."""
        if not works or not _scores(works[0]):
            return None
        seq, start, count, _ = works[0]
        targets = np.zeros(size, np.int32)
        after = seq.request.prompt[start + 1 : start + count + 1]
        targets[: len(after)] = after
        return targets
