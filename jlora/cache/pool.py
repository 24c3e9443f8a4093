"""The pool's device array: one live reference, donated through every program that writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jlora.layout import PoolLayout

PIECES = (64, 16, 4, 1)  # blocks per copy program: few compiled shapes, little padding


class DevicePool:
    """Holds `array` [L * P, B, 2K, H], sharded over heads, and copies blocks in from the host.

    `write` is the jitted, donating `write_blocks(pool, ids, data)`.
    """

    def __init__(self, layout: PoolLayout, mesh: Mesh, write: Callable[..., jax.Array]):
        self.layout = layout
        self._write = write
        self._staging = NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
        zeros = jax.jit(lambda: jnp.zeros(layout.shape, layout.dtype), out_shardings=sharding)
        self.array = zeros()

    def stage(self, ids: Sequence[int], data: np.ndarray) -> list[tuple[np.ndarray, jax.Array]]:
        """Starts the transfer of data [n, L, B, 2K, H]; overlaps whatever the device is running.

        The device gets copies of its own: on CPU a transfer may alias the numpy buffer, and the
        caller's array may be freed when its adapter is unloaded.
        """
        staged, at = [], 0
        while at < len(ids):
            size = next(p for p in PIECES if p <= len(ids) - at)
            piece = np.array(data[at : at + size], copy=True, order="C")
            rows = np.asarray(ids[at : at + size], np.int32)
            staged.append((rows, jax.device_put(piece, self._staging)))
            at += size
        return staged

    def place(self, staged: list[tuple[np.ndarray, jax.Array]]) -> None:
        """Enqueues the scatter of staged blocks, after what was dispatched before."""
        for ids, data in staged:
            self.array = self._write(self.array, ids, data)

    def warm_up(self) -> None:
        """Compiles every copy size; writes nothing (ids outside the pool are dropped)."""
        for size in PIECES:
            zeros = np.zeros((size, *self.layout.block_shape), self.array.dtype)
            self.array = self._write(self.array, np.full(size, -1, np.int32), jax.device_put(zeros, self._staging))
