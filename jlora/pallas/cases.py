"""Named shapes of the ops, shared by tests, compile tests, benchmarks and tuning.

`*_inputs` makes arrays for a case, `*_shapes` makes abstract values for cases that are only compiled.
Under tensor parallelism a case has the view of one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.pallas.ops import GROUPS, ActiveBlocks, Adapted, Pages

LAYERS = 2  # of a case's pool; the op runs on the second, so that a missing layer offset shows

LLAMA3_8B = ModelSpec(128256, 4096, 14336, 32, 32, 8, 128, 8192, 5e5, dtype="bfloat16", name="llama3-8b")
LLAMA2_7B = ModelSpec(32000, 4096, 11008, 32, 32, 32, 128, 4096, dtype="bfloat16", name="llama2-7b")
TINY = ModelSpec(96, 512, 768, LAYERS, 4, 2, 128, 256, name="tiny128")  # TPU kernels need heads of 128
TINY64 = ModelSpec(96, 256, 384, LAYERS, 8, 2, 64, 256, name="tiny64")


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One layer's attention."""

    name: str
    spec: ModelSpec
    block_tokens: int
    rows: tuple[tuple[int, int], ...]  # of each: context length with this launch's tokens, tokens in this launch
    chunk: int = 1  # C, at least the tokens of the longest row
    continued: frozenset[int] = frozenset()  # rows that continue the sequence of the row before
    padding: int = 0  # additional rows of length 0
    tp: int = 1

    @property
    def layout(self) -> PoolLayout:
        """A pool with separate pages for every sequence."""
        pages = sum(-(-n // self.block_tokens) for i, (n, _) in enumerate(self.rows) if i + 1 not in self.continued)
        return replace(PoolLayout.of(self.spec, pages + 3, self.block_tokens, self.tp), layers=LAYERS)

    @property
    def width(self) -> int:
        """W: pages of the model's longest context."""
        return self.layout.blocks_for(self.spec.max_len)


@dataclass(frozen=True, slots=True)
class LoraCase:
    """The adapters of one group of projections."""

    name: str
    spec: ModelSpec
    block_tokens: int
    group: tuple[str, ...]  # projections that share an input
    ranks: tuple[int | tuple[int, ...], ...]  # of each adapter: for all projections, or one per projection of the group
    tokens: tuple[tuple[int, int], ...]  # runs of (adapter index or -1, tokens), in launch order
    tp: int = 1
    fit: Callable[[PoolLayout], PoolLayout] = lambda layout: layout  # adapts the units to a platform's kernels

    @property
    def count(self) -> int:
        """T."""
        return sum(n for _, n in self.tokens)

    def blocks(self, name: str) -> list[int]:
        """Blocks of each adapter for a projection."""
        unit = self.layout.units[name]
        return [-(-rank // unit.per_block) for rank in self.ranks_of(name)]

    def ranks_of(self, name: str) -> list[int]:
        """Rank of each adapter for a projection."""
        at = self.group.index(name)
        return [r if isinstance(r, int) else r[at] for r in self.ranks]

    @property
    def layout(self) -> PoolLayout:
        """A pool with 3 blocks more than the adapters need."""
        one = self.fit(PoolLayout.of(self.spec, 1, self.block_tokens, self.tp))
        used = sum(-(-rank // one.units[name].per_block) for name in self.group for rank in self.ranks_of(name))
        return replace(one, layers=LAYERS, blocks=used + 3)

    @property
    def input_width(self) -> int:
        """a: the shard's slice of the group's input."""
        return self.layout.units[self.group[0]].a


def attention_pages(case: AttentionCase, seed: int = 0) -> Pages:
    """Pages of the case's rows, as numpy, with blocks in random order."""
    rows = len(case.rows) + case.padding
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, case.layout.blocks)).tolist())
    table = np.zeros((rows, case.width), np.int32)
    for i, (length, _) in enumerate(case.rows):
        held = case.rows[i - 1][0] if i in case.continued else 0
        if i in case.continued:
            table[i] = table[i - 1]
        for page in range(-(-held // case.block_tokens), -(-length // case.block_tokens)):
            table[i, page] = next(free)
    for i in sorted(case.continued, reverse=True):  # rows of a sequence share its whole table
        table[i - 1] = table[i]
    lengths = np.array([n for n, _ in case.rows] + [0] * case.padding, np.int32)
    starts = np.array([n - c for n, c in case.rows] + [0] * case.padding, np.int32)
    return Pages(table, lengths, starts)


def attention_inputs(case: AttentionCase, seed: int = 0, junk: float = np.nan) -> tuple[Any, ...]:
    """q, pool, first_row, pages for `Attention`; `junk` fills memory that no valid token may read."""
    rng = np.random.default_rng(seed)
    layout, pages = case.layout, attention_pages(case, seed)
    pool = np.full(_pool_shape(layout), junk, np.float32)
    pool.reshape(layout.layers, layout.blocks, -1)[:, 0] = 0
    for row, length in enumerate(pages.lengths):
        at = np.arange(length)
        slots = layout.blocks + pages.table[row, at // case.block_tokens], at % case.block_tokens
        pool[slots] = rng.standard_normal((length, *pool.shape[2:]))
    q = rng.standard_normal((len(pages.lengths), case.chunk, case.spec.heads // case.tp, case.spec.head_dim))
    placed = Pages(*(jnp.asarray(x) for x in pages))
    return jnp.asarray(q, layout.dtype), jnp.asarray(pool, layout.dtype), jnp.int32(layout.blocks), placed


def attention_shapes(case: AttentionCase) -> tuple[Any, ...]:
    """The same as abstract values."""
    layout, rows = case.layout, len(case.rows) + case.padding
    q = (rows, case.chunk, case.spec.heads // case.tp, case.spec.head_dim)
    pages = Pages(*(jax.ShapeDtypeStruct(s, np.int32) for s in ((rows, case.width), (rows,), (rows,))))
    first = jax.ShapeDtypeStruct((), np.int32)
    return _abstract(q, layout), _abstract(_pool_shape(layout), layout), first, pages


def attention_valid(case: AttentionCase) -> np.ndarray:
    """[S, C] which results are of real tokens."""
    counts = np.array([c for _, c in case.rows] + [0] * case.padding)
    return np.arange(case.chunk) < counts[:, None]


def lora_lists(case: LoraCase, seed: int = 0) -> tuple[list[ActiveBlocks], np.ndarray]:
    """Active blocks of each projection and adapter of each token, as numpy, with blocks in random order."""
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, case.layout.blocks)).tolist())
    blocks, owners, ends = [], [], [0]
    for name in case.group:
        for owner, count in enumerate(case.blocks(name)):
            blocks += [next(free) for _ in range(count)]
            owners += [owner] * count
        ends.append(len(blocks))
    # As in a launch, the lists have more room than entries.
    entries, owned = (np.array([*x, 0, 0], np.int32) for x in (blocks, owners))
    active = [ActiveBlocks(entries, owned, np.int32(a), np.int32(b)) for a, b in zip(ends, ends[1:], strict=False)]
    adapters = np.repeat([a for a, _ in case.tokens], [n for _, n in case.tokens]).astype(np.int32)
    return active, adapters


def lora_inputs(case: LoraCase, seed: int = 0, junk: float = np.nan) -> tuple[Any, ...]:
    """x, pool, first_row, projections, adapters for `Lora`; `junk` fills blocks that are not active."""
    rng = np.random.default_rng(seed)
    layout = case.layout
    active, adapters = lora_lists(case, seed)
    pool = np.full(_pool_shape(layout), junk, np.float32)
    pool.reshape(layout.layers, layout.blocks, -1)[:, 0] = 0
    projections = []
    for name, entries in zip(case.group, active, strict=True):
        unit = layout.units[name]
        left = [rank - first for rank in case.ranks_of(name) for first in range(0, rank, unit.per_block)]
        for block, rank in zip(entries.blocks[entries.start : entries.stop], left, strict=True):
            fill_block(pool[layout.blocks + block], layout, name, rank, rng)
        base = jnp.asarray(rng.standard_normal((case.count, unit.b)), layout.dtype)
        projections.append(Adapted(base, ActiveBlocks(*(jnp.asarray(x) for x in entries)), unit))
    x = rng.standard_normal((case.count, case.input_width)) / np.sqrt(case.input_width)
    arrays = (jnp.asarray(x, layout.dtype), jnp.asarray(pool, layout.dtype), jnp.int32(layout.blocks))
    return *arrays, projections, jnp.asarray(adapters)


def lora_shapes(case: LoraCase, entries: int = 4096) -> tuple[Any, ...]:
    """The same as abstract values; `entries` is M."""
    layout = case.layout
    scalar, listed = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((entries,), np.int32)
    active = ActiveBlocks(listed, listed, scalar, scalar)
    units = [layout.units[name] for name in case.group]
    projections = [Adapted(_abstract((case.count, unit.b), layout), active, unit) for unit in units]
    arrays = (_abstract((case.count, case.input_width), layout), _abstract(_pool_shape(layout), layout), scalar)
    return *arrays, projections, jax.ShapeDtypeStruct((case.count,), np.int32)


def fill_block(row: np.ndarray, layout: PoolLayout, name: str, rank: int, rng: np.random.Generator) -> None:
    """Fills one block with at most `rank` random units; the rest is zero."""
    unit, size = layout.units[name], row.shape[1] * row.shape[2]
    cells = np.zeros((unit.per_block, unit.slots * size), np.float32)
    used = min(rank, unit.per_block)
    for start, width in ((0, unit.a), (unit.b_start, unit.b)):
        cells[:used, start : start + width] = rng.standard_normal((used, width))
    flat = np.zeros(row.size, np.float32)
    flat[: cells.size] = cells.reshape(-1)
    row[:] = flat.reshape(row.shape)


def _pool_shape(layout: PoolLayout) -> tuple[int, int, int, int]:
    return (layout.layers * layout.blocks, layout.block_tokens, 2 * layout.kv_heads // layout.tp, layout.head_dim)


def _abstract(shape: Sequence[int], layout: PoolLayout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(layout.dtype))


def prompt_rows(prompt: int, prefix: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """The rows of `chunk` tokens of a prompt behind a cached prefix."""
    return tuple((prefix + min(at + chunk, prompt), min(chunk, prompt - at)) for at in range(0, prompt, chunk))


def _small_attention(spec: ModelSpec, block_tokens: int) -> list[AttentionCase]:
    def case(name: str, *args: Any) -> AttentionCase:
        return AttentionCase(f"{spec.name} {spec.dtype} B={block_tokens} {name}", spec, block_tokens, *args)

    edges = tuple((n, 1) for n in (1, block_tokens - 1, block_tokens, block_tokens + 1, 100, 256))
    prompts = (*prompt_rows(20, 5, 8), *prompt_rows(8, 0, 8), *prompt_rows(3, 30, 8))
    return [
        case("decode", edges, 1, frozenset(), 2),
        case("chunks", prompts, 8, frozenset({1, 2}), 1),
        case("mixed", ((40, 1), *prompts, (7, 1)), 8, frozenset({2, 3}), 0),
    ]


def _small_lora(spec: ModelSpec, block_tokens: int) -> list[LoraCase]:
    def case(name: str, group: tuple[str, ...], ranks: tuple, tokens: tuple) -> LoraCase:
        return LoraCase(f"{spec.name} {spec.dtype} {name}", spec, block_tokens, group, ranks, tokens)

    runs = ((0, 3), (-1, 2), (1, 1), (2, 7), (0, 1), (-1, 2))
    return [
        case("q k v, mixed ranks", ("q", "k", "v"), (16, (3, 0, 20), 8), runs),
        case("o, one adapter", ("o",), (8,), ((0, 5), (-1, 3))),
        case("gate up, many tokens", ("gate", "up"), (8, 12, 4), ((0, 100), (-1, 40), (1, 100), (2, 80))),
        case("down, all distinct", ("down",), tuple(range(1, 9)), tuple((i, 1) for i in range(8))),
        case("q k v, no adapter", ("q", "k", "v"), (), ((-1, 8),)),
    ]


def _large_attention(spec: ModelSpec, tp: int) -> list[AttentionCase]:
    def case(name: str, *args: Any) -> AttentionCase:
        return AttentionCase(f"{spec.name} tp={tp} {name}", spec, 32, *args, tp=tp)

    decode = [case(f"decode {n} x 1k", ((1024, 1),) * n) for n in (1, 8, 32, 64)]
    prompts = [case(f"prefill {n}", prompt_rows(n, 0, 32), 32, frozenset(range(1, n // 32))) for n in (512, 2048)]
    return decode + prompts


def _large_lora(spec: ModelSpec, tp: int) -> list[LoraCase]:
    mixed = (8, 16, 32, 64)
    shapes = {
        "decode 64, 1 adapter": ((16,), ((0, 64),)),
        "decode 64, 8 adapters": ((16,) * 8, tuple((i // 8, 1) for i in range(64))),
        "decode 64, 64 adapters, mixed ranks": (mixed * 16, tuple((i, 1) for i in range(64))),
        "prefill 2048, 4 adapters": ((16,) * 4, tuple((i, 512) for i in range(4))),
    }
    return [
        LoraCase(f"{spec.name} tp={tp} {'+'.join(group)} {name}", spec, 32, group, ranks, tokens, tp)
        for name, (ranks, tokens) in shapes.items()
        for group in GROUPS
    ]


def _both_dtypes(spec: ModelSpec) -> list[ModelSpec]:
    return [spec, replace(spec, dtype="bfloat16")]


# Small cases run in an interpreter on a CPU. Large cases are compiled ahead of time and timed on an accelerator.
SMALL_ATTENTION = [c for s in _both_dtypes(TINY) for c in _small_attention(s, 16)] + [
    c for s in (replace(TINY, dtype="bfloat16"), replace(TINY64, dtype="bfloat16")) for c in _small_attention(s, 32)
]
SMALL_LORA = [c for s in _both_dtypes(TINY) for c in _small_lora(s, 16)]
LARGE_ATTENTION = [c for s in (LLAMA3_8B, LLAMA2_7B) for tp in (1, 4) for c in _large_attention(s, tp)]
LARGE_LORA = [c for s in (LLAMA3_8B, LLAMA2_7B) for tp in (1, 4) for c in _large_lora(s, tp)]
