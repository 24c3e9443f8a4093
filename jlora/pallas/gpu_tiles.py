"""Block sizes of the NVIDIA kernels, by chip and shape.

    tiles_of("NVIDIA H200", layout, heads)

`tiles.json` holds under `gpu` the sizes that `jlora doctor tune` measured, by chip (`device_kind`) and
shape. The classes' defaults apply otherwise. Nothing has been measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jlora.layout import PoolLayout
from jlora.pallas import tiles
from jlora.pallas.gpu_decode import DecodeTiles
from jlora.pallas.gpu_lora import LoraTiles
from jlora.pallas.gpu_prefill import PrefillTiles


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
    return GpuTiles.of(tiles.load()["gpu"].get(kind, {}).get(key_of(layout, heads), {}))
