"""The NVIDIA kernels inside `shard_map` on 2 and 4 host devices, in the interpreter, against the reference there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jlora.doctor.checklist import room_of
from jlora.pallas import reference
from jlora.pallas.cases import TINY, AttentionCase, LoraCase, attention_inputs, attention_valid
from jlora.pallas.gpu_decode import DecodeTiles
from jlora.pallas.gpu_lora import LoraTiles, lora
from jlora.pallas.gpu_ops import GpuTiles, attention_op, runtime_refusal
from jlora.pallas.gpu_support import fit_units, lora_refusal
from tests.pallas import _gpu
from tests.pallas._tp import REPLICATED, Shards, mesh_of

pytestmark = pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal()))

SPEC = replace(TINY, heads=4, kv_heads=4, mlp=512, dtype="bfloat16")

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tp", "group"),
    [pytest.param(2, ("q", "k", "v"), marks=SLOW, id="q k v on 2"), pytest.param(4, ("down",), id="down on 4")],
)
def test_lora_on_several_devices_adds_up_to_the_reference(tp: int, group: tuple[str, ...]):
    case = LoraCase("tp", SPEC, 32, group, (8, 3), ((0, 3), (-1, 2), (1, 3)), tp, fit=fit_units)
    assert lora_refusal(case.layout, [case.layout.units[name] for name in group]) is None
    shards = Shards.of(case)

    def kernel(*args: Any) -> Any:
        return lora(*args, room=room_of(case), tiles=LoraTiles(blocks=2))

    with _gpu.interpreted(tp):
        got = shards.run(kernel)
    want = shards.run(reference.lora, dtype=jnp.float32)
    nobody = np.asarray(shards.adapters) < 0
    for out, wanted, base in zip(got, want, shards.bases, strict=True):
        np.testing.assert_allclose(out, wanted, atol=0.03 * np.abs(wanted).max())
        plain = np.asarray(base.astype(jnp.float32))
        np.testing.assert_array_equal(out[:, nobody], plain[:, nobody])
        assert np.abs(out - plain).max() > 0.1


@pytest.mark.slow
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
