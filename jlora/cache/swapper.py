"""Carries out the manager's copies between host memory and the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from jlora.cache.manager import Copy
from jlora.cache.pool import DevicePool


class Swapper:
    """`packed(uid)` gives an adapter's blocks on the host, [n, L, B, 2K, H]."""

    def __init__(self, pool: DevicePool, packed: Callable[[int], np.ndarray]):
        self._pool = pool
        self._packed = packed

    def apply(self, copies: Iterable[Copy]) -> None:
        """Stages all copies, then enqueues their scatters: a step dispatched later sees them."""
        staged = [self._pool.stage(copy.blocks, self._packed(copy.uid)) for copy in copies]
        for pieces in staged:
            self._pool.place(pieces)
