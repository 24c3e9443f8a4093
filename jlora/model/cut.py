"""A layer cut at the four places where adapters act, so that the host can compute their part.

Each program ends with what a projection takes, which the host reads. The next one begins with what the
host added to its product:

    enter     norm                               -> input of q, k, v        and their products
    attend    + added, rope, attention           -> input of o              and its product
    middle    + added, residual, norm            -> input of gate and up    and their products
    hidden    + added, SwiGLU                    -> input of down           and its product
    leave     + added, residual

No program has a LoRA op: every adapter of such a launch is on its way to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from jlora.model.llama import Joints, Params, Shard, rms_norm, rope
from jlora.model.spec import ModelSpec

SPLIT = PartitionSpec(None, "tp")

# A product of the base, and what the host adds to it, in the same sharding.
Sum = tuple[jax.Array, jax.Array]
Step = tuple[jax.Array, ...]  # a program's results: see `CutLayer`


class CutLayer(NamedTuple):
    """The jitted programs of a layer `index`. `w` is what `layer_of` gives.

    enter(w, x [T, D], index) -> h [T, D], products [T, q + k + v]
    attend(w, pool, (products, added), index, batch) -> pool, out [T, N * H], product [T, D]
    middle(w, x, (product, added), index) -> x, h [T, D], products [T, gate + up]
    hidden(w, (products, added), index) -> hidden [T, F], product [T, D]
    leave(x, (product, added)) -> x

    Products of several projections are one array, each shard's parts side by side.
    """

    enter: Wrapped
    attend: Wrapped
    middle: Wrapped
    hidden: Wrapped
    leave: Wrapped


class Cutter(NamedTuple):
    """Makes the programs.

    Attributes:
        attending: (pool, batch) -> positions [T] and the joints that attend.
        stacked: the weights are one stacked tree.
    """

    spec: ModelSpec
    shard: Shard
    attending: Callable[[jax.Array, Any], tuple[jax.Array, Joints]]
    stacked: bool

    def build(self, on_mesh: Callable[..., Wrapped], weights: Any, pool: PartitionSpec) -> CutLayer:
        """`on_mesh` jits a function of sharded arguments; `weights`, `pool`: their shardings."""
        w, rep = weights["layers"] if self.stacked else weights["layers"][0], PartitionSpec()
        inner, outer = (SPLIT, SPLIT), (rep, SPLIT)
        return CutLayer(
            on_mesh(self.enter, (w, rep, rep), (rep, SPLIT)),
            on_mesh(self.attend, (w, pool, inner, rep, rep), (pool, SPLIT, rep), donate=1),
            on_mesh(self.middle, (w, rep, outer, rep), (rep, rep, SPLIT)),
            on_mesh(self.hidden, (w, inner, rep), (SPLIT, rep)),
            on_mesh(self.leave, (rep, outer), rep),
        )

    def enter(self, layers: Any, x: jax.Array, index: jax.Array) -> Step:
        w = self._weights(layers, index)
        return self._into(w, rms_norm(x, w["attn_norm"], self.spec.norm_eps), ("q", "k", "v"))

    def attend(self, layers: Any, pool: jax.Array, products: Sum, index: jax.Array, batch: Any) -> Step:
        spec, w = self.spec, self._weights(layers, index)
        positions, joints = self.attending(pool, batch)
        heads, kv_heads = (n // self.shard.size * spec.head_dim for n in (spec.heads, spec.kv_heads))
        parts = jnp.split(_sum(products), (heads, heads + kv_heads), axis=1)
        q, k, v = (part.reshape(len(part), -1, spec.head_dim) for part in parts)
        rotate = rope(spec, positions)
        pool, out = joints.attend(pool, index, rotate(q), rotate(k), v)
        out = out.reshape(len(out), -1)
        return pool, out, self.shard.psum(out @ w["o"])

    def middle(self, layers: Any, x: jax.Array, product: Sum, index: jax.Array) -> Step:
        w, x = self._weights(layers, index), self.leave(x, product)
        return x, *self._into(w, rms_norm(x, w["mlp_norm"], self.spec.norm_eps), ("gate", "up"))

    def hidden(self, layers: Any, products: Sum, index: jax.Array) -> Step:
        gate, up = jnp.split(_sum(products), 2, axis=1)
        hidden = jax.nn.silu(gate) * up
        return hidden, self.shard.psum(hidden @ self._weights(layers, index)["down"])

    def leave(self, x: jax.Array, product: Sum) -> jax.Array:
        base, added = product
        return x + (base + self.shard.gather(added))

    def _weights(self, layers: Any, index: jax.Array) -> Mapping[str, jax.Array]:
        if not self.stacked:
            return layers
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, keepdims=False), layers)

    def _into(self, w: Mapping[str, jax.Array], h: jax.Array, names: tuple[str, ...]) -> Step:
        return h, jnp.concatenate([h @ w[name] for name in names], axis=1)


def _sum(product: Sum) -> jax.Array:
    base, added = product
    return base + added


def layer_of(params: Params, index: int) -> Any:
    """The weights that a layer's programs take: the layer's own, or all of them as one stacked tree."""
    layers = params["layers"]
    return layers[index] if isinstance(layers, list) else layers
