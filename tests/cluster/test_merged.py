"""What replicas of one service must have in common, and what they had better have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jlora.cluster import merged
from jlora.replica import ReplicaState, RouterStats
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import MergeState
from tests.cluster._links import INFO


def state_of(told: Sequence[merged.Told]) -> ReplicaState:
    counted = merged.Counted()
    counted.hear({f"r{i}": one for i, one in enumerate(told)})
    return merged.state(told, (), "", RouterStats(), counted)


def test_a_replica_that_restarts_or_is_silent_takes_back_nothing_that_was_counted():
    """Prometheus takes a counter that falls for a restart, and would count all of the rest again."""

    def told(steps: int, uptime: float, hits: int) -> merged.Told:
        server = pb.ServerInfo(steps=steps, uptime_s=uptime, running=1)
        return server, pb.CacheState(kv_hit_tokens=hits, invalid_kv=1)

    counted, sums = merged.Counted(), []
    for heard in (
        {"r0": told(10, 15, 100), "r1": told(20, 15, 200)},
        {"r0": told(11, 16, 110)},  # r1 is silent
        {"r0": told(12, 17, 120), "r1": told(25, 17, 210)},
        {"r0": told(11, 16.9, 110), "r1": told(24, 16.9, 205)},  # heard late
        {"r0": told(13, 18, 130), "r1": told(30, 1, 0)},  # another process, which has made more steps
        {"r0": told(14, 19, 140), "r1": told(31, 2, 5)},
    ):
        counted.hear(heard)
        state = merged.state(list(heard.values()), (), "", RouterStats(), counted)
        assert (state.stats.running, state.cache.invalid_kv) == (len(heard), len(heard))
        sums.append((state.stats.steps, state.cache.kv_hit_tokens))
    assert sums == [(30, 300), (31, 310), (37, 330), (37, 330), (68, 340), (70, 355)]


def test_replicas_of_another_model_or_type_are_told_apart():
    assert not merged.difference(INFO, INFO)
    assert merged.difference(INFO, replace(INFO, dtype="bfloat16")) == "dtype 'bfloat16', not 'float32'"


def test_replicas_that_add_in_another_order_are_named():
    other = replace(INFO, config=replace(INFO.config, engine=replace(INFO.config.engine, one_row="on")))
    assert not merged.rounding(INFO, INFO) and not merged.difference(INFO, other)
    assert merged.rounding(INFO, other) == "engine.one_row = 'on', not 'auto'"
    two, kind = (replace(INFO, devices=devices) for devices in (("cpu 0", "cpu 1"), ("NVIDIA A100 0",)))
    one = replace(INFO, devices=("cpu 7",))
    more = replace(INFO, eos_ids=(*INFO.eos_ids, 77))  # of a release that knows one more: upgrades go one by one
    assert not merged.difference(INFO, more) and not merged.difference(more, INFO)
    assert "eos_ids = " in merged.rounding(INFO, more)
    assert "eos_ids" in merged.difference(more, replace(INFO, eos_ids=(78,)))
    assert not merged.rounding(replace(INFO, devices=("cpu 0",)), one)
    assert merged.rounding(two, one) == "devices = 'cpu', not 'cpu, cpu'"
    assert merged.rounding(kind, one) == "devices = 'cpu', not 'NVIDIA A100'"


def test_the_caches_of_a_service_are_one_with_the_sums_of_all():
    counts = {"adapters_dropped": 2, "adapter_reads": 3, "adapter_reads_failed": 1, "adapter_read_s": 0.25}
    told = [(pb.ServerInfo(), pb.CacheState(policy="jlora", hbm=pb.TierState(total=10), **counts)) for _ in range(2)]
    cache = state_of(told).cache
    assert {name: getattr(cache, name) for name in counts} == {name: 2 * n for name, n in counts.items()}
    assert (cache.policy, cache.hbm.total) == ("jlora", 20)


def test_the_first_merge_of_a_service_is_told_by_its_clients_name():
    merge = pb.MergeState(adapter="upper@7", uid=7, share=0.5, switches=1, host_bytes=300)
    told = [(pb.ServerInfo(merge=merge), pb.CacheState()), (pb.ServerInfo(), pb.CacheState())]
    found = state_of(told).stats.merge
    assert found == MergeState("upper", 7, 0.5, 1, 0, 300)
