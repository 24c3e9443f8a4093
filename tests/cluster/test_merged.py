"""What replicas of one service must have in common, and what they had better have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jlora.cluster import merged
from jlora.replica import ReplicaState, RouterStats
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import MergeState
from tests.cluster._links import INFO

Heard = Mapping[str, merged.Told]


def told(
    uptime: float, steps: int = 0, hits: int = 0, merge: pb.MergeState | None = None, process: str = "one"
) -> merged.Told:
    """What a replica's process says of itself when it is so old."""
    server = pb.ServerInfo(steps=steps, uptime_s=uptime, running=1, merge=merge, process=process)
    return server, pb.CacheState(kv_hit_tokens=hits, invalid_kv=1)


def state_of(told: Sequence[merged.Told], waiting: Sequence[int] = ()) -> ReplicaState:
    counted = merged.Counted(began=0.0)
    counted.hear({f"r{i}": one for i, one in enumerate(told)}, 1.0, 1.0)
    return merged.state(told, (), "", RouterStats(), counted, waiting)


def sums(heard: Sequence[tuple[float, Heard]], began: float = 0.0, took: float = 0.1) -> list[tuple[int, int]]:
    """Steps and hits after each answer, which was asked for at its time, by the clock of a router since `began`."""
    counted, found = merged.Counted(began), []
    for asked, answers in heard:
        counted.hear(answers, asked, asked + took)
        state = merged.state(list(answers.values()), (), "", RouterStats(), counted)
        assert (state.stats.running, state.cache.invalid_kv) == (len(answers), len(answers))
        found.append((state.stats.steps, state.cache.kv_hit_tokens))
    return found


def test_a_replica_that_restarts_or_is_silent_takes_back_nothing_that_was_counted():
    """Prometheus takes a counter that falls for a restart, and would count all of the rest again."""
    assert sums([
        (15, {"r0": told(15, 10, 100), "r1": told(15, 20, 200)}),
        (16, {"r0": told(16, 11, 110)}),  # r1 is silent
        (17, {"r0": told(17, 12, 120), "r1": told(17, 25, 210)}),
        (16, {"r0": told(16.9, 11, 110), "r1": told(16.9, 24, 205)}),  # heard late
        (30, {"r0": told(30, 13, 130), "r1": told(1, 30, 0, process="two")}),  # which has made more steps
        (16, {"r1": told(16.5, 24, 205)}),  # of the one before, and heard late
        (31, {"r0": told(31, 14, 140), "r1": told(2, 31, 5, process="two")}),
    ], began=-1) == [(30, 300), (31, 310), (37, 330), (37, 330), (68, 340), (68, 340), (70, 355)]  # fmt: skip


def test_another_process_is_known_by_its_name():
    """Its age would not do: a machine that has stood still is as young as a process that began later."""
    life, other = told(10, 100, 100), told(20, 150, 150, process="two")
    assert sums([(10, {"r0": life}), (60, {"r0": other})]) == [(100, 100), (250, 250)]
    assert sums([(10, {"r0": life}), (60, {"r0": told(20, 150, 150)})]) == [(100, 100), (150, 150)], "it stood still"
    nameless = [
        (at, {"r0": told(age, steps, 0, process="")}) for at, age, steps in ((50, 50, 100), (60, 5, 7), (61, 6, 9))
    ]
    assert [steps for steps, _ in sums(nameless)] == [100, 107, 109], "an older release has no names"


def test_what_replicas_have_counted_before_the_router_began_is_not_told_again():
    """Or each of its restarts, and each replica that comes late, would be a leap of whole lives in every rate."""
    assert sums([
        (101, {"r0": told(5000, 900, 90)}),
        (102, {"r0": told(5001, 910, 95), "late": told(7000, 400, 40)}),
        (103, {"r0": told(5002, 910, 95), "late": told(7001, 401, 41)}),
        (104, {"r0": told(1, 3, 1, process="two"), "young": told(3, 7, 2)}),  # from their own beginning
    ], began=100) == [(0, 0), (10, 5), (11, 6), (21, 9)]  # fmt: skip


def test_the_counters_of_merges_are_sums_that_never_fall():
    def merges(uptime: float, switches: int, reloads: int = 0, host_bytes: int = 0, process: str = "") -> merged.Told:
        said = pb.MergeState(switches=switches, reloads=reloads, host_bytes=host_bytes)
        return told(uptime, merge=said, process=process)

    counted, found = merged.Counted(0), []
    one, two = merges(5, 2, 1, 30), merges(5, 4, 0, 40)
    for at, heard in ((5, [one, two]), (6, [one]), (30, [merges(2, 1, process="two"), merges(30, 5)])):
        counted.hear({f"r{i}": answer for i, answer in enumerate(heard)}, at, at)
        merge = merged.state(heard, (), "", RouterStats(), counted).stats.merge
        found.append((merge.switches, merge.reloads, merge.host_bytes))
    assert found == [(6, 1, 70), (6, 1, 30), (8, 1, 0)]


def test_requests_that_wait_at_the_router_are_demand_too():
    alone = state_of([], waiting=[1, 3]).stats
    assert (alone.running, alone.waiting, alone.live_requests) == (0, 4, 2)
    busy = state_of([(pb.ServerInfo(running=2, waiting=1, live_requests=3), pb.CacheState())], waiting=[1, 3]).stats
    assert (busy.running, busy.waiting, busy.live_requests) == (2, 5, 5)


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


def test_what_decides_merges_is_told_as_one_replica_has_it():
    plain, merging = (
        pb.MergeState(uid=-1, adapters_cost=0.1, alpha=1.0, beta=0.5),
        pb.MergeState(adapter="upper@7", uid=7, adapters_cost=0.2, alpha=0.8, beta=0.4),
    )
    for merges, expected in (((plain, merging), merging), ((plain, plain), plain)):
        found = state_of([(pb.ServerInfo(merge=merge), pb.CacheState()) for merge in merges]).stats.merge
        assert (found.adapters_cost, found.alpha, found.beta, found.uid) == (
            expected.adapters_cost, expected.alpha, expected.beta, expected.uid
        )  # fmt: skip
    assert state_of([]).stats.merge == MergeState()


def test_adapters_by_tier_are_sums_of_what_replicas_have_now():
    """Not what came to them since the router began, as of counters."""
    counts = {"registered": 9, "hbm": 2, "host": 3, "disk": 1, "loading": 3, "reading": 1}
    told = [(pb.ServerInfo(uptime_s=1e6), pb.CacheState(**{f"adapters_{name}": n for name, n in counts.items()}))] * 2
    cache = state_of(told).cache
    assert {name: getattr(cache, f"adapters_{name}") for name in counts} == {name: 2 * n for name, n in counts.items()}
