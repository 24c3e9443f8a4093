"""The programs of merging, compiled for Llama-3-8B: they need little memory beside the weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jlora.engine.merger import PROMPT
from jlora.model import llama, merge, sharding
from jlora.model.spec import PROJECTIONS
from jlora.pallas.cases import LLAMA3_8B
from tests.pallas import _aot, _gpu

H200_MOST, V6E_MOST = 0.02 * 141e9, 0.02 * 32e9  # bytes: shares of a chip's memory
RANKS = 256  # `adapters.max_rank`
IN_PLACE = frozenset({"accumulate gate", "merge gate", "unmerge gate", "patch gate"})  # they write what they are given


def programs_of(mesh: Mesh, stacked: bool) -> Iterator[tuple[str, Any, tuple[Any, ...], tuple[Any, ...]]]:
    """What a merge and its measurement run: name, program, what it changes or reads of the model, other arguments."""
    spec = LLAMA3_8B
    params, specs = llama.abstract(spec)[0], sharding.param_specs(spec)
    if stacked:
        params, specs = jax.eval_shape(llama.stack_layers, params), sharding.stacked_specs(specs)
    params = _aot.placed(params, mesh, specs)
    layers = params["layers"] if stacked else params["layers"][0]
    programs, probes = merge.build(spec, mesh, stacked), merge.build_probe(spec, mesh, stacked)

    def array(shape: tuple[int, ...], dtype: Any, where: PartitionSpec) -> Any:
        return _aot.placed(jax.ShapeDtypeStruct(shape, dtype), mesh, where)

    at, three = array((), jnp.int32, sharding.REPLICATED), []
    for dtype in (jnp.float32, jnp.bfloat16, jnp.bfloat16):
        three.append(array((PROMPT, spec.width), dtype, sharding.REPLICATED))
    delta = array(spec.projection_shapes["gate"], jnp.float32, merge.weight_spec("gate"))
    for name in ("merge", "unmerge", "lost"):
        yield f"{name} gate", getattr(programs["gate"], name), (layers["gate"],), (at, delta)
    lists, most = programs["gate"].take, max(programs["gate"].take)
    sizes = {"take gate": programs["gate"].most, "patch gate": most}
    lost = {
        name: [array((mesh.devices.size * size,), dtype, merge.SHARDS) for dtype in (jnp.int32, jnp.uint16)]
        for name, size in sizes.items()
    }
    yield "take gate", lists[most], (), (*lost["take gate"], at)
    yield "patch gate", programs["gate"].patch, (layers["gate"],), (at, *lost["patch gate"])
    yield "digest gate", programs["gate"].digest, (layers["gate"],), (at,)
    pair = zip(spec.projection_shapes["gate"], merge.factor_specs("gate"), strict=True)
    some = [array((merge.RANKS, n), jnp.bfloat16, where) for n, where in pair]
    yield "accumulate gate", programs["gate"].accumulate, (delta,), tuple(some)
    factors = {}
    for name in PROJECTIONS:
        pair = zip(spec.projection_shapes[name], merge.factor_specs(name), strict=True)
        factors[name] = (*(array((RANKS, n), jnp.bfloat16, where) for n, where in pair), at)
    yield "probed layer", probes.layer, (layers,), (at, factors, tuple(three))
    yield "probed logits", probes.errors, (params["head"], params["norm"]), (tuple(three),)


def check(mesh: Mesh, stacked: bool, chip: str, most: float, record_property: Any) -> None:
    """Compiles all; with arguments and results beside the weights, each takes less than `most` bytes of a device."""
    for name, program, weights, others in programs_of(mesh, stacked):
        found = _aot.compiled(program, (*weights, *others), mesh)
        record_property("compiled", found.row(f"{name} llama3-8b", chip, mesh.devices.size))
        beside = sum(map(_bytes, jax.tree.leaves(others))) + found.output - found.alias
        assert found.temp + beside < most, f"{name}: {found.temp / 1e9:.2f} GB, and {beside / 1e9:.2f} beside it"
        assert name not in IN_PLACE or found.alias >= _bytes(weights[0]), f"{name}: makes a copy of what it changes"


def _bytes(x: Any) -> int:
    """Of one device's part."""
    assert isinstance(x.sharding, NamedSharding)
    return prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_merging_needs_little_memory_on_a_cpu(stacked: bool, record_property: Any):
    if stacked and jax.__version_info__ < (0, 12):
        pytest.skip("on a CPU this jax copies a stack of layers to take an adapter out; layers are no stack there")
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("tp",), axis_types=(AxisType.Auto,))
    check(mesh, stacked, "CPU", H200_MOST, record_property)


@pytest.mark.aot_tpu
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.aot_more), 4])
def test_merging_needs_little_memory_on_a_tpu(tp: int, record_property: Any):
    check(_aot.tpu_mesh("v6e", tp), True, "v6e", V6E_MOST, record_property)


@pytest.mark.aot_cuda
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.aot_more), 4])
def test_merging_needs_little_memory_on_an_h200(tp: int, record_property: Any):
    _gpu.need_compiler()
    mesh = Mesh(np.array(_gpu.devices(tp)), ("tp",), axis_types=(AxisType.Auto,))
    check(mesh, False, "H200", H200_MOST, record_property)
