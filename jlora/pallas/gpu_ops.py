"""The NVIDIA kernels as `Attention` and `Lora` of `jlora.pallas.ops`.

A group of projections whose units the kernels cannot read (`gpu_support.lora_refusal`) uses the
reference. This is decided while tracing; dispatch logs the reason at start.

`tiles_of` looks up the kernels' block sizes in `tiles.json`, which holds under `gpu` the sizes that
`jlora doctor tune` measured, by chip (`device_kind`) and shape. The classes' defaults apply otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jlora.layout import PoolLayout
from jlora.pallas import tiles as table
from jlora.pallas.gpu_decode import DecodeTiles, decode_attention
from jlora.pallas.gpu_lora import LoraTiles, lora
from jlora.pallas.gpu_plan import Room
from jlora.pallas.gpu_prefill import PrefillTiles, chunk_attention
from jlora.pallas.gpu_support import lora_refusal
from jlora.pallas.ops import Adapted, Attention, Lora, Pages, Psum


@dataclass(frozen=True, slots=True)
class GpuTiles:
    """Block sizes of every kernel."""

    decode: DecodeTiles = DecodeTiles()
    prefill: PrefillTiles = PrefillTiles()
    lora: LoraTiles = LoraTiles()

    @classmethod
    def of(cls, entry: Mapping[str, Mapping[str, Any]]) -> GpuTiles:
        """From an entry of the table: kernel -> sizes that differ from the defaults."""
        kinds = {"decode": DecodeTiles, "prefill": PrefillTiles, "lora": LoraTiles}
        made = {
            name: kinds[name](**{key: tuple(v) if isinstance(v, list) else v for key, v in sizes.items()})
            for name, sizes in entry.items()
        }
        return cls(**made)


DEFAULT = GpuTiles()


def key_of(layout: PoolLayout, heads: int) -> str:
    """A shape's name in the table; `heads` is over all shards."""
    tp = layout.tp
    return f"{heads // tp}/{layout.kv_heads // tp}x{layout.head_dim} B={layout.block_tokens}"


def tiles_of(kind: str, layout: PoolLayout, heads: int) -> GpuTiles:
    """Tiles for a model on a chip."""
    return GpuTiles.of(table.load()["gpu"].get(kind, {}).get(key_of(layout, heads), {}))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine's launches.

    Attributes:
        sequences: rows of a decode launch, with padding; also the distinct adapters of a launch.
        rank: the largest rank of an adapter.
        row: tokens per row of a prompt launch.
    """

    sequences: int
    rank: int
    row: int

    def room(self, tokens: int) -> Room:
        """Room for a launch of `tokens` tokens. One larger than a decode launch consists of whole rows."""
        run = 1 if tokens <= self.sequences else self.row
        return Room(min(self.sequences, -(-tokens // run)), self.rank, run)


def runtime_refusal() -> str | None:
    """Why this version of jax cannot run the kernels; None if it can."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return None
    return f"jax {jax.__version__}: the NVIDIA kernels need 0.11 or newer (Python 3.12 or newer)"


def attention_op(tiles: GpuTiles = DEFAULT) -> Attention:
    """`ops.Attention` for pools that `gpu_support.attention_refusal` accepts."""

    def attention(q: jax.Array, pool: jax.Array, first_row: jax.Array | int, pages: Pages) -> jax.Array:
        if q.shape[1] == 1:
            return decode_attention(q[:, 0], pool, first_row, pages, tiles.decode)[:, None]
        return chunk_attention(q, pool, first_row, pages, tiles.prefill)

    return attention


def lora_op(layout: PoolLayout, limits: Limits, plain: Lora, tiles: GpuTiles = DEFAULT) -> Lora:
    """`ops.Lora` for a layout from `gpu_support.fit_units`; `plain` serves the groups that the kernels cannot."""

    def joined(
        x: jax.Array,
        pool: jax.Array,
        first_row: jax.Array | int,
        projections: Sequence[Adapted],
        adapters: jax.Array,
        psum: Psum = None,
        acts: jax.Array | None = None,
    ) -> list[jax.Array]:
        if lora_refusal(layout, [p.unit for p in projections]):
            return plain(x, pool, first_row, projections, adapters, psum, acts)
        room = limits.room(x.shape[0])
        return lora(x, pool, first_row, projections, adapters, psum, acts, room=room, tiles=tiles.lora)

    return joined
