"""LoRA on several host devices: inputs of each shard, and an op inside `shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jlora.pallas.cases import LoraCase, fill_block, lora_inputs
from jlora.pallas.ops import ActiveBlocks, Adapted

SPLIT, REPLICATED = PartitionSpec("tp"), PartitionSpec()


def mesh_of(tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:tp]), ("tp",), axis_types=(AxisType.Auto,))


@dataclass(frozen=True)
class Shards:
    """A case on `tp` devices: x, pools and bases are stacked by shard; the lists are the same on all of them."""

    case: LoraCase
    xs: jax.Array
    pools: jax.Array
    bases: list[jax.Array]
    lists: list[ActiveBlocks]
    adapters: jax.Array
    first: jax.Array

    @classmethod
    def of(cls, case: LoraCase) -> Shards:
        made = [lora_inputs(case, seed) for seed in range(case.tp)]
        _, _, first, projections, adapters = made[0]
        pools = jnp.stack([_pool(case, seed, made[0]) for seed in range(case.tp)])
        bases = [jnp.stack([inputs[3][i].base for inputs in made]) for i in range(len(case.group))]
        xs = jnp.stack([inputs[0] for inputs in made])
        return cls(case, xs, pools, bases, [p.active for p in projections], adapters, first)

    def run(self, op: Callable[..., Any], bases: list[jax.Array] | None = None, dtype: Any = None) -> list[np.ndarray]:
        """The op's results by shard, in float32; `bases` and `dtype` take the place of the case's own."""
        units = [self.case.layout.units[name] for name in self.case.group]

        def local(x, pool, bases, lists, adapters):
            adapted = [Adapted(b[0], a, u) for b, a, u in zip(bases, lists, units, strict=True)]
            outs = op(x[0], pool[0], self.first, adapted, adapters, lambda h: jax.lax.psum(h, "tp"))
            return [out[None] for out in outs]

        specs = (SPLIT, SPLIT, SPLIT, REPLICATED, REPLICATED)
        mapped = jax.shard_map(local, mesh=mesh_of(self.case.tp), in_specs=specs, out_specs=SPLIT, check_vma=False)
        values: Any = (self.xs, self.pools, self.bases if bases is None else bases)
        values = values if dtype is None else jax.tree.map(lambda a: a.astype(dtype), values)
        return [np.asarray(out.astype(jnp.float32)) for out in jax.jit(mapped)(*values, self.lists, self.adapters)]


def _pool(case: LoraCase, seed: int, named: tuple[Any, ...]) -> jax.Array:
    """A shard's pool: random units of its own in the blocks that the lists of `named` name."""
    layout, pool = case.layout, np.array(named[1], np.float32)
    rng = np.random.default_rng(100 + seed)
    for name, projection in zip(case.group, named[3], strict=True):
        active = projection.active
        for block in np.asarray(active.blocks)[int(active.start) : int(active.stop)]:
            fill_block(pool[layout.blocks + block], layout, name, layout.units[name].per_block, rng)
    return jnp.asarray(pool, layout.dtype)
