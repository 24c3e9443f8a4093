"""Block sizes of the TPU kernels, by chip and shape, from `tiles.json`.

`tiles.json` holds the chips' fast memories, a default for each op, and the sizes that
`jlora doctor tune` measured by chip and shape. A lookup halves the sizes until the kernel's windows
and buffers fit the chip's vector memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from jlora.errors import ConfigError
from jlora.layout import BYTES, PoolLayout

LANES, SUBLANES = 128, 16
BUDGET = 0.75  # share of the vector memory for windows and buffers; the compiler needs the rest
SMALLEST = 16  # fewest tokens and units of a tile


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Most tokens of a tile (`tokens`) and of one product (`rows`), rank units of a tile, memory limit."""

    tokens: int
    rows: int
    units: int
    vmem_bytes: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tokens of context and queries per tile of the attention kernel, memory limit."""

    kv_tokens: int
    queries: int
    vmem_bytes: int


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Shape of a launch of the LoRA kernel, by projection where it is a tuple."""

    tokens: int  # T
    a: int  # input width
    outputs: tuple[int, ...]  # output widths
    slots: tuple[int, ...]  # per unit
    per_block: tuple[int, ...]  # units per block
    slot_bytes: int
    itemsize: int

    @classmethod
    def of(cls, layout: PoolLayout, group: Sequence[str], tokens: int) -> LoraShape:
        """A launch of `tokens` tokens for a group of projections, on one shard."""
        size, units = BYTES[layout.dtype], [layout.units[name] for name in group]
        outputs, slots, per_block = (tuple(getattr(u, n) for u in units) for n in ("b", "slots", "per_block"))
        slot = 2 * layout.kv_heads // layout.tp * layout.head_dim * size
        return cls(tokens, units[0].a, outputs, slots, per_block, slot, size)

    @property
    def key(self) -> str:
        """The shape's name in the table, with T rounded up to a power of two."""
        outputs = "+".join(map(str, self.outputs))
        return f"lora {self.a}>{outputs} slot={self.slot_bytes} T<={_power(self.tokens)}"

    def windows(self, tiles: LoraTiles) -> int:
        """Bytes of input and output windows, two of each."""
        rows = _up(min(tiles.tokens, self.tokens), SUBLANES)
        return 2 * rows * (self.itemsize * (self.a + 2 * sum(self.outputs)) + 4 * LANES)

    def buffers(self, tiles: LoraTiles) -> int:
        """Bytes of two tiles of units of every projection."""
        units = [max(tiles.units, n) for n in self.per_block]
        return 2 * self.slot_bytes * sum(u * s for u, s in zip(units, self.slots, strict=True))

    def vmem(self, tiles: LoraTiles) -> int:
        return self.windows(tiles) + self.buffers(tiles)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of a launch of attention; heads are the shard's."""

    tokens: int
    chunk: int
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    itemsize: int

    @classmethod
    def of(cls, layout: PoolLayout, heads: int, rows: int, chunk: int) -> AttentionShape:
        """A launch of `rows` rows of `chunk` tokens on one shard; `heads` is over all shards."""
        shard_heads, kv_heads = heads // layout.tp, layout.kv_heads // layout.tp
        size = BYTES[layout.dtype]
        return cls(rows * chunk, chunk, shard_heads, kv_heads, layout.head_dim, layout.block_tokens, size)

    @property
    def key(self) -> str:
        """The shape's name in the table."""
        form = "decode" if self.chunk == 1 else "prefill"
        size = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"attention {size} B={self.block_tokens} {form} T<={_power(self.tokens)}"

    def vmem(self, tiles: AttentionTiles) -> int:
        """Bytes of two KV tiles, the query and output windows, and the softmax state."""
        kv = 2 * tiles.kv_tokens * 2 * self.kv_heads * self.head_dim * self.itemsize
        queries = _up(min(tiles.queries, self.tokens), 8) * self.heads
        state = queries * 4 * (2 * LANES + self.head_dim)
        scores = 3 * queries // self.kv_heads * tiles.kv_tokens * 4  # one head at a time
        return kv + state + scores + 4 * queries * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of accelerator: fast memories in bytes, and block sizes."""

    name: str
    vmem_bytes: int
    smem_bytes: int
    defaults: Mapping[str, Mapping[str, int]]
    tuned: Mapping[str, Mapping[str, int]]

    def lora(self, shape: LoraShape) -> LoraTiles:
        """Tiles for a launch.

        Raises:
            ConfigError: the smallest tiles do not fit the chip's vector memory.
        """
        tiles = LoraTiles(**self._entry("lora", shape.key), vmem_bytes=self._limit)
        while shape.vmem(tiles) > BUDGET * self.vmem_bytes:
            tokens = min(tiles.tokens, shape.tokens)
            windows_lead = shape.windows(tiles) > shape.buffers(tiles)
            if tokens > SMALLEST and (windows_lead or tiles.units <= SMALLEST):
                tiles = replace(tiles, tokens=_up(tokens // 2, SUBLANES))
            elif tiles.units > SMALLEST:
                tiles = replace(tiles, units=tiles.units // 2)
            else:
                raise ConfigError(self._too_big(shape.key, shape.vmem(tiles)))
        return tiles

    def attention(self, shape: AttentionShape) -> AttentionTiles:
        """Tiles for a launch. Raises ConfigError like `lora`."""
        form = "decode" if shape.chunk == 1 else "prefill"
        tiles = AttentionTiles(**self._entry(form, shape.key), vmem_bytes=self._limit)
        while shape.vmem(tiles) > BUDGET * self.vmem_bytes:
            if tiles.kv_tokens > max(128, shape.block_tokens):
                tiles = replace(tiles, kv_tokens=tiles.kv_tokens // 2)
            elif tiles.queries > 8:
                tiles = replace(tiles, queries=tiles.queries // 2)
            else:
                raise ConfigError(self._too_big(shape.key, shape.vmem(tiles)))
        return tiles

    @property
    def _limit(self) -> int:
        return int(0.9 * self.vmem_bytes)

    def _entry(self, op: str, key: str) -> dict[str, int]:
        return {**self.defaults[op], **self.tuned.get(key, {})}

    def _too_big(self, key: str, need: int) -> str:
        return (
            f"engine.kernels: {key} needs {need / 2**20:.1f} MiB of the {self.vmem_bytes / 2**20:.0f} MiB "
            f"vector memory of {self.name}; set engine.kernels = xla"
        )


def chip_of(kind: str) -> Chip | None:
    """The chip with this `device_kind`, None if the table does not have it."""
    table = load()
    for name, chip in table["chips"].items():
        if kind == name or kind in chip["also"]:
            sizes = (int(chip["vmem_mib"] * 2**20), int(chip["smem_kib"] * 2**10))
            return Chip(name, *sizes, {**table["defaults"], **chip["defaults"]}, table["tuned"].get(name, {}))
    return None


@functools.lru_cache(maxsize=1)
def load() -> Mapping[str, Any]:
    """The content of `tiles.json`."""
    return json.loads((files("jlora.pallas") / "tiles.json").read_text())


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
