"""Routing policies choose as their papers say, and never a replica that is not up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.cluster.books import Books
from jlora.cluster.routing.caraserve import CaraServe
from jlora.cluster.routing.costs import RankCosts
from jlora.cluster.routing.jlora import Jlora
from jlora.cluster.routing.policy import Ask, Policy
from jlora.cluster.routing.simple import FirstFit, MostIdle, Random, RoundRobin
from jlora.cluster.view import Held, ReplicaView

# Lines through CaraServe's Figure 5, which rounds to 0.1 ms: 24 requests of rank 32 against 16 of rank 64.
BGMV = RankCosts(31.7e-3, 0.0, 0.0, 0.0, 1e-3 / 256, padded=True)
MBGMV = RankCosts(33.5e-3, 0.0, 0.0, 0.0, 0.6e-3 / 256, padded=False)
SLO_S = 36e-3
ASK = Ask("a@1", 64, 100)


def replica(name: str, **fields) -> ReplicaView:
    held = fields.get("held", Held())
    return ReplicaView(name, "up", **{"sent": held.count, **fields})


def view(*replicas: ReplicaView) -> dict[str, ReplicaView]:
    return {each.name: each for each in replicas}


FIGURE_5 = view(replica("one", held=Held(running={32: 24})), replica("two", held=Held(running={64: 16})))
POLICIES: list[Policy] = [
    Random(), RoundRobin(), MostIdle(), FirstFit(), CaraServe(BGMV, SLO_S), Jlora(BGMV, SLO_S),
]  # fmt: skip


def named(policy: object) -> str:
    return type(policy).__name__


def test_the_lines_are_those_of_the_papers_example():
    assert [BGMV.step_s({32: 24}), BGMV.step_s({64: 16})] == pytest.approx([34.8e-3, 35.8e-3], abs=1.1e-4)
    assert [MBGMV.step_s({32: 24}), MBGMV.step_s({64: 16})] == pytest.approx([35.3e-3, 35.9e-3])
    assert BGMV.step_s({32: 24, 64: 1}) > SLO_S > BGMV.step_s({64: 17})
    assert MBGMV.step_s({64: 17}) > SLO_S > MBGMV.step_s({32: 24, 64: 1})


@pytest.mark.parametrize("kind", [CaraServe, Jlora], ids=lambda kind: kind.__name__)
def test_the_papers_example_is_routed_as_in_the_paper(kind):
    assert kind(BGMV, SLO_S).choose(FIGURE_5, ASK, 0.0) == "two"
    assert kind(MBGMV, SLO_S).choose(FIGURE_5, ASK, 0.0) == "one"


def test_algorithm_1_weighs_the_added_time_by_the_requests_there():
    costs = RankCosts(0.01, 0.0, 0.001, 0.0, 1e-5, padded=False)
    cara = CaraServe(costs, 1.0, outputs=50.0, penalty_s=7.0)
    there = replica("r", held=Held(waiting={8: 1}, running={16: 2}, tokens=40))
    assert cara.cost(there, ASK) == pytest.approx(3 * ((64e-5 + 100 * 0.001) / 50 + 64e-5))
    tight = replace(cara, slo_s=0.0)
    assert tight.cost(there, ASK) == pytest.approx(cara.cost(there, ASK) + 3 * 7.0)
    assert cara.cost(replica("empty"), ASK) == 0.0


@pytest.mark.parametrize("policy", POLICIES, ids=named)
@pytest.mark.parametrize("health", ["loading", "suspect", "draining", "down"])
def test_only_a_replica_that_is_up_is_chosen(policy: Policy, health):
    off = replace(replica("off"), health=health)
    busy = replica("busy", running=40, held=Held(running={64: 40}))
    for _ in range(4):
        assert policy.choose(view(off, busy), ASK, 0.0) == "busy"
    assert policy.choose(view(off), ASK, 0.0) is None
    assert policy.choose({}, ASK, 0.0) is None


def test_round_robin_goes_round_and_random_repeats_by_its_seed():
    three = view(*map(replica, "abc"))
    turns = RoundRobin()
    assert [turns.choose(three, ASK, 0.0) for _ in range(6)] == list("abcabc")
    one, two = Random(3), Random(3)
    drawn = [one.choose(three, ASK, 0.0) for _ in range(60)]
    assert drawn == [two.choose(three, ASK, 0.0) for _ in range(60)] and set(drawn) == set("abc")


def test_most_idle_counts_other_routers_and_first_fit_fills_up():
    mine, theirs = replica("mine", sent=3), replica("theirs", sent=0, running=5)
    assert MostIdle().choose(view(mine, theirs), ASK, 0.0) == "mine"
    full, half = replica("full", sent=32), replica("half", sent=31)
    assert FirstFit().choose(view(full, half, replica("empty")), ASK, 0.0) == "half"
    assert FirstFit(most=4).choose(view(full, half), ASK, 0.0) == "half"


def test_jlora_goes_where_adapter_and_prefix_are_unless_that_costs_others_more():
    costs = RankCosts(0.01, 0.0, 0.001, 0.0, 1e-5, padded=False)
    policy = Jlora(costs, 1.0, tiers={"HOST": 0.001, "DISK": 0.01})
    cold, warm = replica("cold"), replica("warm", tiers={"a@1": "HBM"})
    assert policy.choose(view(cold, warm), ASK, 0.0) == "warm"
    known = replace(ASK, adapter=None, rank=0, cached={"warm": 90})
    assert policy.choose(view(cold, warm), known, 0.0) == "warm"
    busy = replace(warm, held=Held(running={64: 50}))
    assert policy.choose(view(cold, busy), ASK, 0.0) == "cold"


def test_the_books_follow_a_request_from_send_to_end():
    books = Books()
    books.heard(ReplicaView("r", "up", running=2, free_blocks=7))
    books.sent("r", ASK)
    books.sent("r", replace(ASK, rank=8, prompt=5))
    seen = books.view["r"]
    assert (seen.sent, seen.running, seen.free_blocks) == (2, 2, 7)
    assert seen.held == Held({64: 1, 8: 1}, {}, 105)
    books.began("r", ASK)
    assert books.view["r"].held == Held({8: 1}, {64: 1}, 5, 100)
    books.told("r", 3)
    books.heard(ReplicaView("r", "up", running=1))
    assert books.view["r"].sent == 2 and books.view["r"].running == 1
    assert books.view["r"].held.context == 103
    books.ended("r", ASK, outputs=3)
    books.ended("r", replace(ASK, rank=8, prompt=5), outputs=None)
    assert books.view["r"].held == Held() and books.view["r"].sent == 0
