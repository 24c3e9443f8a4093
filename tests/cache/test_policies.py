"""Every formula against a plain computation of what it says, and static keys against exact values."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from jlora.cache.baselines import Slora, Vllm, VllmFair
from jlora.cache.fastlibra import BATCH_S, WINDOW_S, Fastlibra, Knobs, Median, Wol, Wom, Wos
from jlora.cache.policies import Jlora, Policy, Pulse
from jlora.cache.transfer import Meter
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node
from jlora.cache.writeback import Split, WriteBack
from tests import port

TAU = 5.0


def kv(shared: bool = False) -> Node:
    node = Node(AdapterNode(0, 0), b"")
    node.shared = shared
    return node


def meter() -> Meter:
    return Meter(block_s=0.003)


def touch(policy: Policy, nodes: list[Node], until: float = 190.0, seed: int = 0) -> dict[Node, list[float]]:
    """Random visits, most of them with an end of use a little later; the times of the visits."""
    draw, now = random.Random(seed), 1.0
    visits: dict[Node, list[float]] = {node: [] for node in nodes}
    while now < until:
        now += draw.expovariate(1.0)
        node = draw.choice(nodes)
        policy.visit(node, now)
        visits[node].append(now)
        if draw.random() < 0.7:
            now += draw.random()
            policy.leave(node, now)
    return visits


def ask(policy: Policy, adapter: AdapterNode, begin: float, end: float) -> None:
    """Two requests a second for an adapter, with KV of their own."""
    for half in range(int(2 * (end - begin))):
        policy.visit(adapter, begin + half / 2)
        policy.visit(kv(), begin + half / 2)


def rate(policy: Policy, node: Node, now: float) -> float:
    """How often a second the policy takes a node to be asked for."""
    return policy.value(node, now) / policy.meter.density(node.kind, node.size)


# -- jlora ------------------------------------------------------------------------------------------


def test_jlora_is_load_seconds_saved_per_second_and_block():
    policy = Jlora(meter())
    nodes = [AdapterNode(1, 2), AdapterNode(2, 8), kv(shared=True), kv(), kv()]
    visits, now = touch(policy, nodes), 260.0
    for node in nodes:
        if node.shared:
            began = min(visits[n][0] for n in nodes if n.kind == KV)
            window = 100.0 * (1 - math.exp(-(now - began) / 100.0))
            rate = sum(math.exp(-(now - t) / 100.0) for t in visits[node]) / window
            if node.kind == ADAPTER:
                rate = max(rate, policy.silences.rate(now - node.last_use))
        else:
            rate = policy.returns.rate(now - node.last_use)
        assert rate > 0
        assert policy.value(node, now) == pytest.approx(rate * policy.meter.density(node.kind, node.size))


def test_jlora_keys_order_like_the_values_at_any_later_time():
    policy, draw = Jlora(meter()), random.Random(2)
    nodes = [AdapterNode(i, draw.randint(1, 9)) for i in range(20)]
    nodes += [kv(shared=i % 2 > 0) for i in range(40)]
    touch(policy, nodes)
    for now, heap in itertools.product((200.0, 230.0, 1000.0), (0, 1)):
        members = [node for node in nodes if policy.key(node)[0] == heap and node.last_use]
        if heap == 0:  # among those whose count tells, not how long they were silent
            floor = [0.0 if node.kind == KV else policy.silences.rate(now - node.last_use) for node in members]
            members = [n for n, least in zip(members, floor, strict=True) if rate(policy, n, now) > least]
        assert len(members) > 10
        by_key = sorted(members, key=lambda n: policy.key(n)[1])
        values = [policy.value(node, now) for node in by_key]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("served", [10.0, 60.0, 1000.0])
def test_jlora_knows_how_often_an_adapter_is_asked_for_however_short_it_has_served(served: float):
    policy, adapter = Jlora(meter()), AdapterNode(1, 4)
    ask(policy, adapter, 0.0, served)
    assert rate(policy, adapter, served) == pytest.approx(2.0, rel=0.05)


def test_jlora_does_not_count_the_time_before_requests_came_or_a_long_silence():
    policy, adapter = Jlora(meter()), AdapterNode(1, 4)
    policy.visit(adapter, 0.0)  # it is loaded when the replica starts
    for begin in (3600.0, 9000.0):
        ask(policy, adapter, begin, begin + 10)
        assert rate(policy, adapter, begin + 10) == pytest.approx(2.0, rel=0.06)


def test_jlora_keeps_an_adapter_in_use_over_a_conversation_that_has_just_ended_from_the_start():
    policy, adapter, spoken = Jlora(meter()), AdapterNode(1, 4), kv()
    ask(policy, adapter, 0.0, 10.0)
    policy.visit(spoken, 9.0)
    assert policy.value(adapter, 10.0) > policy.value(spoken, 10.0)


def test_jlora_does_not_take_a_first_visit_for_a_crowd():
    policy, adapter = Jlora(meter()), AdapterNode(1, 4)
    policy.visit(adapter, 7.0)
    policy.visit(kv(), 7.0)
    assert 0.2 <= rate(policy, adapter, 7.0) <= 0.25


def test_jlora_keeps_conversations_over_a_rare_adapter_only_where_conversations_come_back():
    for back in (True, False):
        policy, adapter, said = Jlora(meter()), AdapterNode(1, 4), kv()
        policy.visit(adapter, 100.0)
        for second in range(100):
            policy.visit(said, float(second))
            policy.meet([said] if back else [], second + 3.0)
        policy.visit(said, 109.0)
        assert (policy.value(said, 111.0) > policy.value(adapter, 111.0)) == back


def test_jlora_learns_nothing_of_conversations_from_what_many_share():
    policy, prompt = Jlora(meter()), kv(shared=True)
    for second in range(300):
        policy.visit(prompt, float(second))
        policy.meet([prompt], second + 1.0)
    assert policy.returns.rate(1.0) < 0.01


@pytest.mark.parametrize("served", [450, 4000])
@pytest.mark.parametrize("again", [True, False])
def test_jlora_learns_whether_adapters_that_were_silent_for_long_are_asked_for_again(again: bool, served: int):
    policy = Jlora(meter())
    turns = [AdapterNode(i, 4) for i in range(40 if again else 400)]  # each every 400 s; or each of them once
    for adapter in turns:
        policy.visit(adapter, 0.0)  # it is loaded
    for second in range(served):
        if second % 10 == 0:
            asked(policy, turns[second // 10 % len(turns)], float(second))
        policy.tick(Pulse(0, turns, 0), second + 0.5)
    silent = turns[served // 10 % len(turns) - 1]
    now = silent.last_use + 390.0
    assert (rate(policy, silent, now) > 0.25 / 400) == again  # its own count alone says e^-3.9 / 100


def test_jlora_learns_nothing_of_adapters_from_the_silences_of_the_base():
    policy, base, adapter = Jlora(meter()), AdapterNode(0, 0), AdapterNode(1, 4)
    expected = policy.silences.rate(3.0)
    for second in range(0, 300, 3):
        asked(policy, base, float(second))
        policy.tick(Pulse(0, [base], 0), second + 0.5)
    assert policy.silences.rate(3.0) == pytest.approx(expected)
    asked(policy, adapter, 3.0)
    asked(policy, adapter, 6.0)
    assert policy.silences.rate(3.0) > expected


def asked(policy: Jlora, adapter: AdapterNode, now: float) -> None:
    """A request for the adapter comes and goes."""
    adapter.users = 1
    policy.ask(adapter, now)
    policy.visit(adapter, now)
    policy.visit(kv(), now)
    adapter.users = 0


def test_jlora_compares_rare_adapters_by_what_they_are_worth_though_their_counts_order_them_otherwise():
    policy = Jlora(meter())
    small, large = AdapterNode(1, 1), AdapterNode(2, 64)
    port.price(policy.meter, small.kind, fixed_s=1.0)  # what a load costs hardly depends on its size
    for _ in range(3):
        policy.visit(small, 0.0)
    policy.visit(large, 600.0)
    policy.visit(kv(), 1000.0)
    assert policy.key(small) < policy.key(large)
    assert policy.value(small, 1000.0) > policy.value(large, 1000.0)
    assert policy.lookahead > 1


def test_jlora_remembers_the_visits_of_kv_that_comes_to_be_shared():
    policy = Jlora(meter())
    popular, other = kv(), kv(shared=True)
    for second in range(10):
        policy.visit(popular, float(second))
    policy.visit(other, 9.0)
    popular.shared = True
    assert policy.value(popular, 10.0) > 5 * policy.value(other, 10.0)


def test_jlora_keeps_an_adapter_whose_load_has_a_fixed_cost_over_kv_of_the_same_use():
    policy = Jlora(meter())
    adapter, prefix = AdapterNode(1, 16), kv(shared=True)  # as many blocks as a typical copy of KV
    policy.visit(adapter, 1.0)
    policy.visit(prefix, 1.0)
    assert policy.value(adapter, 2.0) == pytest.approx(policy.value(prefix, 2.0))
    port.price(policy.meter, adapter.kind, fixed_s=0.5)
    assert policy.value(adapter, 2.0) > 10 * policy.value(prefix, 2.0)


# -- fastlibra ----------------------------------------------------------------------------------------


def equation_6(policy: Fastlibra, node: Node, visits: dict[Node, list[float]], now: float, lora_eval: float) -> float:
    """ln Eval by the paper's equations, word by word."""

    def count(times: list[float]) -> float:
        return sum(math.exp(-(now - t) / WINDOW_S) for t in times)

    cost = policy.meter.load_s(node.kind, node.size)
    prob = count(visits[node]) / sum(count(times) for times in visits.values())
    sigmoid = 1 / (1 + math.exp(-(now - node.last_use) / policy.tau))
    retain_eval = cost * prob * (1 - sigmoid)  # Equation 5
    return math.log((lora_eval if isinstance(node, AdapterNode) else 1.0) * retain_eval)


def test_fastlibra_is_equations_3_to_6():
    policy = Fastlibra(meter(), Knobs(tau_s=TAU))
    adapters = [AdapterNode(i, 1 + i) for i in range(1, 9)]
    nodes = [*adapters, *(kv() for _ in range(10))]
    visits, now = touch(policy, nodes), 202.0
    policy.tick(Pulse(running=24, adapters=list(adapters), on_device=2), now)
    weights = [sum(math.exp(-(now - t) / WINDOW_S) for t in visits[a]) for a in adapters]
    low = sum(1 - (1 - w / sum(weights)) ** 24 for w in weights)  # Equation 3
    lora_eval = max(1.0, low / 2)  # Equation 4
    assert lora_eval > 2
    for node in nodes:
        assert policy.value(node, now) == pytest.approx(equation_6(policy, node, visits, now, lora_eval))


@pytest.mark.parametrize(("on_device", "fires"), [(0, True), (2, True), (3, False), (8, False)])
def test_lora_eval_rewards_adapters_only_while_fewer_are_in_than_expected(on_device: int, fires: bool):
    policy = Fastlibra(meter(), Knobs(tau_s=TAU))
    adapters: list[Node] = [AdapterNode(i, 2) for i in range(1, 9)]
    for second, node in enumerate(adapters[:3]):
        policy.visit(node, 1.0 + second)
    before = policy.value(adapters[0], 5.0), policy.value(node := kv(), 5.0)
    policy.tick(Pulse(running=100, adapters=adapters, on_device=on_device), 5.0)
    assert (policy.value(adapters[0], 5.0) > before[0] + 1e-9) == fires
    assert policy.value(node, 5.0) == before[1]


def test_the_base_model_is_no_adapter_that_could_be_missing():
    policy = Fastlibra(meter(), Knobs(tau_s=TAU))
    base, adapter = AdapterNode(0, 0), AdapterNode(1, 2)
    for node in (base, adapter):
        policy.visit(node, 1.0)
    before = policy.value(adapter, 2.0)
    policy.tick(Pulse(running=100, adapters=[base, adapter], on_device=1), 2.0)
    assert policy.value(adapter, 2.0) == pytest.approx(before)


def test_the_batch_is_the_mean_of_the_last_seconds():
    policy = Fastlibra(meter(), Knobs(tau_s=TAU))
    for tick in range(1000):
        policy.tick(Pulse(running=10 if tick < 900 else 30, adapters=[], on_device=0), 0.1 * tick)
    assert port.batch(policy) == pytest.approx(30 - 20 * math.exp(-10.0 / BATCH_S), rel=0.02)


def test_fastlibra_still_ranks_what_the_naive_sigmoid_cannot():
    policy = Fastlibra(meter(), Knobs(tau_s=1.0))
    older, newer = kv(), kv()
    policy.visit(older, 1.0)
    policy.visit(newer, 2.0)
    now = 2000.0
    assert 1 - 1 / (1 + math.exp(-(now - 2.0))) == 0.0
    assert policy.value(newer, now) > policy.value(older, now) > -math.inf


def test_fastlibra_keys_are_exact_in_the_tail_and_within_ln_2_near_use():
    policy = Fastlibra(meter(), Knobs(tau_s=TAU))
    nodes: list[Node] = [kv() for _ in range(40)]
    touch(policy, nodes)
    for now, error in ((200.0, math.log(2)), (200.0 + 20 * TAU, 1e-6), (5000.0, 1e-6)):
        for a, b in itertools.combinations(nodes, 2):
            by_key = policy.key(a)[1] - policy.key(b)[1]
            exact = policy.value(a, now) - policy.value(b, now)
            assert abs(by_key - exact) <= error + 1e-6


def test_tau_follows_the_median_reuse_interval_and_asks_for_new_keys_only_in_leaps():
    policy = Fastlibra(meter(), Knobs())
    draw, node, now, leaps = random.Random(3), kv(), 1.0, 0
    for _ in range(3000):
        policy.visit(node, now)
        policy.leave(node, now)
        leaps += policy.tick(Pulse(1, [], 0), now)
        now += draw.lognormvariate(math.log(4.0), 0.5)
    assert 2 <= policy.tau <= 8.5 and 1 <= leaps <= 5


def test_a_tau_that_was_given_stays():
    policy = Fastlibra(meter(), Knobs(tau_s=1.0))
    node = kv()
    for second in range(1, 500):
        policy.visit(node, 50.0 * second)
        assert not policy.tick(Pulse(1, [], 0), 50.0 * second)
    assert policy.tau == 1.0


def test_the_running_median_is_near_the_median():
    draw, median = random.Random(4), Median(60.0)
    values = [draw.lognormvariate(1.0, 1.0) for _ in range(3000)]
    for value in values:
        median.add(value)
    assert median.value == pytest.approx(sorted(values)[1500], rel=0.4)


def test_the_thresholds_are_the_papers_unless_given():
    assert (Fastlibra(meter(), Knobs()).upper, Fastlibra(meter(), Knobs()).lower) == (0.95, 0.70)
    assert Fastlibra(meter(), Knobs(upper=0.9, lower=0.5)).upper == 0.9


# -- ablations and baselines --------------------------------------------------------------------------


def test_wos_is_least_recently_used_whatever_a_node_costs():
    policy = Wos(meter(), Knobs(tau_s=TAU))
    often, late = kv(), kv()
    for second in range(1, 9):
        policy.visit(often, float(second))
    policy.visit(late, 9.0)
    assert policy.value(late, 10.0) > policy.value(often, 10.0)
    assert policy.key(late)[1] > policy.key(often)[1]


def test_wol_never_rewards_and_is_otherwise_fastlibra():
    policies = [kind(meter(), Knobs(tau_s=TAU)) for kind in (Wol, Fastlibra)]
    values = []
    for policy in policies:
        adapters: list[Node] = [AdapterNode(i, 2) for i in range(1, 5)]
        touch(policy, adapters)
        policy.tick(Pulse(64, adapters, 4), 200.0)
        enough = [policy.value(node, 200.0) for node in adapters]
        policy.tick(Pulse(64, adapters, 1), 200.0)
        values.append((enough, [policy.value(node, 200.0) for node in adapters]))
    assert values[0][0] == values[0][1] == values[1][0] != values[1][1]


def test_who_keeps_what_it_depends_on():
    adapter, node = AdapterNode(1, 2), kv()
    lru, wom, vllm = Policy(meter()), Wom(meter(), Knobs()), Vllm(meter())
    assert [lru.binds(adapter), lru.binds(node)] == [True, True]
    assert [wom.binds(adapter), wom.binds(node)] == [False, False]
    assert [vllm.binds(adapter), vllm.binds(node)] == [False, True]


def test_the_baselines_are_what_they_claim():
    lru, vllm, fair, slora = Policy(meter()), Vllm(meter()), VllmFair(meter(), 0.35), Slora(meter())
    assert (vllm.share, vllm.residency, vllm.lower) == (0.2, WriteBack, 0.0)
    assert (fair.share, fair.residency, fair.lower) == (0.35, Split, lru.lower)
    assert (slora.residency, slora.history) == (None, False)
    adapter = AdapterNode(1, 2)
    assert not slora.keeps(adapter) and vllm.keeps(adapter)
    adapter.wanted = (1,)
    assert slora.keeps(adapter)
