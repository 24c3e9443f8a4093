"""Takes a launch through layers whose adapters are on their way: the host computes their part.

Four times a layer, an input leaves the device and what the adapters add to its products enters. These are
programs with transfers between them and not callbacks inside one program: the program would have to know
beforehand which layers have come, and a callback holds the device while the host computes
(docs/notes/cold-starts.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jlora.cache.pool import DevicePool
from jlora.engine.host_lora import HostLora, Share, Site
from jlora.model.cut import SPLIT, CutLayer, layer_of
from jlora.model.llama import Params
from jlora.model.spec import SITES

Shares = Sequence[Share]


class Assist:
    """The host's help for one runner.

    Args:
        gbps: exchanges take at least as long as at so many gigabytes per second; 0: as they are.
    """

    def __init__(self, programs: CutLayer, host: HostLora, mesh: Mesh, gbps: float = 0.0):
        self._programs = programs
        self._host = host
        self._sharding = NamedSharding(mesh, SPLIT)
        self._byte_s = 1e-9 / gbps if gbps else 0.0
        self._nothing: dict[tuple[int, ...], jax.Array] = {}  # zeros by shape

    def run(
        self, params: Params, layers: Iterable[int], pool: DevicePool, inputs: tuple[jax.Array, Any], shares: Shares
    ) -> jax.Array:
        """Takes a launch's x [T, D], the first of `inputs`, and its batch through consecutive layers; the new x."""
        (x, batch), programs = inputs, self._programs
        for index in layers:
            w, at = layer_of(params, index), np.int32(index)
            qkv, o, gate_up, down = (self._host.prepare(shares, names, index) for names in SITES)
            h, products = programs.enter(w, x, at)
            pool.array, out, product = programs.attend(w, pool.array, (products, self._added(h, qkv)), at, batch)
            x, h, products = programs.middle(w, x, (product, self._added(out, o)), at)
            hidden, product = programs.hidden(w, (products, self._added(h, gate_up)), at)
            x = programs.leave(x, (product, self._added(hidden, down)))
        return x

    def close(self) -> None:
        self._host.close()

    def _added(self, x: jax.Array, site: Site) -> jax.Array:
        """One exchange: waits for x, and sends what the adapters add."""
        shape = len(x), self._host.width(site.names)
        if not any(factors for _, factors in site.factors):
            if shape not in self._nothing:
                self._nothing[shape] = jax.device_put(np.zeros(shape, x.dtype), self._sharding)
            return self._nothing[shape]
        read = np.asarray(x)
        added = self._host.added(read, site)
        if self._byte_s:
            time.sleep((read.nbytes + added.nbytes) * self._byte_s)
        return jax.device_put(added, self._sharding)
