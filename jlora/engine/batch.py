"""Turns a plan's work into the padded arrays of a launch. numpy only; the runner ships them.

Shapes come from a short list of buckets, so that everything is compiled at start: decode rows
are powers of two; a prompt chunk runs alone in the next larger chunk size, short ones together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jlora.config import EngineConfig
from jlora.engine.plan import SCORED_CHUNK, Work
from jlora.engine.plan import Sequence as Seq
from jlora.layout import PoolLayout
from jlora.model.sampling import SampleBatch
from jlora.model.spec import PROJECTIONS
from jlora.model.step import Batch

SHORT = (16, 64)  # chunk sizes in which several prompts share a launch
BANNED = 96  # most end tokens that min_tokens can hold back: a request's 64 and the model's

# adapter uid -> for each of its device blocks, the projection whose units it holds
Projections = Callable[[int], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Buckets:
    """Every compiled shape: `decode` rows with one token, `chunks` (rows, tokens)."""

    decode: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: EngineConfig) -> Buckets:
        """Powers of two up to max_seqs; chunk sizes up to max_step_tokens, half steps from 64 on."""
        decode = [2]
        while decode[-1] < config.max_seqs:
            decode.append(decode[-1] * 2)
        sizes = [16]
        while sizes[-1] < config.max_step_tokens:
            last = sizes[-1]
            power = last & (last - 1) == 0
            sizes.append(last * 3 // 2 if power and last >= 64 else (last * 2 if power else last * 4 // 3))
        chunks = [(1, c) for c in sizes]
        chunks += [(rows, c) for rows in (2, 4, 8) for c in SHORT if c <= sizes[-1] and rows <= config.max_seqs]
        return cls(tuple(decode), tuple(chunks))

    def decode_rows(self, rows: int) -> int:
        return next(n for n in self.decode if n >= rows)

    def chunk(self, rows: int, tokens: int) -> tuple[int, int]:
        return min((s, c) for s, c in self.chunks if s >= rows and c >= tokens)

    def groups(self, works: Sequence[Work]) -> list[list[Work]]:
        """Splits prompt work into launches: long chunks alone, short ones of like size together."""
        alone = [[w] for w in works if w.count > SHORT[-1] or _scores(w)]
        most = max(rows for rows, _ in self.chunks)
        for low, high in zip((0, *SHORT), SHORT, strict=False):
            like = [w for w in works if low < w.count <= high and not _scores(w)]
            alone += [like[i : i + most] for i in range(0, len(like), most)]
        return alone


def _scores(work: Work) -> bool:
    """Whether the chunk brings prompt log-probabilities: its hidden states are read one by one."""
    sequence = work.sequence
    return sequence.prompt_logprobs is not None and work.start < sequence.prompt_len - 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One forward: its work in row order and its arrays; `samples` are the rows that draw a token."""

    works: tuple[Work, ...]
    batch: Batch
    sampling: SampleBatch | None
    score_targets: np.ndarray | None = None


@dataclass(slots=True)
class SlotTable:
    """Sampling parameters by slot, written when a sequence gets its slot, read every step."""

    values: Mapping[str, np.ndarray]
    banned: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, slots: int) -> SlotTable:
        f, i = np.float32, np.int32
        kinds = {"temperature": f, "top_p": f, "min_p": f, "repetition": f, "presence": f, "frequency": f}
        kinds |= {"top_k": i, "completion": i, "tables": np.bool_, "logprobs": np.bool_}
        values = {name: np.zeros(slots + 1, kind) for name, kind in kinds.items()}  # last row pads
        values["seed"] = np.zeros((slots + 1, 2), np.uint32)
        for name in ("top_p", "repetition"):
            values[name][slots] = 1
        return cls(values, [()] * slots)

    def set(self, sequence: Seq, eos_ids: frozenset[int]) -> None:
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
        ends = set(p.stop_token_ids) | (set() if p.ignore_eos else eos_ids)
        self.banned[slot] = tuple(sorted(ends)) if p.min_tokens else ()


def uses_tables(sequence: Seq) -> bool:
    """Whether penalties or logit_bias need the slot's tables on the device."""
    p = sequence.request.sampling
    return bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


class BatchBuilder:
    """Assembles launches for one engine."""

    def __init__(self, layout: PoolLayout, config: EngineConfig, max_len: int, vocab: int, projections: Projections):
        self.buckets = Buckets.of(config)
        self.slots = SlotTable.of(config.max_seqs)
        self._layout = layout
        self._max_seqs = config.max_seqs
        self._width = layout.blocks_for(max_len)
        self._vocab = vocab
        self.max_len = max_len
        self._projections = projections
        self._adapters: tuple[tuple, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def launches(self, decode: Sequence[Work], prefill: Sequence[Work]) -> list[Launch]:
        """Every launch of a step, decode first; together they hold each work once."""
        out = []
        if decode:
            out.append(self.launch(decode, self.buckets.decode_rows(len(decode)), 1))
        for group in self.buckets.groups(prefill):
            rows, chunk = self.buckets.chunk(len(group), max(w.count for w in group))
            out.append(self.launch(group, rows, chunk))
        return out

    def blank(self, rows: int, chunk: int) -> Launch:
        """A launch of nothing but padding, for warm-up; scored where scoring is possible."""
        launch = self.launch((), rows, chunk)
        scored = rows == 1 and chunk <= SCORED_CHUNK
        sampling = self._sampling((), len(launch.batch.last))
        return replace(launch, sampling=sampling, score_targets=np.zeros(chunk, np.int32) if scored else None)

    def launch(self, works: Sequence[Work], rows: int, chunk: int) -> Launch:
        """Pads `works` to `rows` sequences of `chunk` tokens."""
        size = self._layout.block_tokens
        tokens = np.zeros((rows, chunk), np.int32)
        source = np.full(rows, -1, np.int32)
        starts, lengths, counts = (np.zeros(rows, np.int32) for _ in range(3))
        table = np.zeros((rows, self._width), np.int32)
        for i, (seq, start, count, _) in enumerate(works):
            known = seq.tokens[start : start + count]
            tokens[i, : len(known)] = known
            if len(known) < count:  # the last token is still on the device
                source[i] = seq.slot
            starts[i], counts[i] = start, count
            blocks = seq.lease.blocks if seq.lease else ()
            table[i, : len(blocks)] = blocks
        lengths = starts + counts
        offsets = np.arange(chunk, dtype=np.int32)
        positions = starts[:, None] + offsets
        inside = offsets < counts[:, None]
        page = np.take_along_axis(table, np.minimum(positions // size, self._width - 1), axis=1)
        adapters, active = self._active(works, rows)
        batch = Batch(
            tokens=tokens,
            source=source,
            starts=starts,
            lengths=lengths,
            write_rows=np.where(inside, page, -1).reshape(-1),
            write_slots=(positions % size).reshape(-1),
            table=table,
            adapters=adapters,
            blocks=active[0],
            owners=active[1],
            offsets=active[2],
            last=self._last(works, rows, chunk),
        )
        sampling = self._sampling(works, len(batch.last)) if any(w.samples for w in works) else None
        return Launch(tuple(works), batch, sampling, self._targets(works, chunk))

    def _last(self, works: Sequence[Work], rows: int, chunk: int) -> np.ndarray:
        """Index of each sequence's last token; at least two rows (one-row products are slow on CPU)."""
        last = np.zeros(max(2, rows), np.int32)
        for i, work in enumerate(works):
            last[i] = i * chunk + work.count - 1
        return last

    def _active(self, works: Sequence[Work], rows: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Adapter index per sequence and the adapters' blocks, grouped by projection."""
        nodes = {w.sequence.adapter.uid: w.sequence.adapter for w in works if w.sequence.adapter.size}
        index = {uid: i for i, uid in enumerate(nodes)}
        adapters = np.full(rows, -1, np.int32)
        for i, work in enumerate(works):
            adapters[i] = index.get(work.sequence.adapter.uid, -1)
        key = tuple((uid, tuple(node.blocks)) for uid, node in nodes.items())
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
        banned = np.full((rows, BANNED), self._vocab, np.int32)
        for i, (seq, start, count, samples) in enumerate(works):
            if samples:
                slot[i] = seq.slot
                position[i] = start + count
                ids = self.slots.banned[seq.slot]
                if ids and start + count - seq.prompt_len < seq.request.sampling.min_tokens:
                    banned[i, : len(ids)] = ids
        v = {name: values[slot] for name, values in self.slots.values.items()}
        v["logprobs"] = np.bool_(v["logprobs"].any())
        return SampleBatch(slot=slot, position=position, banned=banned, **v)

    def _targets(self, works: Sequence[Work], chunk: int) -> np.ndarray | None:
        """For a scored chunk, the token after each of its tokens."""
        if not works or not _scores(works[0]):
            return None
        seq, start, count, _ = works[0]
        targets = np.zeros(chunk, np.int32)
        after = seq.request.prompt[start + 1 : start + count + 1]
        targets[: len(after)] = after
        return targets
