"""Attention on TPU: jax's ragged paged attention kernel over the pool.

`jax.experimental.pallas.ops.tpu.ragged_paged_attention` reads pages `[pages, B, 2K, H]`, keys even
and values odd, which is the pool's layout. It reads only pages of its table, so it ignores adapters
in the same array. It takes ragged sequences, and rows become sequences as follows:

- Decode: a row is a sequence of one query.
- Prompts: rows that continue each other are one sequence, so that a query tile may span them. The
  padding behind a prompt's last row becomes a short sequence on the zero block, so that real queries
  never meet keys that nobody wrote.

Source: Kwon et al. 2023 (paged attention); the kernel's own documentation in jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from jlora.pallas.ops import Pages
from jlora.pallas.tiles import AttentionShape, Chip


class Sequences(NamedTuple):
    """Ragged sequences as the kernel takes them.

    Attributes:
        kv_lens: [Z] context lengths, at least 1.
        table: [Z, W] block ids.
        cu_q_lens: [Z + 1] first query of each sequence among the T tokens.
        count: [1] number of sequences, at least 1.
    """

    kv_lens: jax.Array
    table: jax.Array
    cu_q_lens: jax.Array
    count: jax.Array


@dataclass(frozen=True, eq=False)
class TpuAttention:
    """`ops.Attention` on one kind of TPU."""

    chip: Chip

    def __call__(self, q: jax.Array, pool: jax.Array, first_row: jax.Array | int, pages: Pages) -> jax.Array:
        """See `ops.Attention`."""
        rows, chunk, heads, width = q.shape
        block, kv_heads = pool.shape[1], pool.shape[2] // 2
        shape = AttentionShape(rows * chunk, chunk, heads, kv_heads, width, block, q.dtype.itemsize)
        tiles = self.chip.attention(shape)
        made = sequences(pages, chunk)
        out = ragged_paged_attention(
            q.reshape(rows * chunk, heads, width),
            pool,
            made.kv_lens,
            made.table + first_row,
            made.cu_q_lens,
            made.count,
            sm_scale=width**-0.5,
            num_kv_pages_per_block=min(max(1, tiles.kv_tokens // block), pages.table.shape[1]),
            num_queries_per_block=min(tiles.queries, rows * chunk),
            vmem_limit_bytes=tiles.vmem_bytes,
        )
        # The kernel does not write queries that no sequence has: memory there may hold NaN.
        valid = (pages.lengths > 0)[:, None, None, None]
        return jnp.where(valid, out.reshape(q.shape), jnp.zeros_like(q))


def sequences(pages: Pages, chunk: int) -> Sequences:
    """Rows as sequences (see the module); Z = S for decode and 2S for prompts."""
    lengths = pages.lengths
    if chunk == 1:
        count = jnp.maximum((lengths > 0).sum(dtype=jnp.int32), 1)
        starts = jnp.arange(lengths.shape[0] + 1, dtype=jnp.int32)
        return Sequences(jnp.maximum(lengths, 1), pages.table, starts, count[None])
    filled = lengths - pages.starts
    row = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    before = jnp.maximum(row - 1, 0)
    same = (pages.table == pages.table[before]).all(1) & (pages.starts == lengths[before])
    continues = (row > 0) & (filled > 0) & (filled[before] == chunk) & same
    last = (filled > 0) & ~jnp.append(continues[1:], False)
    # A last row ends a sequence, and with padding behind it also a short one.
    made = last * (1 + (filled < chunk)).astype(jnp.int32)
    ends = jnp.cumsum(made, dtype=jnp.int32)
    item = jnp.arange(2 * lengths.shape[0], dtype=jnp.int32)
    of = jnp.minimum((ends <= item[:, None]).sum(1, dtype=jnp.int32), lengths.shape[0] - 1)
    padding = item > ends[of] - made[of]
    kv_lens = jnp.maximum(jnp.where(padding, chunk - filled[of], lengths[of]), 1)
    table = jnp.where(padding[:, None], 0, pages.table[of])
    stops = jnp.where(padding, (of + 1) * chunk, of * chunk + filled[of])
    cu_q_lens = jnp.pad(stops, (1, 0)).astype(jnp.int32)
    return Sequences(kv_lens, table, cu_q_lens, jnp.maximum(ends[-1:], 1))


def smem_bytes(rows: int, chunk: int, width: int) -> int:
    """Bytes of scalar memory for a launch's tables, which are padded to 128 columns."""
    made = rows if chunk == 1 else 2 * rows
    return 4 * made * (-(-width // 128) * 128 + 3)


def widest(rows: int, chunk: int, smem: int) -> int:
    """The most pages of a context whose tables fit in `smem` bytes."""
    column = smem_bytes(rows, chunk, 0) // 3
    return max(0, (smem // column - 3) // 128 * 128)
