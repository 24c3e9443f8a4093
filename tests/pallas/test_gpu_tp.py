"""The NVIDIA kernels inside `shard_map` on 2 and 4 host devices, in the interpreter, against the reference there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jlora.pallas import reference
from jlora.pallas.cases import TINY, AttentionCase, LoraCase, attention_inputs, attention_valid, fill_block, lora_inputs
from jlora.pallas.gpu_checks import room_of
from jlora.pallas.gpu_decode import DecodeTiles
from jlora.pallas.gpu_layout import fit_units, lora_refusal
from jlora.pallas.gpu_lora import LoraTiles, lora
from jlora.pallas.gpu_ops import attention_op, runtime_refusal
from jlora.pallas.gpu_tiles import GpuTiles
from jlora.pallas.ops import Adapted
from tests.pallas import _gpu

pytestmark = pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal()))

SPEC = replace(TINY, heads=4, kv_heads=4, mlp=512, dtype="bfloat16")
SPLIT, REPLICATED = PartitionSpec("tp"), PartitionSpec()


def mesh_of(tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:tp]), ("tp",), axis_types=(AxisType.Auto,))


def shard_pool(case: LoraCase, seed: int, named: tuple[Any, ...]) -> jax.Array:
    """A shard's pool: random units of its own in the blocks that `named` lists."""
    layout, pool = case.layout, np.array(named[1], np.float32)
    rng = np.random.default_rng(100 + seed)
    for name, projection in zip(case.group, named[3], strict=True):
        active = projection.active
        for block in np.asarray(active.blocks)[int(active.start) : int(active.stop)]:
            fill_block(pool[layout.blocks + block], layout, name, layout.units[name].per_block, rng)
    return jnp.asarray(pool, layout.dtype)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tp", "group"),
    [pytest.param(2, ("q", "k", "v"), marks=SLOW, id="q k v on 2"), pytest.param(4, ("down",), id="down on 4")],
)
def test_lora_on_several_devices_adds_up_to_the_reference(tp: int, group: tuple[str, ...]):
    case = LoraCase("tp", SPEC, 32, group, (8, 3), ((0, 3), (-1, 2), (1, 3)), tp, fit=fit_units)
    units = [case.layout.units[name] for name in group]
    assert lora_refusal(case.layout, units) is None
    shards = [lora_inputs(case, seed) for seed in range(tp)]
    _, _, first, projections, adapters = shards[0]
    lists = [p.active for p in projections]
    xs = jnp.stack([s[0] for s in shards])
    pools = jnp.stack([shard_pool(case, seed, shards[0]) for seed in range(tp)])
    bases = [jnp.stack([s[3][i].base for s in shards]) for i in range(len(units))]

    def on_mesh(op: Callable[..., Any], dtype: Any) -> list[np.ndarray]:
        def local(x, pool, bases, lists, adapters):
            made = [Adapted(b[0], a, u) for b, a, u in zip(bases, lists, units, strict=True)]
            outs = op(x[0], pool[0], first, made, adapters, lambda h: jax.lax.psum(h, "tp"))
            return [out[None] for out in outs]

        specs = (SPLIT, SPLIT, SPLIT, REPLICATED, REPLICATED)
        mapped = jax.shard_map(local, mesh=mesh_of(tp), in_specs=specs, out_specs=SPLIT, check_vma=False)
        values = jax.tree.map(lambda a: a.astype(dtype), (xs, pools, bases))
        return [np.asarray(out.astype(jnp.float32)) for out in jax.jit(mapped)(*values, lists, adapters)]

    def kernel(*args: Any) -> Any:
        return lora(*args, room=room_of(case), tiles=LoraTiles(blocks=2))

    with _gpu.interpreted(tp):
        got = on_mesh(kernel, jnp.bfloat16)
    want = on_mesh(reference.lora, jnp.float32)
    nobody = np.asarray(adapters) < 0
    for out, wanted, base in zip(got, want, bases, strict=True):
        np.testing.assert_allclose(out, wanted, atol=0.03 * np.abs(wanted).max())
        plain = np.asarray(base.astype(jnp.float32))
        np.testing.assert_array_equal(out[:, nobody], plain[:, nobody])
        assert np.abs(out - plain).max() > 0.1


@pytest.mark.parametrize(
    ("tp", "chunk"), [pytest.param(4, 1, marks=SLOW, id="decode on 4"), pytest.param(2, 8, id="prompts on 2")]
)
def test_every_device_attends_with_its_own_heads(tp: int, chunk: int):
    spec = replace(SPEC, heads=tp, kv_heads=tp)
    rows = ((40, 1), (9, 1)) if chunk == 1 else ((8, 8), (13, 5))
    case = AttentionCase("tp", spec, 32, rows, chunk, frozenset() if chunk == 1 else frozenset({1}))
    q, pool, first, pages = attention_inputs(case)
    op = attention_op(GpuTiles(decode=DecodeTiles(blocks=2)))
    heads, keys = PartitionSpec(None, None, "tp"), PartitionSpec(None, None, "tp")
    local = jax.shard_map(
        lambda q, pool, pages: op(q, pool, first, pages),
        mesh=mesh_of(tp),
        in_specs=(heads, keys, REPLICATED),
        out_specs=heads,
        check_vma=False,
    )
    with _gpu.interpreted(tp):
        got = np.asarray(jax.jit(local)(q, pool, pages).astype(jnp.float32))
    want = np.asarray(reference.attention(q.astype(jnp.float32), pool.astype(jnp.float32), first, pages))
    valid = attention_valid(case)
    np.testing.assert_allclose(got[valid], want[valid], atol=0.02)
