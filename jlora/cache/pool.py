"""The two memories: the pool on the device and the one on the host, block by block.

The device array has one live reference, donated through every program that writes it. A block's
rows of all layers go over the link as one piece, in either direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jlora.layout import PoolLayout
from jlora.model.step import Programs

PIECES = (64, 16, 4, 1)  # blocks per copy program: few compiled shapes, no padding
PIECE_SHARE = 1 / 16  # of the pool, at most: what one copy program takes beside it
Staged = list[tuple[np.ndarray, jax.Array]]  # (block ids, data [n, L, B, 2K, H])


class Blocks(Protocol):
    """Data [n, l, B, 2K, H] of blocks, an array or what is read as it is needed."""

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class DevicePool:
    """Holds `array` [L * P, B, 2K, H], sharded over heads, and copies blocks in and out.

    Args:
        groups: equal groups of layers that a streamed copy comes in.
        pinned: transfers go through pinned host memory (see `has_pinned_host`).
    """

    def __init__(self, layout: PoolLayout, mesh: Mesh, programs: Programs, groups: int, pinned: bool = False):
        self.layout = layout
        self.groups = groups
        self.pieces = pieces(layout.blocks)
        self._programs = programs
        self._staging = NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))
        self._pinned = self._staging.with_memory_kind("pinned_host") if pinned else None
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
        zeros = jax.jit(lambda: jnp.zeros(layout.shape, layout.dtype), out_shardings=sharding)
        self.array = zeros()

    @property
    def lost(self) -> bool:
        """Whether a program that failed has taken the donated array with it."""
        return self.array.is_deleted()

    @property
    def group_layers(self) -> int:
        return self.layout.layers // self.groups

    def stage(self, ids: Sequence[int], data: Blocks) -> Staged:
        """Transfers data [n, l, B, 2K, H] and waits for it; touches no pool, so any thread may call it.

        One piece of it is read while the one before it goes over. All of them stay: until they are placed, the whole
        copy is on the device a second time. What is read must never be written again: on CPU a transfer may alias the
        numpy buffer.
        """
        staged = []
        for at, piece in self._pieces(ids):
            part = data[at : at + len(piece)]
            if self._pinned is not None:
                part = jax.device_put(part, self._pinned)
            staged.append((piece, jax.device_put(part, self._staging)))
        jax.block_until_ready([array for _, array in staged])
        return staged

    def place(self, staged: Staged) -> None:
        """Enqueues the scatter of staged blocks: after what was dispatched before, ahead of what comes."""
        for ids, data in staged:
            self.array = self._programs.write_blocks(self.array, ids, data)

    def place_group(self, staged: Staged, group: int) -> None:
        """The same for data of one group of layers."""
        first = np.int32(group * self.group_layers)
        for ids, data in staged:
            self.array = self._programs.write_layers(self.array, ids, data, first)

    def gather(self, ids: Sequence[int]) -> list[jax.Array]:
        """Enqueues a snapshot of blocks as they are after what was dispatched before, and its transfer."""
        found = [self._programs.read_blocks(self.array, piece) for _, piece in self._pieces(ids)]
        if self._pinned is not None:
            return [jax.device_put(array, self._pinned) for array in found]
        for array in found:
            array.copy_to_host_async()
        return found

    def cause(self, error: Exception) -> Exception:
        """What a failed copy failed with; see `as_shortage`."""
        return as_shortage(error)

    def warm_up(self) -> None:
        """Compiles every copy size; writes nothing (ids outside the pool are dropped)."""
        for size in self.pieces:
            nowhere = [-1] * size
            zeros = np.zeros((size, *self.layout.block_shape), self.array.dtype)
            self.place(self.stage(nowhere, zeros))
            self.place_group(self.stage(nowhere, zeros[:, : self.group_layers]), 0)
            self.gather([0] * size)

    def _pieces(self, ids: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """(position, ids) of runs in the compiled sizes."""
        at = 0
        while at < len(ids):
            size = next(p for p in self.pieces if p <= len(ids) - at)
            yield at, np.asarray(ids[at : at + size], np.int32)
            at += size


def pieces(blocks: int) -> tuple[int, ...]:
    """Blocks per copy program of a pool of so many."""
    return tuple(size for size in PIECES if size <= max(1, blocks * PIECE_SHARE))


def as_shortage(error: Exception) -> Exception:
    """The error; a MemoryError if it says that a device's memory is short."""
    if isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED"):
        return MemoryError(str(error))
    return error


def has_pinned_host(mesh: Mesh) -> bool:
    """Whether the devices reach host memory of their own, so that transfers need no bounce buffer."""
    device = mesh.devices.flat[0]
    return device.platform != "cpu" and any(m.kind == "pinned_host" for m in device.addressable_memories())


class HostPool:
    """The host tier: one array [blocks + 1, L, B, 2K, H], block-contiguous; block 0 is zero.

    Pages of memory are taken by the first write to them, so a large tier costs what it holds.
    """

    def __init__(self, layout: PoolLayout, blocks: int):
        self.layout = layout
        self.array = np.empty((blocks + 1, *layout.block_shape), jnp.dtype(layout.dtype))
        self.array[0] = 0

    def write(self, ids: Sequence[int], data: np.ndarray) -> None:
        """Stores data [n, L, B, 2K, H]."""
        self.array[list(ids)] = data

    def read(self, ids: Sequence[int], layers: slice = slice(None)) -> np.ndarray:
        """A fresh copy [n, l, B, 2K, H] of some layers."""
        return self.array[list(ids), layers]

    def layer(self, ids: Sequence[int], layer: int) -> np.ndarray:
        """A fresh copy [n, B, 2K, H] of one layer."""
        return self.array[list(ids), layer]
