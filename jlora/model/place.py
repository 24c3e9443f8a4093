"""Places weights in the parameter pytree on their devices, one at a time.

    into = Stacked(spec, shardings)
    into.put(name, slot, array)        # for every tensor, in any order
    into.check_finite()
    params = into.params

At most two tensors are in flight, so a fast disk cannot fill the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jlora.errors import DataLoss
from jlora.model.hf_names import Slot
from jlora.model.llama import Params
from jlora.model.spec import ModelSpec


class Listed:
    """Each weight is an array of its own; `params["layers"]` is a list, as in `shardings`."""

    def __init__(self, spec: ModelSpec, shardings: Params):
        self.params: Params = {"layers": [{} for _ in range(spec.layers)]}
        self._spec = spec
        self._shardings = shardings
        self._finite: dict[str, jax.Array] = {}
        self._last: jax.Array | None = None

    def put(self, name: str, slot: Slot, tensor: np.ndarray | jax.Array) -> None:
        if self._last is not None:
            jax.block_until_ready(self._last)
        where = self._sharding(slot)
        self._last = self._finite[name] = self._place(slot, where, jax.device_put(tensor, _as_stored(where, slot)))

    def adopt(self, slot: Slot, weight: jax.Array) -> None:
        """Adds a weight that is already on its devices in the model's dtype and layout."""
        slot.home(self.params)[slot.leaf] = weight

    def check_finite(self) -> None:
        """Waits for every tensor. Raises DataLoss with the name of the first that contains NaN or infinity."""
        bad = [name for name, finite in jax.device_get(self._finite).items() if not finite]
        if bad:
            raise DataLoss(f"tensor {bad[0]!r} contains NaN or infinity in {self._spec.dtype}")

    def _place(self, slot: Slot, where: Sharding, stored: jax.Array) -> jax.Array:
        slot.home(self.params)[slot.leaf], finite = _mover(where, self._spec.dtype, slot.transposed)(stored)
        return finite

    def _sharding(self, slot: Slot) -> Sharding:
        return slot.home(self._shardings)[slot.leaf]


class Stacked(Listed):
    """`params["layers"]` is one tree of [L, ...] arrays, each allocated once and filled in place."""

    def __init__(self, spec: ModelSpec, shardings: Params):
        super().__init__(spec, shardings)
        self.params = {"layers": {}}

    def adopt(self, slot: Slot, weight: jax.Array) -> None:
        if slot.layer is None:
            super().adopt(slot, weight)
        else:
            self._place(slot._replace(shape=weight.shape, transposed=False), self._sharding(slot), weight)

    def _place(self, slot: Slot, where: Sharding, stored: jax.Array) -> jax.Array:
        if slot.layer is None:
            return super()._place(slot, where, stored)
        stacks, where = self.params["layers"], _stacked(where)
        if slot.leaf not in stacks:
            shape = reversed(slot.shape) if slot.transposed else slot.shape
            stacks[slot.leaf] = jnp.zeros((self._spec.layers, *shape), self._spec.dtype, device=where)
        stacks[slot.leaf], finite = _filler(where, slot.transposed)(stacks[slot.leaf], stored, np.int32(slot.layer))
        return finite


def _move(stored: jax.Array, dtype: Any, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """The weight in the model's dtype and layout, and whether it is finite."""
    x = stored.astype(dtype)
    return (x.T if transposed else x), jnp.isfinite(x).all()


# Cached, so that a second load in this process (in a notebook, for example) compiles nothing.
@functools.lru_cache(maxsize=64)
def _mover(where: Sharding, dtype: str, transposed: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(lambda stored: _move(stored, dtype, transposed), out_shardings=(where, None))


@functools.lru_cache(maxsize=64)
def _filler(where: Sharding, transposed: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`_move` into layer `index` of a donated stack."""

    def fill(stack: jax.Array, stored: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, finite = _move(stored, stack.dtype, transposed)
        return jax.lax.dynamic_update_index_in_dim(stack, x, index, 0), finite

    return jax.jit(fill, donate_argnums=0, out_shardings=(where, None))


def _stacked(layer: Sharding) -> Sharding:
    return NamedSharding(layer.mesh, PartitionSpec(None, *layer.spec)) if isinstance(layer, NamedSharding) else layer


def _as_stored(ours: Sharding, slot: Slot) -> Sharding:
    """The sharding of the checkpoint's layout under which the transpose needs no communication."""
    if not slot.transposed or not isinstance(ours, NamedSharding):
        return ours
    return NamedSharding(ours.mesh, PartitionSpec(*reversed((*ours.spec, None, None)[:2])))
