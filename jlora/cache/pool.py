"""The two memories: the pool on the device and the one on the host, block by block.

The device array has one live reference, donated through every program that writes it. A block's
rows of all layers go over the link as one piece, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jlora.layout import PoolLayout

PIECES = (64, 16, 4, 1)  # blocks per copy program: few compiled shapes, no padding
Staged = list[tuple[np.ndarray, jax.Array]]  # (block ids, data [n, L, B, 2K, H])


class DevicePool:
    """Holds `array` [L * P, B, 2K, H], sharded over heads, and copies blocks in and out.

    Args:
        write: the jitted, donating `write_blocks(pool, ids, data)`.
        read: the jitted `read_blocks(pool, ids)` -> data.
    """

    def __init__(self, layout: PoolLayout, mesh: Mesh, write: Callable[..., jax.Array], read: Callable[..., jax.Array]):
        self.layout = layout
        self._write = write
        self._read = read
        self._staging = NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
        zeros = jax.jit(lambda: jnp.zeros(layout.shape, layout.dtype), out_shardings=sharding)
        self.array = zeros()

    def stage(self, ids: Sequence[int], data: np.ndarray) -> Staged:
        """Transfers data [n, L, B, 2K, H] and waits for it; touches no pool, so any thread may call it.

        `data` must never be written again: on CPU a transfer may alias the numpy buffer.
        """
        staged = []
        for at, piece in _pieces(ids):
            staged.append((piece, jax.device_put(data[at : at + len(piece)], self._staging)))
        jax.block_until_ready([array for _, array in staged])
        return staged

    def place(self, staged: Staged) -> None:
        """Enqueues the scatter of staged blocks: after what was dispatched before, ahead of what comes."""
        for ids, data in staged:
            self.array = self._write(self.array, ids, data)

    def gather(self, ids: Sequence[int]) -> list[jax.Array]:
        """Enqueues a snapshot of blocks as they are after what was dispatched before, and its transfer."""
        found = [self._read(self.array, piece) for _, piece in _pieces(ids)]
        for array in found:
            array.copy_to_host_async()
        return found

    def warm_up(self) -> None:
        """Compiles every copy size; writes nothing (ids outside the pool are dropped)."""
        for size in PIECES:
            zeros = np.zeros((size, *self.layout.block_shape), self.array.dtype)
            self.array = self._write(self.array, np.full(size, -1, np.int32), jax.device_put(zeros, self._staging))
            self._read(self.array, np.zeros(size, np.int32))


class HostPool:
    """The host tier: one array [blocks + 1, L, B, 2K, H], block-contiguous; block 0 is unused.

    Pages of memory are taken by the first write to them, so a large tier costs what it holds.
    """

    def __init__(self, layout: PoolLayout, blocks: int):
        self.array = np.empty((blocks + 1, *layout.block_shape), jnp.dtype(layout.dtype))

    def write(self, ids: Sequence[int], data: np.ndarray) -> None:
        """Stores data [n, L, B, 2K, H]."""
        self.array[list(ids)] = data

    def read(self, ids: Sequence[int]) -> np.ndarray:
        """A fresh copy [n, L, B, 2K, H]."""
        return self.array[list(ids)]


def _pieces(ids: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(position, ids) of runs in the compiled sizes."""
    at = 0
    while at < len(ids):
        size = next(p for p in PIECES if p <= len(ids) - at)
        yield at, np.asarray(ids[at : at + size], np.int32)
        at += size
