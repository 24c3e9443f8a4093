"""The Llama: weights and the forward pass.

`Llama` (Flax NNX) declares every weight: shape, initial value, logical axes. `forward` is the only
forward pass: serving, training and the tests' dense reference pass it how tokens attend and how
adapters add to a projection.

Letters: T tokens, D width, N query heads, K KV heads, H head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jlora.model.spec import ModelSpec

Params = Any  # plain pytree: {"embed", "layers": [...] or stacked {...}, "norm", "head"?}

# Logical axis of a weight's dimension -> mesh axis that splits it (None: replicated).
# "split" is a model-width dimension that tensor parallelism splits (embedding, head).
MESH_AXES = {"vocab": None, "width": None, "split": "tp", "heads": "tp", "mlp": "tp"}


class Layer(nnx.Module):
    """One transformer block's weights; matrices are [input, output]."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs):
        make = _Init(spec, rngs)
        axes = {"q": "heads", "k": "heads", "v": "heads", "gate": "mlp", "up": "mlp"}
        self.attn_norm = make.ones(("width",), (spec.width,))
        self.mlp_norm = make.ones(("width",), (spec.width,))
        for name, shape in spec.projection_shapes.items():
            logical = ("width", axes[name]) if name in axes else ("heads" if name == "o" else "mlp", "width")
            setattr(self, name, make.normal(logical, shape))


class Llama(nnx.Module):
    """All weights of a Llama; `__call__` is the dense forward pass of one batch of sequences."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs):
        make = _Init(spec, rngs)
        self.spec = spec
        self.embed = make.normal(("vocab", "split"), (spec.vocab, spec.width), scale=1.0)
        self.layers = nnx.List([Layer(spec, rngs) for _ in range(spec.layers)])
        self.norm = make.ones(("width",), (spec.width,))
        if not spec.tied:
            self.head = make.normal(("split", "vocab"), (spec.width, spec.vocab))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[S, C] token ids -> [S, C, V] logits, causal attention inside each row."""
        return dense_logits(self.spec, plain(nnx.split(self)[1]), tokens)


class _Init(NamedTuple):
    spec: ModelSpec
    rngs: nnx.Rngs

    def normal(self, axes: tuple[str, ...], shape: tuple[int, ...], scale: float | None = None) -> nnx.Param:
        std = scale if scale is not None else 1 / math.sqrt(shape[0])
        value = jax.random.normal(self.rngs.params(), shape, jnp.float32) * std
        return nnx.Param(value.astype(self.spec.dtype), axes=axes)

    def ones(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> nnx.Param:
        return nnx.Param(jnp.ones(shape, self.spec.dtype), axes=axes)


def plain(state: Any) -> Params:
    """An NNX state as the pytree that `forward` takes, layers as a list."""
    tree = nnx.to_pure_dict(state)
    tree["layers"] = [tree["layers"][i] for i in range(len(tree["layers"]))]
    return tree


@functools.lru_cache(maxsize=4)  # a start asks several times
def abstract(spec: ModelSpec) -> tuple[Params, Params]:
    """Shapes (`jax.ShapeDtypeStruct`) and logical axes (tuples) of every weight; not to be changed."""
    state = nnx.state(nnx.eval_shape(lambda: Llama(spec, nnx.Rngs(0))))
    shapes = plain(state)
    axes = plain(jax.tree.map(lambda v: v.get_metadata("axes"), state, is_leaf=lambda v: isinstance(v, nnx.Variable)))
    return shapes, axes


def stack_layers(params: Params) -> Params:
    """The same weights with `layers` as one stacked tree [L, ...], for `lax.scan`."""
    return {**params, "layers": jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])}


class Shard(NamedTuple):
    """This program's shard on the tensor-parallel axis; axis None is a single device."""

    axis: str | None = None
    size: int = 1

    def psum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.axis) if self.size > 1 else x

    def gather(self, x: jax.Array) -> jax.Array:
        """Concatenates the shards' last dimension."""
        return lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True) if self.size > 1 else x

    def slice(self, x: jax.Array) -> jax.Array:
        """This shard's part of the last dimension."""
        if self.size == 1:
            return x
        part = x.shape[-1] // self.size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * part, part, x.ndim - 1)

    def replace(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """x with this shard's part of the last dimension replaced by `part`."""
        if self.size == 1:
            return part
        at = (0,) * (x.ndim - 1) + (lax.axis_index(self.axis) * part.shape[-1],)
        return lax.dynamic_update_slice(x, part, at)


# layer: a traced int32 scalar.
# attend(carry, layer, q [T,N,H], k [T,K,H], v [T,K,H]) -> (carry, out [T,N,H])
Attend = Callable[[Any, Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]
# adapt(carry, layer, x [T,in], products) -> products with the adapters added
# products: the base's x W [T,out] by projection
Adapt = Callable[[Any, Any, jax.Array, Mapping[str, jax.Array]], Mapping[str, jax.Array]]


def no_adapters(carry: Any, layer: Any, x: jax.Array, products: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """The base model alone."""
    return products


class Joints(NamedTuple):
    """The functions that the caller of a forward pass provides."""

    attend: Attend
    adapt: Adapt = no_adapters
    shard: Shard = Shard()


def forward(
    spec: ModelSpec, params: Params, tokens: jax.Array, positions: jax.Array, carry: Any, joints: Joints
) -> tuple[Any, jax.Array]:
    """Runs every layer over T tokens.

    Args:
        tokens, positions: [T] int32.
        carry: what `attend` reads and writes (the KV pool in serving).
    Returns:
        carry, and the final normalised hidden states [T, D] (replicated over shards).
    """
    x = embed(params, tokens, joints.shard)
    carry, x = over_layers(spec, Run(params["layers"], 0, spec.layers), positions, (carry, x), joints)
    return carry, rms_norm(x, params["norm"], spec.norm_eps)


def embed(params: Params, tokens: jax.Array, shard: Shard = Shard()) -> jax.Array:
    """[T] token ids -> [T, D], the first layer's input."""
    return shard.gather(params["embed"][tokens])


class Run(NamedTuple):
    """Consecutive layers: all of them in `forward`, a group of them in a streamed step.

    Attributes:
        layers: the run's layers as a list, or all layers of the model as one stacked tree.
        first: index of the run's first layer; may be traced.
        count: number of layers.
    """

    layers: Any
    first: jax.Array | int
    count: int


def over_layers(
    spec: ModelSpec, run: Run, positions: jax.Array, state: tuple[Any, jax.Array], joints: Joints
) -> tuple[Any, jax.Array]:
    """Takes (carry, x [T, D]) through a run of layers. Unrolls a list; scans a stacked tree."""
    rotate = rope(spec, positions)

    def layer(state: tuple[Any, jax.Array], w: Mapping[str, jax.Array], index: jax.Array | int):
        carry, x = state
        carry, x = _attention(spec, w, index, carry, x, rotate, joints)
        return carry, _mlp(spec, w, index, carry, x, joints)

    if isinstance(run.layers, list):
        traced_once = jax.jit(layer)  # XLA inlines the calls, so the program is the unrolled one
        for offset, w in enumerate(run.layers):
            # Orders a layer's pool reads before the next layer's write; otherwise XLA copies the pool.
            state = lax.optimization_barrier(traced_once(state, w, jnp.int32(run.first + offset)))
        return state

    def body(state, index):
        w = jax.tree.map(lambda stacked: lax.dynamic_index_in_dim(stacked, index, keepdims=False), run.layers)
        return layer(state, w, index), None

    return lax.scan(body, state, run.first + jnp.arange(run.count, dtype=jnp.int32))[0]


def logits(spec: ModelSpec, params: Params, hidden: jax.Array, shard: Shard = Shard()) -> jax.Array:
    """[S, D] final hidden states -> [S, V] float32 logits (replicated over shards)."""
    head = params["embed"].T if spec.tied else params["head"]
    return shard.psum((shard.slice(hidden) @ head).astype(jnp.float32))


def _attention(spec, w, index, carry, x, rotate, joints):
    h = rms_norm(x, w["attn_norm"], spec.norm_eps)
    products = joints.adapt(carry, index, h, {name: h @ w[name] for name in "qkv"})
    q, k, v = (products[name].reshape(len(h), -1, spec.head_dim) for name in "qkv")
    carry, out = joints.attend(carry, index, rotate(q), rotate(k), v)
    return carry, x + _row_parallel(w["o"], index, carry, out.reshape(len(h), -1), joints, "o")


def _mlp(spec, w, index, carry, x, joints):
    h = rms_norm(x, w["mlp_norm"], spec.norm_eps)
    products = joints.adapt(carry, index, h, {name: h @ w[name] for name in ("gate", "up")})
    hidden = jax.nn.silu(products["gate"]) * products["up"]
    return x + _row_parallel(w["down"], index, carry, hidden, joints, "down")


def _row_parallel(weight, index, carry, x, joints, name):
    """Product of an x that is split over shards: a partial sum. The adapters add to this shard's slice of it."""
    y = x @ weight
    part = joints.adapt(carry, index, x, {name: joints.shard.slice(y)})[name]
    return joints.shard.psum(joints.shard.replace(y, part))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm in float32 (Zhang and Sennrich 2019, Equation 4)."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def rope(spec: ModelSpec, positions: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Rotary embedding at `positions` [T]; rotates halves, as Hugging Face checkpoints expect."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(spec))
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    return rotate


def inverse_frequencies(spec: ModelSpec) -> np.ndarray:
    """[H/2] float32 rotation speeds with `linear` or `llama3` scaling applied."""
    half = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    inverse = 1.0 / spec.rope_theta**half
    scaling = spec.rope_scaling
    if scaling is None:
        return inverse.astype(np.float32)
    if scaling.kind == "linear":
        return (inverse / scaling.factor).astype(np.float32)
    # llama3: divides the frequencies of long wavelengths by `factor`, keeps short ones, with a ramp in between.
    turns = scaling.original_max_len * inverse / (2 * np.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = np.clip(ramp, 0.0, 1.0)
    return (inverse * (ramp + (1 - ramp) / scaling.factor)).astype(np.float32)


def dense_attend(rows: int) -> Attend:
    """Causal attention inside each of `rows` equally long sequences, without a cache."""

    def attend(carry, index, q, k, v):
        q, k, v = (t.reshape(rows, -1, *t.shape[1:]) for t in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return carry, out.reshape(-1, *out.shape[2:])

    return attend


def dense_logits(spec: ModelSpec, params: Params, tokens: jax.Array, adapt: Adapt = no_adapters) -> jax.Array:
    """[S, C] token ids -> [S, C, V] float32 logits, for training and as the tests' reference."""
    rows, length = tokens.shape
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows)
    joints = Joints(dense_attend(rows), adapt)
    _, hidden = forward(spec, params, tokens.reshape(-1), positions, None, joints)
    return logits(spec, params, hidden).reshape(rows, length, -1)
