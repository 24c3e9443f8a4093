"""The ops of a step: equations, shapes, guarantees and errors.

Every op reads or writes the pool `[L * P, B, 2K, H]` of `jlora.layout`. A step owns the only live
reference to it. `jlora.pallas.reference` has each op in plain jnp: the specification, the CPU path
and the kernels' test oracle. `jlora.pallas.dispatch` chooses an implementation of each op at start
and puts it into an `Ops`. No other code depends on the platform.

    op            equation                                                  bytes it moves
    attention     o = softmax(q Kᵀ / sqrt(H)) V, causal                     every page of the contexts, once
    lora          y += Σ over active blocks of mask(owner = adapter) · (x Aᵀ) B    every active block, once
    write_kv      pool[rows[t], slots[t]] = interleave(k[t], v[t])          the new tokens
    write_blocks  pool[b + l P] = data[b, l] for all l                      the blocks, once
    write_layers  the same for some layers                                  the blocks, once
    read_blocks   data[b, l] = pool[b + l P]                                the blocks, once

Letters: S rows (a decoding sequence, or a part of a prompt), C tokens per row, T = S * C,
N query heads, K KV heads, G = N / K, H head width, B tokens per block, P pool blocks, L layers,
W most pages of a sequence, M room for active blocks, a and b the shard's input and output width of
a projection. Activations have the pool's dtype (float32 or bfloat16), indices are int32, and sums
are float32. Under tensor parallelism the ops run inside `shard_map`, and N, K, a, b are the shard's.

A caller guarantees:

- Rows with tokens come first. Padding rows have length 0 and adapter -1. Their results are finite
  and have no meaning.
- Rows of one sequence follow each other with the same table, and each starts where the one before
  ends. Only the last row of a sequence may be partly filled. The results of its unused part are
  finite and have no meaning.
- Table entries past the length, and blocks that no entry names, may contain anything, also NaN.
  Block 0 is zero.
- A projection's owners ascend and its active blocks are distinct. Unused units of a block are zero.

An op raises only while a program is traced, never in a step, and never because of values.
`dispatch` checks every shape at start. The reference raises nothing. On NVIDIA, projections whose
units the kernel cannot read use the reference.

Source: paged attention, Kwon et al. 2023, section 4; the segmented LoRA product, Chen et al. 2023
(Punica), section 4; adapters and KV in one pool, Sheng et al. 2023 (S-LoRA), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jlora.layout import UnitLayout

# A field of a launch's lists: jax.Array in a program, numpy or abstract values elsewhere.
Array = Any

# Projections that share an input: one launch of `Lora` each.
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))

# Sums a partial product over all shards; None on a single device.
Psum = Callable[[jax.Array], jax.Array] | None


class Pages(NamedTuple):
    """Where the KV of S rows is."""

    table: Array  # [S, W] block ids; entries past a row's length are ignored
    lengths: Array  # [S] tokens of context including this launch's; 0 for a padding row
    starts: Array  # [S] position of the row's first token


class ActiveBlocks(NamedTuple):
    """One projection's adapter blocks of this launch: entries start .. stop - 1 of the lists."""

    blocks: Array  # [M] block ids
    owners: Array  # [M] the adapter index of each block
    start: Array  # int32, a scalar; so is stop
    stop: Array


class Adapted(NamedTuple):
    """A projection to which adapters are added."""

    base: Array  # [T, b] this shard's slice of the base product
    active: ActiveBlocks  # the projection's; all projections of a call share the lists
    unit: UnitLayout  # the layout of its rank units


def acting(adapters: jax.Array, acts: jax.Array | None) -> jax.Array:
    """[T] adapter index of each token, -1 for all of them where `acts` is False."""
    return adapters if acts is None else jnp.where(acts, adapters, -1)


class Attention(Protocol):
    """Ragged paged causal attention of one layer: decode (C = 1), prompt chunks, or both in one launch."""

    def __call__(self, q: jax.Array, pool: jax.Array, first_row: jax.Array | int, pages: Pages) -> jax.Array:
        """Attends q [S, C, N, H] (rotated, unscaled) to each row's context.

        Args:
            first_row: the layer's first pool row (l * P); may be traced.
        Returns:
            [S, C, N, H] in q's dtype.
        Raises:
            ConfigError: on TPU, not even the smallest tiles of this launch fit the chip's vector memory.
        """
        ...


class Lora(Protocol):
    """The segmented LoRA product of projections that share an input (q, k, v; gate, up), in one launch."""

    def __call__(
        self,
        x: jax.Array,
        pool: jax.Array,
        first_row: jax.Array | int,
        projections: Sequence[Adapted],
        adapters: jax.Array,
        psum: Psum = None,
        acts: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Adds the adapters of T tokens to the projections of x [T, a] (this shard's slice).

        Args:
            adapters: [T] adapter index of each token, -1 for none.
            psum: sums the partial x·Aᵀ of all projections over the shards.
            acts: a scalar, False where every token counts as having none. It may depend on the layer, and what a
                kernel computes from the other lists need not.
        Returns:
            Per projection [T, b] in its base's dtype. A token without an adapter keeps its base
            bit for bit. Without active blocks the op reads and computes nothing.
        Raises:
            ConfigError: like `Attention`.
        """
        ...


class WriteKV(Protocol):
    """Writes new keys and values into their slots of one layer."""

    def __call__(self, pool: jax.Array, rows: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Writes k, v [T, K, H] at pool[rows[t], slots[t]], in place when the pool is donated.

        Rows [T] are block + l * P, distinct as pairs with slots. Rows outside the pool are dropped.
        """
        ...


class WriteBlocks(Protocol):
    """Writes whole blocks into the pool, when a copy from the host arrives."""

    def __call__(self, pool: jax.Array, ids: jax.Array, data: jax.Array) -> jax.Array:
        """Writes data [n, L, B, 2K, H] into blocks `ids` [n]; ids outside the pool are dropped."""
        ...


class WriteLayers(Protocol):
    """Writes some layers of blocks into the pool, when a group of a streamed copy arrives."""

    def __call__(self, pool: jax.Array, ids: jax.Array, data: jax.Array, first: jax.Array, layers: int) -> jax.Array:
        """Writes data [n, l, B, 2K, H] into layers first .. first + l - 1 of blocks `ids` [n]."""
        ...


class ReadBlocks(Protocol):
    """Reads whole blocks from the pool, for a copy to the host."""

    def __call__(self, pool: jax.Array, ids: jax.Array, layers: int) -> jax.Array:
        """Copies of blocks `ids` [n] over all layers: [n, L, B, 2K, H]."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """An implementation of every op, chosen once (see `dispatch.choose`)."""

    attention: Attention
    lora: Lora
    write_kv: WriteKV
    write_blocks: WriteBlocks
    write_layers: WriteLayers
    read_blocks: ReadBlocks
