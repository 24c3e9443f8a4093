"""The same answers whatever the cache does, on the real engine, with freed blocks full of NaN.

Every device block that is given back is overwritten with NaN at once, in the order of the device's
work. So a read of a block that nobody owns, of one whose copy has not landed, or of a stale one
cannot go unseen: it changes the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jlora.cache import inspect
from jlora.cache.inspect import invalid_kv
from jlora.cache.transfer import Copy
from jlora.config import POLICIES
from jlora.types import CacheState, Request
from tests import _make
from tests.cache._books import evict_all
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, SEEDED, UNBOUND, mixed, running, serve, tokens

# Small enough that the adapters and the prompts of one batch never fit together.
TIGHT: dict[str, Any] = {"blocks": 60, "cache__monitor_s": 0.001}
# Nothing moves but what requests move, so that what a test evicts stays out.
UNMOVED: dict[str, Any] = {"cache__monitor_s": 60}


@contextmanager
def poisoned(model: Path, adapters: dict[str, Path], **settings: Any) -> Iterator[Running]:
    """A running service whose freed device blocks hold NaN."""
    with running(model, adapters, **settings) as service:
        swapper, pool = service.parts.swapper, service.parts.runner.pool
        tier = inspect.cells(service.manager).device
        give, landed = tier.give, swapper.landed
        freed: list[int] = []

        def poison() -> None:
            nan = np.full((len(freed), *service.layout.block_shape), np.nan, np.float32)
            pool.place(pool.stage(freed, nan))
            freed.clear()

        def watched_give(kind: int, blocks: Sequence[int]) -> None:
            give(kind, blocks)
            freed.extend(blocks)
            if threading.current_thread().name == "jlora-engine":  # others may not touch the pool:
                poison()

        def watched_landed() -> list[Copy]:  # what they freed is poisoned when the next step begins
            poison()
            return landed()

        with service.paused():
            freed.extend(range(1, tier.total + 1))
            for adapter in service.manager.adapters.values():  # those that are there already
                freed = [b for b in freed if b not in adapter.device]
            tier.give = watched_give  # pyright: ignore[reportAttributeAccessIssue]
            swapper.landed = watched_landed
        yield service


def check(service: Running, rounds: int, expected: dict[str, list[int]]) -> CacheState:
    for _ in range(rounds):
        got = serve(service, mixed())
        assert {name: tokens(events) for name, events in got.items()} == expected
    return service.cache_state()


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tiny_adapters: dict[str, Path]) -> dict[str, list[int]]:
    """The answers to `mixed()` (greedy, seeded and with penalties) without any caching, each request alone."""
    with running(tiny_model, tiny_adapters, cache__prefix_reuse=False) as service:
        return {request.id: tokens(serve(service, [request])[request.id]) for request in mixed()}


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_do_not_depend_on_the_policy_in_a_pool_that_never_stops_swapping(
    policy: str, tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    # The adapters' part of a split must hold the largest one, and not all of them.
    settings = {**TIGHT, "blocks": 105} if policy.startswith("vllm") else TIGHT
    with poisoned(tiny_model, tiny_adapters, cache__policy=policy, **settings) as service:
        state = check(service, 2, expected)
        assert state.policy == policy
        assert state.bytes_swapped_in > service.layout.block_bytes * state.host.adapters  # each more than once
        assert (state.kv_hit_tokens > 0) == (policy != "slora")
        if policy not in UNBOUND:
            assert invalid_kv(service.manager) == state.invalid_kv == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"cache__prefix_reuse": False},
        {"cache__link_gbps": 0.01},  # every copy takes many steps
        {"cache__link_gbps": 0.05, "engine__layers": "unroll"},
        {"blocks": 30},  # preemption too
        {"model__tp": 2},
        {"engine__overlap": False},
        {"engine__max_step_tokens": 5},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_answers_do_not_depend_on_how_the_cache_is_used(
    settings: dict[str, Any], tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    with poisoned(tiny_model, tiny_adapters, **{**TIGHT, **settings}) as service:
        reuse = settings.get("cache__prefix_reuse", True)
        for _ in range(5):  # the clock decides by the costs whether KV comes back from the host, or is computed again
            state = check(service, 3, expected)
            if state.kv_host_hit_tokens or not reuse:
                break
        assert (state.kv_host_hit_tokens > 0) == reuse


def test_what_a_full_host_tier_drops_is_computed_again_with_equal_answers(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    with running(tiny_model, tiny_adapters) as service:
        adapters = service.cache_state().host.adapters
    with poisoned(tiny_model, tiny_adapters, **TIGHT, cache__host_blocks=adapters + 6) as service:
        state = check(service, 3, expected)
        assert state.blocks_lost > 0 and state.host.free + state.host.adapters + state.host.history_kv == adapters + 6


@pytest.mark.slow
def test_an_adapter_reloaded_under_its_name_answers_as_the_new_one_at_once(tmp_path: Path, tiny_model: Path, tiny_spec):
    def make(seed: int) -> Path:
        return _make.make_adapter(tmp_path / f"v{seed}", tiny_spec, seed=seed, r=6, targets=("q", "v", "down"))

    paths = [make(seed) for seed in range(4)]
    requests = [Request(f"r{i}", tuple(range(3 + i, 40 + i)), (GREEDY, SEEDED)[i % 2], adapter="x") for i in range(4)]
    wanted = []
    for path in paths:
        with running(tiny_model, {"x": path}, cache__prefix_reuse=False) as service:
            wanted.append({r.id: tokens(serve(service, [r])[r.id]) for r in requests})
    assert len({str(w) for w in wanted}) == len(wanted)  # each version answers in its own way
    for policy in ("jlora", "fastlibra-wom", "vllm-fair"):
        settings = {"blocks": 40, "cache__monitor_s": 0.001, "cache__policy": policy}
        with poisoned(tiny_model, {"x": paths[0]}, **settings) as service:
            for version in (0, 1, 2, 3, 0, 2):
                service.load_adapter("x", str(paths[version]), replace=True)
                for _ in range(2):  # the second time from the cache
                    got = serve(service, requests)
                    assert {name: tokens(events) for name, events in got.items()} == wanted[version]
            assert service.cache_state().kv_hit_tokens > 0


def test_two_tenants_with_equal_prompts_get_equal_answers_and_share_nothing(tiny_model: Path, tiny_adapters):
    prompt = tuple(range(3, 67))
    alone = Request("alone", prompt, GREEDY, adapter="small", bypass_prefix_cache=True)
    with poisoned(tiny_model, tiny_adapters, **TIGHT) as service:
        wanted = tokens(serve(service, [alone])["alone"])
        cached = {}
        for turn in range(2):
            for tenant in ("red", "blue"):
                request = replace(alone, id=f"{tenant}{turn}", tenant=tenant, bypass_prefix_cache=False)
                events = serve(service, [request])[request.id]
                assert tokens(events) == wanted
                cached[request.id] = events[-1].usage.cached_tokens
        assert cached == {"red0": 0, "blue0": 0, "red1": 56, "blue1": 56}


def test_cold_starts_are_told_apart_in_the_timing(tiny_model: Path, tiny_adapters: dict[str, Path]):
    prompt = tuple(range(3, 67))
    first, other = Request("first", prompt, GREEDY, adapter="large"), Request("other", prompt, GREEDY, adapter="middle")
    with poisoned(tiny_model, tiny_adapters, **UNMOVED, blocks=100, cache__link_gbps=0.02) as service:
        serve(service, [first])
        while service.cache_state().in_flight:  # its KV is being written to the host
            pass
        with service.paused():  # push it out, as others' requests would
            evict_all(service.manager)
        timing = serve(service, [replace(first, id="again")])["again"][-1].timing
        assert timing.adapter_cold_start > 0 and timing.kv_cold_start > 0
        assert timing.cold_start == "wait"
        waited = service.cache_state().cold_waited
        assert timing.ttft >= timing.queue + max(timing.adapter_cold_start, timing.kv_cold_start)
        warm = serve(service, [replace(first, id="warm")])["warm"][-1].timing
        assert warm.adapter_cold_start == 0 and warm.kv_cold_start == 0
        assert warm.cold_start == "" and service.cache_state().cold_waited == waited > 0
        assert serve(service, [other])["other"][-1].timing.kv_cold_start == 0


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_that_starts_before_its_last_layers_have_arrived_answers_the_same(
    layers: str, tp: int, tiny_model: Path, tiny_adapters: dict[str, Path]
):
    prompt = tuple(3 + i % 80 for i in range(100))
    settings = {"engine__layers": layers, "model__tp": tp, "engine__max_step_tokens": 64, **UNMOVED}
    long = Request("long", prompt, GREEDY, adapter="large")
    with poisoned(tiny_model, tiny_adapters, **settings, blocks=100, cache__link_gbps=5e-4) as service:  # 4 ms a block
        manager = service.manager
        wanted = tokens(serve(service, [replace(long, bypass_prefix_cache=True)])["long"])
        serve(service, [replace(long, prompt=prompt[:48])])
        while service.cache_state().in_flight:
            pass
        with service.paused():
            evict_all(manager)
            manager.policy.meter.token_s = 1.0  # as if a step took far longer than the copies
        before = service.cache_state().streamed
        again = serve(service, [replace(long, id="again")])["again"]
        assert tokens(again) == wanted
        assert again[-1].usage.cached_tokens == 48 and service.cache_state().streamed == before + 1
