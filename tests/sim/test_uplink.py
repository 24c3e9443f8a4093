"""A replica's uplink: transfers share it, none is faster than alone, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlora.cluster.routing.ways import LENDS
from jlora.sim.member import Member
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import Service, fleet_of
from jlora.sim.uplink import Uplink
from tests.sim._sim import NPU, chats


def test_one_transfer_has_the_uplink_alone():
    assert Uplink().begin(5.0, 2.0).ends == 7.0


def test_two_at_once_take_twice_as_long_and_one_that_ends_leaves_its_part():
    uplink = Uplink()
    long, short = uplink.begin(0.0, 3.0), uplink.begin(1.0, 1.0)
    assert short.ends == 3.0  # 1 s of work at half the rate
    assert long.ends == 4.0  # 1 s alone, 2 s at half, 1 s alone
    later = uplink.begin(10.0, 1.0)
    assert (later.ends, short.ends, long.ends) == (11.0, 3.0, 4.0)


def test_a_clock_that_lies_back_begins_where_the_uplink_is():
    uplink = Uplink()
    uplink.begin(2.0, 1.0)
    assert uplink.begin(1.9, 1.0).ends == pytest.approx(4.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=12).map(sorted))
def test_the_uplink_is_never_idle_nor_faster_than_it_is(asked: list[tuple[float, float]]):
    uplink = Uplink()
    made = [uplink.begin(at, seconds) for at, seconds in asked]
    busy, until = 0.0, 0.0
    for at, seconds in asked:
        until = max(until, at) + seconds
        busy += seconds
    assert max(one.ends for one in made) == pytest.approx(until)
    for (at, seconds), one in zip(asked, made, strict=True):
        assert at + seconds - 1e-9 <= one.ends <= at + busy + 1e-9


def test_two_replicas_that_fetch_from_a_third_share_its_link():
    service = Service(3, (8, 8), fetch_gbps=1.0, fetch_latency_s=0.0)
    work = Work.of(chats(4, 1, adapters=2), service.ranks, NPU)
    fleet = fleet_of(Scenario(NPU), service, work, "jlora", "round-robin")
    source, *others = fleet.members.values()
    for adapter in (0, 1):
        source.preload(adapter)
    began = source.clock.now
    for adapter, member in enumerate(others):
        member.ask(adapter)
        assert member.wakes > began  # it has begun to fetch
    alone = service.fetch_s(work.sizes[0] * NPU.layout.block_bytes, held=True)
    for adapter, member in enumerate(others):
        assert _arrival(member, adapter) - began == pytest.approx(2 * alone)


@pytest.mark.parametrize(("path_gbps", "last"), [(0.5, 2), (0.1, LENDS + 1)])
def test_one_fetch_more_than_a_replica_lends_comes_by_the_path_unless_that_is_slower(path_gbps: float, last: int):
    service = Service(LENDS + 2, (8,), fetch_gbps=1.0, fetch_latency_s=0.0, path_gbps=path_gbps)
    work = Work.of(chats(4, 1, adapters=1), service.ranks, NPU)
    fleet = fleet_of(Scenario(NPU), service, work, "jlora", "round-robin")
    source, *others = fleet.members.values()
    source.preload(0)
    began = source.clock.now
    for member in others:
        member.ask(0)
        assert member.wakes > began
    alone = service.fetch_s(work.sizes[0] * NPU.layout.block_bytes, held=True)
    assert _arrival(others[-1], 0) - began == pytest.approx(last * alone)


def test_a_path_that_is_faster_than_a_peer_is_taken():
    service = Service(2, (8,), fetch_gbps=1.0, fetch_latency_s=0.0, path_gbps=2.0)
    work = Work.of(chats(4, 1, adapters=1), service.ranks, NPU)
    source, other = fleet_of(Scenario(NPU), service, work, "jlora", "round-robin").members.values()
    source.preload(0)
    began = other.clock.now
    other.ask(0)
    alone = service.fetch_s(work.sizes[0] * NPU.layout.block_bytes, held=False)
    assert _arrival(other, 0) - began == pytest.approx(alone)
    assert source.uplink.under_way(began) == 0


def _arrival(member: Member, adapter: int) -> float:
    """When a sleeping replica has an adapter that it fetches."""
    now = member.clock.now
    while not member.has(adapter):
        now = member.clock.now
        member.idle(now + 10.0)
    return now


def test_an_adapter_that_nobody_holds_comes_on_a_way_of_its_own():
    service = Service(2, (8, 8), fetch_gbps=1.0, fetch_latency_s=0.0)
    work = Work.of(chats(4, 1, adapters=2), service.ranks, NPU)
    fleet = fleet_of(Scenario(NPU), service, work, "jlora", "round-robin")
    alone = service.fetch_s(work.sizes[0] * NPU.layout.block_bytes, held=False)
    for member in fleet.members.values():
        began = member.clock.now
        member.ask(0)
        assert member.wakes > began
    for member in fleet.members.values():
        assert _arrival(member, 0) - began == pytest.approx(alone)
