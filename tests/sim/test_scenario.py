"""A scenario is put together as it says, and refuses what cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.errors import ConfigError
from jlora.sim.hardware import MODELS, Hardware
from jlora.sim.scenario import POLICIES, Scenario, Work, pool_blocks, replica_spec, settled, simulate
from jlora.sim.trace import Trace, Turn
from tests.sim._sim import NPU, chats

TRACE = chats(sessions=24, turns=3, seed=7)
WORK = Work.of(TRACE, [32, 64, 32], NPU)
TIGHT = Scenario(NPU, hbm_gb=0.75, host_gb=4.0, link_gbps=2.0)


def test_adapters_and_blocks_have_the_sizes_of_the_hardware():
    assert WORK.sizes == (4, 8, 4)
    spec = replica_spec(Scenario(NPU), WORK, "jlora")
    assert spec.sizes.device == NPU.pool_bytes // NPU.layout.block_bytes
    assert spec.link.block_s == pytest.approx(16 * 2**20 / NPU.link_bps)
    assert spec.model == NPU.step_model()


def test_the_pool_is_a_size_or_a_share_of_the_working_set_and_not_both():
    scenario = Scenario(NPU, hbm_share=0.5)
    assert pool_blocks(scenario, WORK) == WORK.facts.working_set // 2
    assert pool_blocks(replace(scenario, hbm_share=0.0, hbm_gb=1.0), WORK) == int(1e9) // NPU.layout.block_bytes
    with pytest.raises(ConfigError, match="hbm_share"):
        pool_blocks(replace(scenario, hbm_gb=1.0), WORK)
    with pytest.raises(ConfigError, match="more than 9"):
        pool_blocks(Scenario(NPU, hbm_gb=0.1), WORK)


def test_a_policys_name_may_give_the_share():
    assert replica_spec(TIGHT, WORK, "vllm-fair:0.35").cache.share == 0.35
    for wrong in ("vllm-fair:2", "vllm-fair:x", "lru:0.3"):
        with pytest.raises(ConfigError, match="share"):
            replica_spec(TIGHT, WORK, wrong)
    with pytest.raises(ConfigError, match="nearest is 'fastlibra'"):
        replica_spec(TIGHT, WORK, "fastlibre")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_a_whole_result(policy: str):
    result = simulate(TIGHT, WORK, policy)
    told, cache, device = result["summary"], result["cache"], result["device"]
    proper = [turn for turn in TRACE.turns if turn.at >= 0]
    assert told["requests"] == len(proper) == len(result["requests"]["rows"])
    assert told["unfinished"] == told["refused"] == 0
    assert 0 < told["ttft_p50_s"] <= told["ttft_p90_s"] <= told["ttft_p99_s"]
    parts = told["queue_s"] + told["swap_s"] + told["prefill_s"]
    assert parts == pytest.approx(told["ttft_s"], rel=1e-3)
    assert 0 <= device["tokens"] - sum(turn.output for turn in proper) < 60  # history that was answered late
    assert 0 < device["busy"] <= 1 and 0 <= device["link_in"] <= 1
    assert cache["kv_device_hits"] + cache["kv_host_hits"] < 1
    if policy == "slora":
        assert told["cached"] == 0
    else:
        assert told["cached"] > 0.1


def test_invalid_kv_is_where_nothing_binds_it():
    shares = {policy: simulate(TIGHT, WORK, policy)["cache"]["invalid_kv"] for policy in ("jlora", "fastlibra-wom")}
    assert shares["jlora"] == 0 < shares["fastlibra-wom"]


def test_write_back_waits_for_its_copies_and_clean_eviction_does_not():
    written, clean = (simulate(TIGHT, WORK, policy)["summary"] for policy in ("vllm", "vllm-fair:0.2"))
    assert written["queue_s"] > 1.2 * clean["queue_s"]


def test_a_settled_history_has_been_computed_by_time_0():
    """Eighty sessions said a thousand tokens each within the last second: nobody who asks after it waits for them."""
    past = [Turn(i / 80 - 1.0, i, -1, (i + 3,) * 1000, 1, None) for i in range(80)]
    trace = Trace("rush", (*past, *(Turn(0.1 * i, i, 0, (7,) * 20, 4, None) for i in range(20))), ())
    waited = [simulate(Scenario(NPU), Work.of(t, [], NPU), "jlora") for t in (trace, settled(trace, NPU.step_model()))]
    rushed, calm = (result["summary"]["ttft_s"] for result in waited)
    assert rushed > 2.0 and calm < 0.1
    pause = {round(a.at - b.at, 6) for a, b in zip(trace.turns, settled(trace, NPU.step_model()).turns, strict=True)}
    assert len(pause) == 2 and 0.0 in pause  # the history as a whole, and nothing else


def test_a_fixed_cost_of_loading_adapters_shows_in_their_cold_starts():
    small = replace(TIGHT, hbm_gb=0.5)
    fast, slow = (simulate(replace(small, adapter_load_s=s), WORK, "lru")["summary"] for s in (0.0, 0.2))
    assert slow["adapter_s"] > 2 * fast["adapter_s"] > 0


def test_another_model_has_other_blocks():
    grouped = Hardware(NPU.chip, 1, MODELS["llama-3-8b"])
    work = Work.of(TRACE, [32, 64, 32], grouped)
    assert min(work.sizes) >= 16
    assert simulate(Scenario(grouped, hbm_gb=0.5, host_gb=4.0), work, "jlora")["summary"]["unfinished"] == 0
