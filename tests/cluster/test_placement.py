"""LoRAServe's Algorithm 1: every adapter is served, no server takes more than its share, and little moves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlora.cluster.demand import HALF, Load, Recent, Told, Trend, extrapolate, operating_points
from jlora.cluster.placement import QUIET, Wanted, budget, contiguous, fitted, loraserve, moves, random_placement
from jlora.cluster.routing.costs import RankCosts
from jlora.cluster.routing.policy import Ask
from jlora.cluster.routing.table import Table, Turns
from jlora.cluster.view import ReplicaView
from jlora.step_model import Objective

RANKS = (8, 16, 32, 64, 128)
POINTS = {8: 500.0, 16: 450.0, 32: 400.0, 64: 300.0, 128: 200.0}


def servers(count: int) -> list[str]:
    return [f"s{i}" for i in range(count)]


adapters_of = st.lists(
    st.tuples(st.sampled_from(RANKS), st.one_of(st.just(0.0), st.floats(0.01, 1000.0))), min_size=1, max_size=40
).map(lambda drawn: [Wanted(f"a{i}", rank, rate) for i, (rank, rate) in enumerate(drawn)])


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 9), adapters=adapters_of)
def test_parts_sum_to_one_and_no_server_exceeds_the_mean(count: int, adapters: list[Wanted]):
    placed = loraserve(servers(count), adapters, POINTS)
    assert set(placed) == {adapter.key for adapter in adapters}
    used = dict.fromkeys(servers(count), 0.0)
    for adapter in adapters:
        parts = placed[adapter.key]
        assert parts and math.isclose(sum(parts.values()), 1.0) and min(parts.values()) > 0
        for server, part in parts.items():
            used[server] += part * adapter.rate / POINTS[adapter.rank]
    mean = sum(used.values()) / count
    assert max(used.values()) <= mean * (1 + 1e-6) + 1e-6


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 6), adapters=adapters_of)
def test_an_unchanged_demand_moves_nothing(count: int, adapters: list[Wanted]):
    names = servers(count)
    first = loraserve(names, adapters, POINTS)
    assert moves(first, loraserve(names, adapters, POINTS, first)) == ([], [])


@settings(max_examples=100, deadline=None)
@given(use=st.dictionaries(st.sampled_from(RANKS), st.floats(0, 100), min_size=1), count=st.integers(1, 20))
def test_budgets_are_rounded_shares_that_never_exceed_the_servers(use: dict[int, float], count: int):
    found = budget(use, count)
    assert sum(found.values()) <= count and min(found.values()) >= 0
    whole = sum(use.values())
    if whole > 1e-6:
        for rank, given_ in found.items():
            assert abs(given_ - count * use[rank] / whole) <= 1.0


def test_ranks_with_enough_demand_have_servers_of_their_own():
    adapters = [Wanted(f"{rank}-{i}", rank, POINTS[rank]) for rank in (8, 128) for i in range(4)]
    placed = loraserve(servers(4), adapters, POINTS)
    ranks = {server: {int(key.partition("-")[0]) for key in placed if server in placed[key]} for server in servers(4)}
    assert sorted(map(sorted, ranks.values())) == [[8], [8], [128], [128]]


def test_a_popular_adapter_is_split_and_a_leftover_joins_the_highest_rank():
    hot, small = Wanted("hot", 64, 700.0), Wanted("small", 8, 50.0)
    placed = loraserve(servers(3), [hot, small], POINTS)
    assert len(placed["hot"]) == 3 and len(placed["small"]) == 1
    high, low = Wanted("high", 128, 100.0), Wanted("low", 8, 260.0)  # 0.5 and 0.52 of a server; one spare server
    two = loraserve(servers(2), [high, low, Wanted("little", 16, 4.0)], POINTS)
    assert two["little"].keys() <= two["high"].keys()  # beside rank 128, not beside rank 8


def test_a_server_that_leaves_and_one_that_comes_move_only_what_they_must():
    adapters = [Wanted(f"a{i}", 64, 75.0) for i in range(12)]
    first = loraserve(servers(3), adapters, POINTS)
    assert sorted(len([k for k in first if s in first[k]]) for s in servers(3)) == [4, 4, 4]
    other = ["s0", "s2", "new"]
    fetch, drop = moves(first, loraserve(other, adapters, POINTS, first))
    assert {server for _, server in fetch} == {"new"} and {server for _, server in drop} == {"s1"}


EVEN = [Wanted(f"a{i}", 64, 30.0) for i in range(8)]  # a tenth of a server each


def kept(adapters: list[Wanted], names: list[str], slack: float = 0.25) -> tuple[list[str], list[str]]:
    """Which adapters move when these come to be asked for after `EVEN` on two servers: to new homes, from old ones."""
    first = loraserve(servers(2), EVEN, POINTS)
    fetch, drop = moves(first, loraserve(names, adapters, POINTS, first, slack))
    return [f"{key} {server}" for key, server in fetch], [f"{key} {server}" for key, server in drop]


def test_noise_in_the_demand_moves_nothing_but_with_the_papers_rule_it_does():
    noisy = [replace(one, rate=one.rate * (0.8 if i % 3 else 1.3)) for i, one in enumerate(EVEN)]
    assert kept(noisy, servers(2)) == ([], [])
    assert kept(noisy, servers(2), 0.0) != ([], [])


@pytest.mark.parametrize("times", [2.0, 0.3])
def test_a_server_with_too_much_to_do_gives_away_little(times: float):
    first = loraserve(servers(2), EVEN, POINTS)
    shifted = [replace(one, rate=one.rate * (times if "s0" in first[one.key] else 1.0)) for one in EVEN]
    placed = loraserve(servers(2), shifted, POINTS, first, 0.25)
    used = [sum(placed[one.key].get(server, 0.0) * one.rate for one in shifted) for server in servers(2)]
    assert max(used) <= 1.25 * sum(used) / 2 + 1e-6
    fetch, _ = moves(first, placed)
    assert 1 <= len(fetch) <= 2 < len(moves(first, loraserve(servers(2), shifted, POINTS, first))[0]) + 2


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 6), before=adapters_of, after=adapters_of)
def test_with_slack_too_every_adapter_has_homes_and_no_server_too_much(
    count: int, before: list[Wanted], after: list[Wanted]
):
    names = servers(count)
    placed = loraserve(names, after, POINTS, loraserve(names, before, POINTS), 0.25)
    used = dict.fromkeys(names, 0.0)
    for adapter in after:
        parts = placed[adapter.key]
        assert math.isclose(sum(parts.values()), 1.0) and min(parts.values()) > 0
        for server, part in parts.items():
            used[server] += part * adapter.rate / POINTS[adapter.rank]
    mean = sum(used.values()) / count
    assert max(used.values()) <= max(QUIET, min(1.25 * mean, max(1.125 * mean, 1.0))) * (1 + 1e-6) + 1e-6


def test_a_newcomer_has_a_home_and_nothing_else_moves():
    fetch, drop = kept([*EVEN, Wanted("new", 64, 10.0)], servers(2))
    assert fetch in (["new s0"], ["new s1"]) and drop == []


def test_newcomers_go_beside_their_own_rank():
    both = [Wanted(f"{rank}-{i}", rank, POINTS[rank] / 8) for rank in (8, 64) for i in range(4)]
    first = loraserve(servers(2), both, POINTS)
    low = first["8-0"].keys()
    new = [Wanted(f"new{i}", 8, 1.0) for i in range(10)]
    placed = loraserve(servers(2), [*both, *new], POINTS, first, 0.25)
    assert all(placed[one.key].keys() == low for one in new)


def test_a_saturated_server_gives_away_also_within_the_slack():
    busy = [Wanted("a", 64, 0.9 * POINTS[64]), Wanted("b", 64, 0.7 * POINTS[64]), Wanted("c", 64, 0.25 * POINTS[64])]
    last = {"a": {"s0": 1.0}, "b": {"s1": 1.0}, "c": {"s0": 1.0}}
    placed = loraserve(servers(2), busy, POINTS, last, 0.25)
    used = [sum(placed[one.key].get(server, 0.0) * one.rate / POINTS[64] for one in busy) for server in servers(2)]
    assert max(used) < 1.05, "the mean is 0.925, and the fuller one had 1.15"


def test_quiet_servers_give_nothing_away():
    few = [replace(one, rate=one.rate / 100 * (i + 1)) for i, one in enumerate(EVEN)]
    assert kept(few, servers(2)) == ([], [])


def test_a_newcomer_of_a_higher_rank_than_its_server_is_placed_by_the_algorithm():
    first = loraserve(servers(2), EVEN, POINTS)
    adapters = [*EVEN, Wanted("high", 128, 1.0)]
    assert loraserve(servers(2), adapters, POINTS, first, 0.25) == loraserve(servers(2), adapters, POINTS, first)


def test_a_server_that_comes_has_its_share_at_once_and_one_that_goes_leaves_only_its_own():
    fetch, _ = kept(EVEN, servers(3))
    assert any(each.endswith("s2") for each in fetch), "an idle server is far from the mean"
    fetch, drop = kept(EVEN, ["s0"])
    assert {each.partition(" ")[0] for each in fetch} == {each.partition(" ")[0] for each in drop} and len(fetch) == 4


def test_baselines_place_every_adapter_once():
    adapters = [Wanted(f"a{i}", RANKS[i % 5], 1.0) for i in range(20)]
    spread = contiguous(servers(4), adapters)
    by_server = {s: [a.rank for a in adapters if s in spread[a.key]] for s in servers(4)}
    assert [len(ranks) for ranks in by_server.values()] == [5] * 4
    assert max(by_server["s0"]) <= min(by_server["s1"]) and max(by_server["s2"]) <= min(by_server["s3"])
    drawn = random_placement(servers(4), adapters, 1)
    assert drawn == random_placement(servers(4), adapters, 1) and all(len(p) == 1 for p in drawn.values())


def test_forecasts_follow_a_trend_within_bounds():
    assert extrapolate([10.0]) == 10.0
    assert extrapolate([10.0, 20.0, 30.0]) == pytest.approx(40.0)
    assert extrapolate([30.0, 20.0, 10.0]) == 0.0
    assert extrapolate([0.0, 0.0, 100.0]) <= 200.0
    demand = Trend(steps=2)
    demand.asked("a", 100)
    demand.asked("b", 50)
    assert demand.close(10.0) == {"a": 10.0, "b": 5.0}
    demand.asked("a", 200)
    assert demand.close(10.0) == {"a": pytest.approx(30.0), "b": 0.0}
    demand.asked("a", 200)
    assert demand.close(10.0) == {"a": pytest.approx(20.0)}  # b has been quiet for two steps


def test_a_request_counts_when_it_is_admitted_with_the_tokens_of_a_mean_answer():
    load = Load(Trend())
    load.told("a", Told(requests=2, prompt=100))
    load.told("a", Told(ended=1, output=30))
    assert load.answer == 30 and load.close(10.0) == {"a": 10.0}, "no answer was known when they came"
    load.told("b", Told(requests=2, prompt=100))  # none of these ends: their server has too much to do
    assert load.close(10.0)["b"] == pytest.approx(16.0)


def test_a_request_counts_half_after_some_time_steps_and_is_forgotten_in_the_end():
    demand = Recent({"old": 8.0})
    demand.asked("new", tokens=500, requests=30)
    first = dict(demand.close(10.0))
    assert first["old"] > first["new"] > 0
    later = [dict(demand.close(10.0)) for _ in range(HALF)][-1]
    assert later == {key: pytest.approx(rate / 2) for key, rate in first.items()}
    demand = Recent({"old": 8.0})
    for _ in range(3 * HALF):  # a new habit
        demand.asked("new", tokens=500, requests=80)
        rates = demand.close(10.0)
    assert rates["new"] == pytest.approx(7.0) and rates["old"] == pytest.approx(1.0)
    for _ in range(60 * HALF):
        rates = demand.close(10.0)
    assert not rates


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 6), adapters=adapters_of, room=st.integers(0, 30))
def test_no_server_has_more_adapters_than_it_has_room_for(count: int, adapters: list[Wanted], room: int):
    sized = [Wanted(a.key, a.rank, a.rate, max(1, a.rank // 8)) for a in adapters]
    placed = loraserve(servers(count), sized, POINTS)
    found = fitted(placed, sized, dict.fromkeys(servers(count), room))
    for server in servers(count):
        assert sum(a.size for a in sized if server in found.get(a.key, {})) <= room
    assert all(math.isclose(sum(parts.values()), 1.0) for parts in found.values())
    assert fitted(placed, sized, dict.fromkeys(servers(count), 10_000)) is placed


def test_where_room_is_short_the_adapters_that_are_asked_for_most_keep_it():
    adapters = [
        Wanted("cold", 8, 1.0, 4),
        Wanted("hot", 8, 90.0, 4),
        Wanted("warm", 8, 9.0, 4),
        Wanted("big", 8, 9.0, 8),
    ]
    both = {"s0": 0.5, "s1": 0.5}
    placed = {"cold": {"s0": 1.0}, "hot": both, "warm": {"s0": 1.0}, "big": {"s0": 1.0}}
    assert fitted(placed, adapters, {"s0": 8, "s1": 8}) == {"hot": both, "warm": {"s0": 1.0}, "cold": {"s1": 1.0}}
    assert fitted(placed, adapters, {"s0": 3, "s1": 4}) == {"hot": {"s1": 1.0}}


def test_an_operating_point_is_the_largest_batch_within_the_objective():
    costs = RankCosts(0.0, 0.02, 0.0, 1e-6, 1e-5, padded=True)
    points = operating_points(costs, RANKS, Objective(0.04, 200, 0.0, 4096))
    for rank, point in points.items():
        batch = round(point * 0.04)
        count = next(n for n in range(batch + 2, 0, -1) if costs.step_s({rank: n}, 200 * n) <= 0.04)
        assert point == pytest.approx(count / costs.step_s({rank: count}, 200 * count))
    assert points[8] > points[128]


def test_the_table_draws_by_parts_and_passes_over_a_replica_that_is_down():
    view = {name: ReplicaView(name, "up") for name in ("a", "b", "c")}
    table = Table({"x": {"a": 0.75, "b": 0.25}}, seed=1)
    drawn = [table.choose(view, Ask("x", 8, 10)) for _ in range(2000)]
    assert set(drawn) == {"a", "b"} and 0.7 < drawn.count("a") / 2000 < 0.8
    view["a"] = ReplicaView("a", "down")
    assert {table.choose(view, Ask("x", 8, 10)) for _ in range(50)} == {"b"}
    view["b"] = ReplicaView("b", "draining")
    assert table.choose(view, Ask("x", 8, 10)) == "c"
    assert table.choose({"a": view["a"]}, Ask(None, 0, 10)) is None


def test_servers_are_taken_in_turn_as_often_as_their_parts_say():
    view = {name: ReplicaView(name, "up") for name in ("a", "b", "c")}
    turns = Turns({"x": {"a": 0.5, "b": 0.25, "c": 0.25}, "y": {"a": 0.5, "b": 0.5}})
    chosen = [(turns.choose(view, Ask("x", 8, 10)), turns.choose(view, Ask("y", 8, 10))) for _ in range(8)]
    assert [x for x, _ in chosen] == list("abca" * 2)
    assert [y for _, y in chosen] == list("ab" * 4)  # each adapter has turns of its own
    view["a"] = ReplicaView("a", "down")
    assert "".join(turns.choose(view, Ask("x", 8, 10)) or "" for _ in range(6)) in ("bcbcbc", "cbcbcb")
    turns.place({"x": {"a": 1.0}})
    assert turns.choose(view, Ask("x", 8, 10)) == "b"  # no server of it is up: the most idle replica
    assert turns.choose({}, Ask("x", 8, 10)) is None
