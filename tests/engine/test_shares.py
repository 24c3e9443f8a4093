"""Fair shares between tenants: the order, the bound on the difference of service, charges, and what is forgotten."""

from __future__ import annotations

import random

import pytest

from jlora.engine import shares
from jlora.engine.plan import Account, Sequence
from jlora.engine.scheduler import Scheduler
from jlora.engine.shares import IDLE, OUTPUT, PROMPT
from jlora.types import TokenEvent
from tests import port
from tests.engine._bench import Bench

PROMPTS, OUTPUTS, SLOTS = 40, 12, 4  # the longest prompt and answer, and the batch
AHEAD = 32.0
BOUND = 2 * max(PROMPT * PROMPTS, OUTPUT * SLOTS * OUTPUTS)  # the paper's Theorem 4.4


def fresh(length: int, start: int) -> list[int]:
    """A prompt that no other begins like."""
    return [start, *range(10, 9 + length)]


def accounts(bench: Bench) -> dict[str, Account]:
    found = {}
    scheduler: Scheduler = bench.scheduler
    for s in (*scheduler.running, *scheduler.loading, *scheduler.queue):
        found[s.request.tenant] = s.account
    return found


def first_tokens(events: list[TokenEvent]) -> list[str]:
    return list(dict.fromkeys(e.request_id for e in events if e.token_id is not None))


def served(bench: Bench, tenants: dict[str, str], prompts: dict[str, int]) -> dict[str, float]:
    """What each tenant has received, from the events alone."""
    total = dict.fromkeys(tenants.values(), 0.0)
    for name in first_tokens(bench.events):
        total[tenants[name]] += PROMPT * prompts[name]
    for event in bench.events:
        total[tenants[event.request_id]] += OUTPUT * (event.token_id is not None)
    return total


def test_tenants_take_turns_and_each_keeps_its_order():
    bench = Bench(max_seqs=1)
    for index in range(4):
        bench.submit(f"a{index}", fresh(8, 100 + index), max_tokens=1, tenant="a")
    for index in range(3):
        bench.submit(f"b{index}", fresh(8, 200 + index), max_tokens=1, tenant="b")
    bench.finish()
    assert first_tokens(bench.events) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]


def test_a_request_that_has_waited_elsewhere_is_served_by_its_first_arrival_and_charged_once():
    elsewhere, bench = Bench(max_seqs=1), Bench(max_seqs=1)
    elsewhere.submit("runs", fresh(8, 1), max_tokens=4, tenant="a")
    elsewhere.submit("moves", fresh(8, 2), max_tokens=4, tenant="b")
    elsewhere.step()
    account = accounts(elsewhere)["b"]
    elsewhere.abort("moves")
    assert account.served == 0 and account.live == 0 and not account.line
    bench.submit("runs", fresh(8, 1), max_tokens=4, tenant="b")
    bench.step()
    for index in range(3):
        bench.submit(f"b{index}", fresh(8, 100 + index), max_tokens=1, tenant="b")
        bench.now += 1.0
    bench.submit("urgent", fresh(8, 104), max_tokens=1, tenant="b", priority=1)
    bench.submit("moves", fresh(8, 2), max_tokens=4, tenant="b", waited=1.5)
    account = accounts(bench)["b"]
    bench.finish()
    assert first_tokens(bench.events) == ["runs", "urgent", "b0", "b1", "moves", "b2"]
    assert account.served == PROMPT * 5 * 8 + OUTPUT * (4 + 3 + 4)


def test_a_turn_is_as_long_as_its_tokens():
    bench = Bench(max_seqs=1, blocks=256)
    bench.submit("long", fresh(32, 99), max_tokens=4, tenant="a")
    bench.submit("next", fresh(8, 98), max_tokens=1, tenant="a")
    for index in range(6):
        bench.submit(f"b{index}", fresh(8, 200 + index), max_tokens=1, tenant="b")
    bench.finish()
    assert first_tokens(bench.events) == ["long", "b0", "b1", "b2", "b3", "next", "b4", "b5"]  # 40 against 4 x 10


def test_a_higher_priority_is_not_shared():
    bench = Bench(max_seqs=1)
    bench.submit("runs", 4, max_tokens=2, tenant="c")
    bench.step()
    bench.submit("b", fresh(8, 1), max_tokens=1, tenant="b")
    for index in range(3):
        bench.submit(f"a{index}", fresh(8, 100 + index), max_tokens=1, tenant="a", priority=1)
    bench.finish()
    assert first_tokens(bench.events) == ["runs", "a0", "a1", "a2", "b"]


@pytest.mark.parametrize("seed", range(4))
def test_two_tenants_that_always_wait_are_served_alike(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shares, "AHEAD", AHEAD)
    always_waiting(seed)


def always_waiting(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(blocks=128, max_seqs=SLOTS, max_step_tokens=64)
    tenants: dict[str, str] = {}
    prompts: dict[str, int] = {}
    widest = 0.0
    for index in range(400):
        queued = [s.request.tenant for s in bench.scheduler.queue]
        for tenant, many, most in (("meek", 2 * SLOTS, 3), ("greedy", 30, PROMPTS)):
            while queued.count(tenant) < many:
                name, length = f"{tenant}{len(tenants)}", rng.randint(2, most)
                tenants[name], prompts[name] = tenant, length
                bench.submit(name, fresh(length, 1000 + len(tenants)), rng.randint(1, OUTPUTS), tenant=tenant)
                queued.append(tenant)
        bench.step()
        if index == 20:
            begun = served(bench, tenants, prompts)
        if index >= 20:
            now = served(bench, tenants, prompts)
            widest = max(widest, abs((now["meek"] - begun["meek"]) - (now["greedy"] - begun["greedy"])))
    assert widest <= BOUND + AHEAD, "one of two tenants that both wait gets more and more"
    assert min(now.values()) > 5 * BOUND, "too little has run to show anything"


def test_a_tenant_that_was_away_has_saved_up_nothing():
    bench = Bench(max_seqs=1, blocks=256)
    bench.submit("early", fresh(4, 1), max_tokens=1, tenant="b")
    for index in range(12):
        bench.submit(f"a{index}", fresh(16, 100 + index), max_tokens=1, tenant="a")
    while "a5" not in first_tokens(bench.events):
        bench.step()
    for index in range(4):
        bench.submit(f"b{index}", fresh(16, 200 + index), max_tokens=1, tenant="b")
    bench.finish()
    order = first_tokens(bench.events)
    late = order[order.index("b0") :]
    assert [name[0] for name in late[:6]] in (["b", "a"] * 3, ["b", "b", "a", "b", "a", "b"])


def test_tokens_computed_again_are_charged_once():
    bench = Bench(blocks=12, max_seqs=2)
    bench.submit("a", fresh(16, 1), max_tokens=12, tenant="a")
    bench.submit("b", fresh(16, 2), max_tokens=12, tenant="b")
    kept = accounts(bench)
    bench.finish()
    assert bench.scheduler.preemptions, "nothing was computed again"
    assert {tenant: account.served for tenant, account in kept.items()} == dict.fromkeys("ab", 16 + 12 * OUTPUT)


def test_what_is_cancelled_costs_what_was_computed():
    bench = Bench(blocks=128, max_seqs=1, delay=50)
    cold = bench.adapter(1, 4)
    bench.submit("runs", fresh(8, 1), max_tokens=20, tenant="a")
    bench.step()
    bench.submit("queued", fresh(8, 2), tenant="b")
    kept = accounts(bench)
    bench.abort("queued")
    assert kept["b"].served == kept["a"].served == 8  # lifted, and charged nothing
    for _ in range(3):
        bench.step()
    bench.abort("runs")
    bench.submit("loads", fresh(8, 3), tenant="c", adapter=cold)
    bench.submit("stays", fresh(8, 4), max_tokens=60, tenant="d")
    kept = accounts(bench)
    bench.step()
    charged = kept["c"].served
    bench.abort("loads")  # its adapter is still on its way
    assert kept["c"].served == charged - 8
    bench.finish()


def test_a_prompt_that_goes_on_elsewhere_costs_nothing_here_unless_it_has_brought_a_token():
    bench = Bench(blocks=128, max_seqs=3, max_step_tokens=64)
    bench.submit("answers", fresh(8, 1), max_tokens=9, tenant="a")
    bench.step()
    bench.step()
    bench.submit("half", fresh(130, 2), tenant="b")
    bench.submit("queued", fresh(8, 3), tenant="c")
    kept = accounts(bench)
    bench.step()
    (half,) = (s for s in bench.scheduler.running if s.request.id == "half")
    assert 0 < half.computed < 130 and kept["b"].served >= 130
    lifted, answered = kept["b"].served - 130, kept["a"].served
    for name in ("half", "queued", "answers"):
        bench.scheduler.abort(bench.handles[name], bench.now, moved=True)
    assert (kept["b"].served, kept["a"].served) == (lifted, answered)
    bench.finish()


def test_a_tenant_takes_the_slots_of_one_that_runs_more_and_never_more_than_its_share():
    bench = Bench(blocks=512, max_seqs=8, max_step_tokens=512)
    for index in range(20):
        bench.submit(f"a{index}", fresh(8, 100 + index), max_tokens=40, tenant="a")
    for _ in range(4):
        bench.step()
    assert [s.request.tenant for s in bench.scheduler.running] == ["a"] * 8
    for index in range(20):
        bench.submit(f"b{index}", fresh(8, 200 + index), max_tokens=40, tenant="b")
    bench.step()
    bench.step()
    assert sorted(s.request.tenant for s in bench.scheduler.running) == ["a"] * 4 + ["b"] * 4
    assert bench.scheduler.preemptions == 4
    for _ in range(10):
        bench.step()
    assert bench.scheduler.preemptions == 4, "slots go to and fro"
    bench.finish(2000)
    assert all(len(bench.tokens(f"{tenant}{index}")) == 40 for tenant in "ab" for index in range(20))


def test_requests_that_wait_for_the_disk_hold_up_no_other_of_their_tenant():
    """They are the first in line; those behind them take the slots that the tenant is owed."""
    bench = Bench(blocks=512, max_seqs=8, max_step_tokens=512)
    for index in range(20):
        bench.submit(f"a{index}", fresh(8, 100 + index), max_tokens=40, tenant="a")
    for _ in range(4):
        bench.step()
    base, node = bench.manager.base, bench.manager.expect_adapter(1, 1)
    for index in range(20):
        bench.submit(f"b{index}", fresh(8, 200 + index), tenant="b", adapter=node if index < 10 else base)
    bench.step()
    bench.step()
    running = bench.scheduler.running
    assert sorted(s.request.id for s in running if s.request.tenant == "b") == ["b10", "b11", "b12", "b13"]


def test_the_pool_is_taken_from_the_tenant_that_has_received_most():
    bench = Bench(blocks=18, max_seqs=8, max_step_tokens=512)
    for index in range(3):
        bench.submit(f"a{index}", fresh(12, 100 + index), max_tokens=20, tenant="a")
    bench.step()
    bench.submit("b", fresh(12, 200), max_tokens=20, tenant="b")  # the youngest
    seen: set[str] = set()
    while bench.scheduler.live:
        before = {s.request.id for s in bench.scheduler.running}
        bench.step()
        seen |= {s.request.id for s in bench.scheduler.queue if s.request.id in before}
    assert seen and "b" not in seen
    bench.finish()


def test_the_counters_of_idle_tenants_are_forgotten():
    bench = Bench(blocks=64, max_seqs=2)
    bench.submit("stays", fresh(8, 1), max_tokens=8 * IDLE, tenant="stays")
    book = port.counters(bench.scheduler)[0]
    for index in range(6 * IDLE):
        bench.submit(f"q{index}", fresh(8, 2), tenant=f"t{index}")
        bench.abort(f"q{index}")
        assert len(book) <= 4 * IDLE
    bench.abort("stays")
    assert not port.counters(bench.scheduler), "nobody is live, and counters are kept"
    bench.finish()


def alone(sequences: int) -> list[Sequence]:
    """Queued sequences of one tenant, in order of service."""
    bench = Bench()
    for index in range(sequences):
        bench.submit(f"q{index}", fresh(8, index + 1), priority=index % 2)
    return list(bench.scheduler.queue)


def test_with_one_tenant_the_order_is_of_priority_and_arrival():
    order = [sequence.place for sequence in alone(9)]
    assert order == sorted(order)


def test_one_that_has_waited_elsewhere_has_the_place_of_its_first_arrival_in_the_cache_too():
    """Its adapter is read, and leaves, in the order in which the queue is served."""
    draw, bench = random.Random(0), Bench(max_seqs=2, blocks=24)
    cold = bench.adapter(1, 4)
    for index in range(60):
        fields = {"waited": draw.uniform(0.0, 20.0)} if draw.random() < 0.3 else {}
        bench.submit(f"q{index}", fresh(8, index + 1), max_tokens=8, tenant=draw.choice("ab"), **fields)
        if draw.random() < 0.5:
            bench.step()
        queued = sorted(bench.scheduler.queue, key=lambda sequence: sequence.line)
        assert [s.place for s in queued] == sorted(s.place for s in queued)
    assert any(s.place != s.order for s in queued)
    bench.submit("moves", fresh(8, 99), adapter=cold, waited=bench.now + 100)
    assert list(cold.wanted) == [min(s.place for s in queued)]
    bench.finish(2000)
    assert bench.scheduler.preemptions, "none has come back to the queue"


def test_the_place_of_one_that_has_waited_nowhere_else_is_its_order():
    bench = Bench(max_seqs=4, blocks=12)
    for index in range(20):
        bench.submit(f"q{index}", fresh(8, index + 1), max_tokens=8, tenant="ab"[index % 2])
        bench.step()
        assert all(s.place == s.order for s in bench.scheduler.queue)
    bench.finish(2000)
    assert bench.scheduler.preemptions


def _charge_again(sequence: Sequence) -> None:
    shares.charge_output(sequence)
    if sequence.lease is not None and sequence.lease.cached:
        shares.account_of(sequence).served += PROMPT


# Planted bugs, and a test above that finds each.
BUGS = {
    "no output is charged": ("scheduler.charge_output", lambda s: None, 0),
    "a prompt is charged whenever it comes back": ("scheduler.charge_output", _charge_again, 1),
    "counters are not lifted": ("shares.Shares._floor", 0.0, 2),
    "slots go back and forth": ("scheduler.owes", lambda one, other: one is not other, 3),
}
FINDS = (
    lambda: always_waiting(0),
    test_tokens_computed_again_are_charged_once,
    test_a_tenant_that_was_away_has_saved_up_nothing,
    test_a_tenant_takes_the_slots_of_one_that_runs_more_and_never_more_than_its_share,
)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch):
    name, planted, finds = BUGS[bug]
    monkeypatch.setattr(shares, "AHEAD", AHEAD)
    monkeypatch.setattr(f"jlora.engine.{name}", planted)
    with pytest.raises(AssertionError):
        FINDS[finds]()


@pytest.mark.parametrize("seed", range(8))
def test_sequences_whose_adapter_comes_from_the_disk_are_passed_over_until_it_has_come(seed: int):
    rng, bench = random.Random(seed), Bench(max_seqs=1, blocks=256)
    nodes = [bench.manager.expect_adapter(uid, 1) for uid in range(1, 6)]
    bench.submit("runs", 4, max_tokens=50)
    bench.step()  # it has the slot: the others stay in the queue
    queued: list[str] = []
    for index in range(60):
        action = rng.random()
        if action < 0.6:
            queued.append(f"r{index}")
            bench.submit(queued[-1], fresh(4, 100 + index), waited=rng.choice((0.0, 5.0)), adapter=rng.choice(nodes))
        elif action < 0.8 and queued:
            bench.abort(queued.pop(rng.randrange(len(queued))))
        elif reading := [node for node in nodes if node.reading]:
            node = rng.choice(reading)
            bench.manager.arrive(node, bench.manager.reserve(1) or (), visited=True)
        queue = bench.scheduler.queue
        assert list(port.present(queue)) == [s for s in queue if not s.adapter.reading]
    for name in queued:
        bench.abort(name)
    assert not len(bench.scheduler.queue) and not list(port.present(bench.scheduler.queue))


def test_a_step_with_a_free_slot_does_not_look_at_requests_that_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch):
    looks, (owner, name) = list[Sequence](), port.not_yet()
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda queue, sequence: looks.append(sequence) or real(queue, sequence))
    bench = Bench(max_seqs=2)
    node = bench.manager.expect_adapter(1, 1)
    for index in range(30):
        bench.submit(f"r{index}", fresh(4, 100 + index), adapter=node)
    bench.submit("last", 4, max_tokens=2)
    bench.step()
    bench.step()
    assert [sequence.request.id for sequence in looks] == ["last"]
    bench.manager.arrive(node, bench.manager.reserve(1) or (), visited=True)
    bench.finish()
    assert first_tokens(bench.events) == ["last", *(f"r{index}" for index in range(30))]
