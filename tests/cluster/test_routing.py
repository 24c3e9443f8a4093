"""Routing policies choose as their papers say, and never a replica that is not up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.cluster.books import Books
from jlora.cluster.routing.caraserve import CaraServe
from jlora.cluster.routing.costs import Costs, RankCosts
from jlora.cluster.routing.dlora import DLora
from jlora.cluster.routing.jlora import Jlora
from jlora.cluster.routing.others import all_held
from jlora.cluster.routing.policy import Ask, Policy
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.routing.simple import FirstFit, MostIdle, Random, RoundRobin
from jlora.cluster.routing.table import Table, Turns
from jlora.cluster.routing.ways import Ways, held
from jlora.cluster.view import Held, ReplicaView
from tests.test_step_model import STEPS

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
    assert kind(BGMV, SLO_S).choose(FIGURE_5, ASK) == "two"
    assert kind(MBGMV, SLO_S).choose(FIGURE_5, ASK) == "one"


def test_algorithm_1_weighs_the_added_time_by_the_requests_there():
    costs = RankCosts(0.01, 0.0, 0.001, 0.0, 1e-5, padded=False)
    cara = CaraServe(costs, 1.0, outputs=50.0, penalty_s=7.0)
    there = replica("r", held=Held(waiting={8: 1}, running={16: 2}, tokens=40))
    assert cara.cost(there, ASK) == pytest.approx(3 * ((64e-5 + 100 * 0.001) / 50 + 64e-5))
    tight = replace(cara, slo_s=0.0)
    assert tight.cost(there, ASK) == pytest.approx(cara.cost(there, ASK) + 3 * 7.0)
    assert cara.cost(replica("empty"), ASK) == 0.0


@pytest.mark.parametrize("costs", [BGMV, MBGMV, STEPS], ids=["padded", "unpadded", "fitted"])
def test_a_prompt_adds_no_launch_where_nothing_waits(costs: Costs):
    """Nor does it elsewhere: requests would go where others wait already."""
    assert costs.prefill_s({}, 0) == costs.prefill_s({8: 0}, 0) > 0
    cara, own = CaraServe(costs, slo_s=9.0, outputs=50.0), {ASK.rank: 1}
    grows = costs.step_s({16: 1, **own}) - costs.step_s({16: 1})
    adds = (costs.prefill_s(own, ASK.prompt) - costs.prefill_s({}, 0)) / 50
    assert 0 < adds < costs.prefill_s(own, ASK.prompt) / 50 - 1e-6
    assert cara.cost(replica("r", held=Held(running={16: 1}, context=40)), ASK) == pytest.approx(adds + grows)


@pytest.mark.parametrize("policy", POLICIES, ids=named)
@pytest.mark.parametrize("health", ["loading", "suspect", "draining", "down"])
def test_only_a_replica_that_is_up_is_chosen(policy: Policy, health):
    off = replace(replica("off"), health=health)
    busy = replica("busy", running=40, held=Held(running={64: 40}))
    for _ in range(4):
        assert policy.choose(view(off, busy), ASK) == "busy"
    assert policy.choose(view(off), ASK) is None
    assert policy.choose({}, ASK) is None


def test_round_robin_goes_round_and_random_repeats_by_its_seed():
    three = view(*map(replica, "abc"))
    turns = RoundRobin()
    assert [turns.choose(three, ASK) for _ in range(6)] == list("abcabc")
    one, two = Random(3), Random(3)
    drawn = [one.choose(three, ASK) for _ in range(60)]
    assert drawn == [two.choose(three, ASK) for _ in range(60)] and set(drawn) == set("abc")


def booked() -> list[Policy]:
    """Of every policy that keeps books."""
    parts = {"a@1": {"a": 0.5, "b": 0.3, "c": 0.2}}
    return [Random(3), RoundRobin(), Table(parts, 3), Turns(parts), SessionSticky(), Jlora(LINEAR, 1.0)]


@pytest.mark.parametrize("at", range(6))
def test_a_look_ahead_names_the_replica_and_changes_no_later_choice(at: int):
    three, looked, plain = view(*map(replica, "abc")), booked()[at], booked()[at]
    for i in range(30):
        ask = replace(ASK, session=str(i % 7) if i % 3 else "")
        ahead = [looked.peek(three, ask) for _ in range(i % 4)]
        chosen = looked.choose(three, ask)
        assert chosen == plain.choose(three, ask) and all(one == chosen for one in ahead)


def test_most_idle_counts_other_routers_and_first_fit_fills_up():
    mine, theirs = replica("mine", sent=3), replica("theirs", sent=0, running=5)
    assert MostIdle().choose(view(mine, theirs), ASK) == "mine"
    full, half = replica("full", sent=32), replica("half", sent=31)
    assert FirstFit().choose(view(full, half, replica("empty")), ASK) == "half"
    assert FirstFit(most=4).choose(view(full, half), ASK) == "half"


def test_jlora_goes_where_adapter_and_prefix_are_unless_that_costs_others_more():
    costs = RankCosts(0.01, 0.0, 0.001, 0.0, 1e-5, padded=False)
    policy = Jlora(costs, 1.0, ways=Ways(0.001, 9e6, path_bps=1e9))
    cold, warm = replica("cold"), replica("warm", tiers={"a@1": "HBM"})
    assert policy.choose(view(cold, warm), ASK) == "warm"
    known = replace(ASK, adapter=None, rank=0, cached={"warm": 90})
    assert policy.choose(view(cold, warm), known) == "warm"
    busy = replace(warm, held=Held(running={64: 50}))
    assert policy.choose(view(cold, busy), ASK) == "cold"


LINEAR = RankCosts(0.01, 0.0, 0.001, 0.0, 1e-5, padded=False)
TURN = Ask(None, 0, 300, session="s")


def test_jlora_returns_to_a_sessions_home_unless_it_is_busy():
    policy = Jlora(LINEAR, 1.0)
    a, b = replica("a"), replica("b")
    assert policy.choose(view(a, b), TURN) == "a"
    assert policy.choose(view(a, b), replace(TURN, session="other")) == "b"  # a has a session already
    beside = replace(a, held=Held(waiting={0: 1}, tokens=100, uncached=100))
    assert policy.choose(view(beside, b), replace(TURN, session="new")) == "b"
    turn = replace(TURN, cached={"a": 150})  # which alone is too little to go there
    assert policy.choose(view(beside, b), replace(turn, session="new")) == "b"
    assert policy.choose(view(beside, b), turn) == "a"
    busy = replace(a, held=Held(waiting={0: 4}, tokens=400, uncached=400))
    assert policy.choose(view(busy, b), turn) == "b"
    assert policy.choose(view(a, b), TURN) == "b"  # it lives there now
    assert policy.choose(view(a, replace(b, health="draining")), TURN) == "a"


def test_jlora_gives_idle_replicas_sessions_and_requests_in_turn():
    policy, three = Jlora(LINEAR, 1.0), view(*map(replica, "abc"))
    assert [policy.choose(three, replace(TURN, session=str(i))) for i in range(6)] == list("abcabc")
    assert [policy.choose(three, replace(TURN, session="")) for _ in range(6)] == list("abcabc")


def test_jlora_waits_only_for_what_is_not_in_the_cache():
    known = replica("known", held=Held(waiting={0: 2}, tokens=2000, uncached=10))
    other = replica("other", held=Held(waiting={0: 2}, tokens=200, uncached=200))
    assert Jlora(LINEAR, 1.0).choose(view(known, other), replace(TURN, session="")) == "known"


def test_jlora_waits_for_a_place_in_a_full_batch():
    full, more = replica("full", held=Held(running={0: 8}, context=80)), replica("more", held=Held(running={0: 9}))
    room = Jlora(LINEAR, 1.0, batch=10)
    assert room.choose(view(full, more), TURN) == "full"
    tight = Jlora(LINEAR, 1.0, batch=8)
    steps = LINEAR.step_s({0: 8}, 80)
    waits = tight.cost(full, TURN) - room.cost(full, TURN)
    assert waits == pytest.approx(1 / 8 * 64 * steps - 0.5 * steps)  # it would wait for the step under way anyhow


def test_jlora_waits_for_the_adapters_that_others_wait_for():
    ways = Ways(host_s=0.001, rank_bytes=1e6, path_bps=1e9)
    queued = replica("queued", tiers={"here@1": "HBM"}, held=Held(wanted={"b@1": 8, "here@1": 8, "c@1": 64}))
    assert ways.behind_s(queued, ASK, peer=False) == pytest.approx(0.002 * (64 + 8 + 64))
    first = replace(queued, held=Held(wanted={"a@1": 64, "c@1": 64}))
    assert ways.behind_s(first, ASK, peer=False) == pytest.approx(0.002 * 64), "it is on its way"
    assert ways.behind_s(replace(queued, tiers={"a@1": "HBM"}), ASK, peer=False) == 0.0
    at_host = replace(queued, tiers={"a@1": "HOST", "here@1": "HBM"})
    assert ways.behind_s(at_host, ASK, peer=False) == pytest.approx(0.001 * (64 + 8 + 64)), "copies alone"
    assert Jlora(LINEAR, 1.0, ways=ways).choose(view(queued, replica("idle")), ASK) == "idle"


def test_a_way_is_a_copy_from_the_host_and_a_fetch_before_it_from_elsewhere():
    ways = Ways(host_s=0.001, rank_bytes=1e6, peer_bps=1e9, path_bps=1e8)
    here = {tier: replica(tier, tiers={"a@1": tier}) for tier in ("HBM", "HOST", "DISK", "LOADING")}
    ms = {tier: 1e3 * ways.seconds(one, ASK, peer=False) for tier, one in here.items()}
    assert ms == pytest.approx({"HBM": 0.0, "HOST": 64.0, "DISK": 64 * 11.0, "LOADING": 32 * 11.0})
    assert 1e3 * ways.seconds(replica("r"), ASK, peer=True) == pytest.approx(64 * 2.0)
    assert ways.seconds(replica("r"), TURN, peer=False) == Ways().seconds(replica("r"), ASK, peer=False) == 0.0
    told = replica("r", path_bps=2e9, peer_bps=5e8)  # the path is the faster one there
    assert [1e3 * ways.seconds(told, ASK, peer) for peer in (False, True)] == pytest.approx([64 * 1.5] * 2)
    assert not held(view(here["DISK"], here["LOADING"]), "a@1") and held(view(*here.values()), "a@1")
    assert not held(view(replace(here["HBM"], health="down")), "a@1")


@pytest.mark.parametrize("kind", [Jlora, DLora], ids=lambda kind: kind.__name__)
def test_a_peer_is_nearer_than_the_disk(kind):
    """A busier replica that has the adapter is worth its queue only while all others must read it from the disk."""
    policy = kind(LINEAR, ways=Ways(0.0, 1e6, peer_bps=1e9, path_bps=5e6), **({"slo_s": 9.0} if kind is Jlora else {}))
    idle, there = replica("idle"), replica("there", tiers={"a@1": "HBM"}, held=Held(running={0: 40}))
    assert policy.choose(view(idle, there), ASK) == "idle"
    alone = replace(there, tiers={"a@1": "LOADING"})  # nobody has it yet
    assert policy.choose(view(idle, alone), ASK) == "there"


@pytest.mark.parametrize("kind", [CaraServe, Jlora, DLora], ids=lambda kind: kind.__name__)
def test_a_measured_answer_counts_more_than_a_belief(kind):
    costs = RankCosts(0.01, 0.0, 1e-4, 1e-7, 1e-5, padded=False)
    settings = {} if kind is DLora else {"slo_s": 9.0}
    policy, short = kind(costs, outputs=9.0, **settings), kind(costs, outputs=9000.0, **settings)
    cost = (lambda p, *a: p.pending_s(*a)) if kind is DLora else (lambda p, *a: p.cost(*a))
    busy = replica("r", held=Held(running={8: 5}, context=600))
    asked = replace(ASK, outputs=300.0)
    assert cost(policy, busy, asked) == cost(short, busy, asked) != cost(policy, busy, ASK)


@pytest.mark.parametrize("kind", [CaraServe, Jlora, DLora], ids=lambda kind: kind.__name__)
def test_requests_of_other_routers_cost_as_this_ones_do(kind):
    policy = kind(LINEAR, **({} if kind is DLora else {"slo_s": 9.0}))
    few = Held(running={8: 2}, context=200)
    theirs, mine = replica("theirs", running=50, waiting=10), replica("mine", running=2, held=few)
    assert policy.choose(view(theirs, mine), ASK) == "mine"
    both = replace(mine, name="both", running=10)
    assert policy.choose(view(both, mine), ASK) == "mine"


def test_what_other_routers_have_is_like_the_own_or_else_like_the_request():
    own = Held({8: 2}, {32: 2}, tokens=100, context=300, uncached=60)
    assert all_held(replica("r", running=2, waiting=2, held=own), ASK) is own
    assert all_held(replica("r", running=1, held=own), ASK) is own  # the last message is older than what was sent
    assert all_held(replica("r", running=5, waiting=3, held=own), ASK) == Held(
        {8: 2, 20: 1}, {32: 2, 20: 3}, tokens=200, context=600, uncached=160
    )
    assert all_held(replica("r", running=1, waiting=2), ASK) == Held({64: 2}, {64: 1}, 200, 100, 200)


def test_the_books_follow_a_request_from_send_to_end():
    books, other = Books(), replace(ASK, adapter="other@1", rank=8, prompt=5)
    books.heard(ReplicaView("r", "up", running=2, free_blocks=7))
    books.sent("r", ASK)
    books.sent("r", other)
    seen = books.view["r"]
    assert (seen.sent, seen.running, seen.free_blocks) == (2, 2, 7)
    assert seen.held == Held({64: 1, 8: 1}, {}, 105, uncached=105, wanted={ASK.adapter: 64, "other@1": 8})
    books.began("r", ASK)
    assert books.view["r"].held == Held({8: 1}, {64: 1}, 5, 100, uncached=5, wanted={"other@1": 8})
    books.told("r", 3)
    books.heard(ReplicaView("r", "up", running=1))
    assert books.view["r"].sent == 2 and books.view["r"].running == 1
    assert books.view["r"].held.context == 103
    books.ended("r", ASK, outputs=3)
    books.ended("r", other, outputs=None)
    assert books.view["r"].held == Held() and books.view["r"].sent == 0


def test_the_books_know_what_a_replica_computes_of_prompts():
    books, known = Books(), replace(ASK, cached={"r": 96, "elsewhere": 8})
    books.heard(ReplicaView("r", "up"))
    books.sent("r", known)
    books.sent("r", ASK)
    assert (books.view["r"].held.tokens, books.view["r"].held.uncached) == (200, 104)
    books.began("r", known)
    assert (books.view["r"].held.tokens, books.view["r"].held.uncached) == (100, 100)
    books.ended("r", ASK, outputs=None)
    assert (books.view["r"].held.tokens, books.view["r"].held.uncached) == (0, 0)
