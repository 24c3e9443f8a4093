"""What replicas of one service must have in common, and what they had better have."""

from __future__ import annotations

from dataclasses import replace

from jlora.cluster import merged
from jlora.replica import RouterStats
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import MergeState
from tests.cluster._links import INFO


def test_replicas_of_another_model_or_type_are_told_apart():
    assert not merged.difference(INFO, INFO)
    assert merged.difference(INFO, replace(INFO, dtype="bfloat16")) == "dtype 'bfloat16', not 'float32'"


def test_replicas_that_add_in_another_order_are_named():
    other = replace(INFO, config=replace(INFO.config, engine=replace(INFO.config.engine, one_row="on")))
    assert not merged.rounding(INFO, INFO) and not merged.difference(INFO, other)
    assert merged.rounding(INFO, other) == "engine.one_row = 'on', not 'auto'"


def test_the_caches_of_a_service_are_one_with_the_sums_of_all():
    counts = {"adapters_dropped": 2, "adapter_reads": 3, "adapter_reads_failed": 1, "adapter_read_s": 0.25}
    told = [(pb.ServerInfo(), pb.CacheState(policy="jlora", hbm=pb.TierState(total=10), **counts)) for _ in range(2)]
    cache = merged.state(told, (), "", RouterStats()).cache
    assert {name: getattr(cache, name) for name in counts} == {name: 2 * n for name, n in counts.items()}
    assert (cache.policy, cache.hbm.total) == ("jlora", 20)


def test_the_first_merge_of_a_service_is_told_by_its_clients_name():
    merge = pb.MergeState(adapter="upper@7", uid=7, share=0.5, switches=1, host_bytes=300)
    told = [(pb.ServerInfo(merge=merge), pb.CacheState()), (pb.ServerInfo(), pb.CacheState())]
    found = merged.state(told, (), "", RouterStats()).stats.merge
    assert found == MergeState("upper", 7, 0.5, 1, 0, 300)
