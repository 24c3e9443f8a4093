"""The host's products against plain numpy, for several adapters, ranks and shards at once."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from jlora import machine
from jlora.adapters.adapter import Adapter
from jlora.adapters.packing import pack
from jlora.engine.host_lora import HostLora, Share
from jlora.errors import ResourceExhausted
from jlora.layout import PoolLayout
from jlora.model.spec import SITES, ModelSpec
from jlora.ports import OsThreads
from tests import port
from tests._make import tiny_spec

RANKS = ({"q": 3, "v": 9, "down": 4}, {"q": 1, "k": 5, "o": 2, "gate": 2, "up": 7, "down": 1})
TOKENS, LAYER = 40, 1


def make(spec: ModelSpec, ranks: Mapping[str, int], random: np.random.Generator) -> Adapter:
    weights = {}
    for name, rank in ranks.items():
        for layer in range(spec.layers):
            pair = [random.normal(size=(rank, width)) for width in spec.projection_shapes[name]]
            a, b = (m.astype(ml_dtypes.bfloat16).astype(np.float32) for m in pair)  # so that packing loses nothing
            weights[layer, name] = a, b
    return Adapter("", max(ranks.values()), ranks, tuple(ranks), weights)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_each_tokens_adapter(dtype: str, tp: int):
    spec, random = tiny_spec(dtype=dtype), np.random.default_rng(3)
    layout = PoolLayout.of(spec, 10, 8, tp)
    adapters = [make(spec, ranks, random) for ranks in RANKS]
    packed = [pack(adapter, layout) for adapter in adapters]
    tier = np.concatenate([one.data for one in packed])
    shares = []
    for index, one in enumerate(packed):
        first, blocks = index * len(packed[0].projections), {}
        for block, name in enumerate(one.projections, first):
            blocks[name] = (*blocks.get(name, ()), block)
        shares.append(Share(np.arange(index, TOKENS - 5, 2), blocks))  # the last tokens are nobody's
    host = HostLora(layout, lambda ids, layer: tier[list(ids), layer])
    port.share_out(host, 3)  # an adapter's tokens are shared out
    for names in SITES:
        x = random.normal(size=(TOKENS, spec.projection_shapes[names[0]][0])).astype(tier.dtype)
        got = host.added(x, host.prepare(shares, names, LAYER))
        assert got.dtype == x.dtype and got.shape == (TOKENS, host.width(names))
        assert x.shape[1] + got.shape[1] == spec.exchanged(names[-1:])  # as predictions of the simulator count
        parts = []
        for name in names:
            delta = np.zeros((TOKENS, spec.projection_shapes[name][1]), np.float32)
            for share, adapter in zip(shares, adapters, strict=True):
                if (LAYER, name) in adapter.weights:
                    a, b = adapter.weights[LAYER, name]
                    delta[share.rows] = x[share.rows].astype(np.float32) @ a.T @ b
            parts.append(delta.reshape(TOKENS, tp, -1))
        wanted = np.concatenate(parts, axis=2).reshape(TOKENS, -1)  # each shard's parts side by side
        tolerance = 1e-5 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=tolerance, atol=tolerance)
    host.close()


def test_no_thread_is_started_once_the_engine_is_built(monkeypatch: pytest.MonkeyPatch):
    """A machine that starts no more threads then would fail a launch of several requests, and with it the engine."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    layout = PoolLayout.of(tiny_spec(), 10, 8, 1)
    monkeypatch.setattr(machine, "threads", lambda: 5)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ResourceExhausted, match="jlora-host-lora: the machine starts fewer than 4 more threads"):
            HostLora(layout, lambda ids, layer: np.zeros(0))
    host = HostLora(layout, lambda ids, layer: np.zeros((len(ids), *layout.block_shape[1:]), np.float32))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    x = np.ones((TOKENS, layout.units["down"].a), np.float32)
    share = Share(np.arange(TOKENS), {"down": (0,)})
    assert host.added(x, host.prepare([share], ("down",), LAYER)).shape == (TOKENS, host.width(("down",)))
    host.close()


def test_ctrl_c_while_threads_start_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch):
    """Python waits at its end for threads of a pool, which would wait for those that never start."""
    submit, calls = ThreadPoolExecutor.submit, itertools.count()

    def interrupted(pool: ThreadPoolExecutor, call: Callable[[], int]) -> Future[int]:
        if next(calls):
            raise KeyboardInterrupt
        return submit(pool, call)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OsThreads().pool("jlora-interrupted", 3)
    for thread in threading.enumerate():
        if thread.name.startswith("jlora-interrupted"):
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 3)])
def test_one_of_the_cores_that_the_process_may_use_is_left_to_the_engine(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
):
    """However many the machine has. With one core, the host still helps, and shares it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    before = threading.active_count()
    host = HostLora(PoolLayout.of(tiny_spec(), 10, 8, 1), lambda ids, layer: np.zeros(0))
    assert threading.active_count() - before == threads
    host.close()
