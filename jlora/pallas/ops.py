"""The ops of a step on one page: what each computes, its shapes, what it may rely on, what it refuses.

Every op reads or writes the one pool `[L * P, B, 2K, H]` of `jlora.layout`, of which a step owns
the only live reference. `jlora.pallas.reference` is the plain-jnp form of each: the specification,
the CPU path and the oracle of the kernels. `jlora.pallas.dispatch` chooses, once at start, an
implementation of each for a platform, and puts them into an `Ops`; nothing else asks where it runs.

    op            equation                                                  bytes it moves
    attention     o = softmax(q Kᵀ / sqrt(H)) V, causal                     every page of the contexts, once
    lora          y += Σ over active blocks of mask(owner = adapter) · (x Aᵀ) B    every active block, once
    write_kv      pool[rows[t], slots[t]] = interleave(k[t], v[t])          the new tokens
    write_blocks  pool[b + l P] = data[b, l] for all l                      the blocks, once
    write_layers  the same for some layers                                  the blocks, once
    read_blocks   data[b, l] = pool[b + l P]                                the blocks, once

Letters: S rows (a decoding sequence, or a piece of a prompt), C tokens per row, T = S * C,
N query heads, K KV heads, G = N / K, H head width, B tokens per block, P pool blocks, L layers,
W most pages of a sequence, M active blocks at most, a and b the shard's input and output width of
a projection. Activations have the pool's dtype (float32 or bfloat16), indices are int32, and
sums are taken in float32. Under tensor parallelism the ops run inside `shard_map`: N, K, a, b are
the shard's own.

What a caller guarantees, and a kernel may use:

- rows with tokens come first; padding rows have length 0, their adapter is -1, what comes out for
  them is finite and means nothing;
- rows of one sequence follow each other: the next starts where the one before ends, with the same
  table; only a sequence's last row may be filled in part, and what comes out for the rest of it is
  finite and means nothing;
- table entries past the length, and all blocks that no entry names, may hold anything, NaN too;
  block 0 is zero;
- a projection's owners ascend, and its active blocks are distinct; unused units of a block are zero.

What an op refuses, it refuses while a program is traced, and never in a step: `dispatch` asks the
same questions of every shape at start. Values are not looked at. The plain forms refuse nothing; on
NVIDIA, projections whose units the kernel cannot read go to the plain form.

Source: paged attention, Kwon et al. 2023, section 4; the segmented LoRA product, Chen et al. 2023
(Punica), section 4; adapters and KV in one pool, Sheng et al. 2023 (S-LoRA), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from jlora.layout import UnitLayout

# A field of a launch's lists: jax.Array in a program; numpy or abstract where cases and compilers ask.
Array = Any

# Projections that share an input: one launch of `Lora` each.
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))

# Adds a partial product of all shards; None on a single device.
Psum = Callable[[jax.Array], jax.Array] | None


class Pages(NamedTuple):
    """Where the KV of S rows lies.

    Attributes:
        table: [S, W] block ids; entries past a row's length are never read as valid.
        lengths: [S] tokens of context including this launch's; 0 for a padding row.
        starts: [S] position of the row's first token.
    """

    table: Array
    lengths: Array
    starts: Array


class ActiveBlocks(NamedTuple):
    """One projection's adapter blocks of this launch: entries start .. stop - 1 of the lists.

    Attributes:
        blocks: [M] block ids.
        owners: [M] the adapter index each belongs to.
        start, stop: scalar int32.
    """

    blocks: Array
    owners: Array
    start: Array
    stop: Array


class Adapted(NamedTuple):
    """A projection on its way to its adapters.

    Attributes:
        base: [T, b] this shard's slice of the base product.
        active: the projection's adapter blocks; every projection of a call has the same lists.
        unit: how its rank units lie in a block.
    """

    base: Array
    active: ActiveBlocks
    unit: UnitLayout


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
    ) -> list[jax.Array]:
        """Adds the adapters of T tokens to the projections of x [T, a] (this shard's slice).

        Args:
            adapters: [T] adapter index of each token, -1 for none.
            psum: adds the partial x·Aᵀ of all shards, of all projections at once.
        Returns:
            Per projection [T, b] in its base's dtype; bit for bit the base where a token has no
            adapter. Without active blocks nothing is read and nothing is computed.
        Raises:
            ConfigError: on TPU, not even the smallest tiles of this launch fit the chip's vector memory.
        """
        ...


class WriteKV(Protocol):
    """New keys and values into their slots of one layer."""

    def __call__(self, pool: jax.Array, rows: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Writes k, v [T, K, H] at pool[rows[t], slots[t]], in place when the pool is donated.

        Args:
            rows: [T] pool rows (block + l * P), distinct as pairs with slots; rows outside the pool are dropped.
        """
        ...


class WriteBlocks(Protocol):
    """Whole blocks into the pool: a copy from the host arriving."""

    def __call__(self, pool: jax.Array, ids: jax.Array, data: jax.Array) -> jax.Array:
        """Writes data [n, L, B, 2K, H] into blocks `ids` [n]; ids outside the pool are dropped."""
        ...


class WriteLayers(Protocol):
    """Some layers of blocks into the pool: a streamed copy arriving group by group."""

    def __call__(self, pool: jax.Array, ids: jax.Array, data: jax.Array, first: jax.Array, layers: int) -> jax.Array:
        """Writes data [n, l, B, 2K, H] into layers first .. first + l - 1 of blocks `ids` [n]."""
        ...


class ReadBlocks(Protocol):
    """Whole blocks out of the pool: a copy to the host."""

    def __call__(self, pool: jax.Array, ids: jax.Array, layers: int) -> jax.Array:
        """Copies of blocks `ids` [n] over all layers: [n, L, B, 2K, H]."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """An implementation of every op: a value chosen once and passed down (see `dispatch.choose`)."""

    attention: Attention
    lora: Lora
    write_kv: WriteKV
    write_blocks: WriteBlocks
    write_layers: WriteLayers
    read_blocks: ReadBlocks
