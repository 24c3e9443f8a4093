"""Computes x · A · B on the host's cores, for adapters whose copy to the device is under way. numpy only.

    site = host.prepare(shares, ("q", "k", "v"), layer)     # reads the factors, while the device computes x
    added = host.added(x, site)                             # [T, q + k + v]

Products run on threads of their own, one per core that the process may use but one, which is left to the engine's
thread; where there is one core, they share it. numpy's BLAS runs each product on one thread, so that many adapters
and tokens share the cores. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np

from jlora import machine
from jlora.adapters.packing import unpack
from jlora.layout import PoolLayout
from jlora.ports import System

ROWS = 16  # tokens of a product, at least, where several threads share an adapter's

# (block ids of the host tier, layer) -> [n, B, 2K, H]
Read = Callable[[Sequence[int], int], np.ndarray]
# Each shard's A and B of one projection.
_Factors = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Share:
    """What one adapter acts on in a launch.

    Attributes:
        rows: indices of the launch's tokens.
        blocks: projection -> its blocks of the host tier.
    """

    rows: np.ndarray
    blocks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Site:
    """The projections that take one x in one layer, and each share's factors of them."""

    names: tuple[str, ...]
    factors: list[tuple[Share, Mapping[str, Future[_Factors]]]]


def _one_thread_each() -> None:
    """numpy's BLAS uses the calling thread alone from now on."""
    from threadpoolctl import threadpool_limits  # here: it looks through the libraries that are loaded

    threadpool_limits(1, user_api="blas")


class HostLora:
    """The host's part of launches; `read` reaches the host tier."""

    def __init__(self, layout: PoolLayout, read: Read, system: System | None = None):
        self._layout = layout
        self._read = read
        self._size = max(1, machine.threads() - 1)
        self._threads: Executor = (system or System()).threads.pool("jlora-host-lora", self._size)
        _one_thread_each()

    def prepare(self, shares: Sequence[Share], names: tuple[str, ...], layer: int) -> Site:
        """Begins to read the factors; returns at once."""
        factors = []
        for share in shares:
            held = {name: share.blocks[name] for name in names if name in share.blocks}
            factors.append((share, {n: self._threads.submit(self._factors, n, ids, layer) for n, ids in held.items()}))
        return Site(names, factors)

    def added(self, x: np.ndarray, site: Site) -> np.ndarray:
        """What the adapters add to the products of x [T, in]: [T, out], each shard's parts side by side."""
        out = np.zeros((len(x), self._layout.tp, self.width(site.names) // self._layout.tp), np.float32)
        tasks = []
        for share, coming in site.factors:
            factors = {name: future.result() for name, future in coming.items()}
            parts = np.array_split(share.rows, min(self._size, -(-len(share.rows) // ROWS)) or 1)
            tasks += [self._threads.submit(self._add, out, x, rows, (site.names, factors)) for rows in parts]
        for task in tasks:
            task.result()
        return out.reshape(len(x), -1).astype(x.dtype, copy=False)

    def width(self, names: Sequence[str]) -> int:
        """Numbers of these projections' products, all shards."""
        return self._layout.tp * sum(self._layout.units[name].b for name in names)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _factors(self, name: str, blocks: tuple[int, ...], layer: int) -> _Factors:
        return unpack(self._read(blocks, layer), self._layout, name)

    def _add(self, out: np.ndarray, x: np.ndarray, rows: np.ndarray, what: tuple[tuple[str, ...], Mapping]) -> None:
        names, factors = what
        part, at = x[rows].astype(np.float32, copy=False), 0
        for name in names:
            unit = self._layout.units[name]
            shards = factors.get(name, ())
            inner = sum(part[:, t * unit.a : (t + 1) * unit.a] @ a.T for t, (a, _) in enumerate(shards))
            for t, (_, b) in enumerate(shards):
                out[rows, t, at : at + unit.b] = inner @ b
            at += unit.b
