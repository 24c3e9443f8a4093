"""The clairvoyant knows what the trace will use, and evicts what it uses last."""

from __future__ import annotations

import math

import pytest

from jlora.cache.transfer import Meter
from jlora.cache.tree import AdapterNode, Origin, Tree
from jlora.sim.clairvoyant import Clairvoyant, Oracle
from jlora.sim.clock import START_S
from jlora.sim.replay import Replay
from jlora.sim.replica import Replica
from jlora.sim.scenario import foresee
from jlora.sim.trace import Trace, Turn
from tests.sim._sim import BLOCK, SPEC, replica_of, sized

A, B = [1] * 9, [2] * 9  # two full blocks each


def oracle() -> Oracle:
    found = Oracle(start=100.0, block_tokens=BLOCK)
    for at, uid, prompt in ((0.0, 1, A), (5.0, 1, B), (7.0, 2, A), (9.0, 1, A)):
        found.expect(at, uid, "", prompt)
    return found


def nodes(tokens: list[int], adapter: AdapterNode) -> list:
    tree = Tree(BLOCK)
    first = tree.insert(adapter, Origin(adapter), tokens, 0)
    return [first, tree.insert(first, Origin(adapter), tokens, BLOCK)]


def test_it_knows_when_each_block_and_each_adapter_is_used_next():
    policy = Clairvoyant(Meter(1.0), oracle())
    one, two = AdapterNode(1, 4), AdapterNode(2, 4)
    ours, theirs = nodes(A, one), nodes(A, two)
    for node in (one, two, *ours, *theirs):
        policy.visit(node, 100.0)
    assert [node.count for node in (one, two)] == [105.0, 107.0]
    assert [node.count for node in ours] == [109.0, 109.0]
    assert [node.count for node in theirs] == [107.0, 107.0]
    policy.leave(ours[0], 109.5)
    assert ours[0].count == math.inf and policy.value(ours[0], 110.0) == 0.0


def test_what_no_prompt_holds_is_worth_nothing():
    policy = Clairvoyant(Meter(1.0), oracle())
    adapter = AdapterNode(1, 4)
    for node in (adapter, *nodes([7] * 9, adapter)):
        policy.visit(node, 100.0)
    assert node.count == math.inf


def test_sooner_use_and_dearer_loads_are_worth_more():
    policy = Clairvoyant(Meter(1.0), oracle())
    near, far = nodes(B, AdapterNode(1, 0)), nodes(A, AdapterNode(1, 0))
    for path in (near, far):
        assert path[0].parent is not None
        for node in (path[0].parent, *path):
            policy.visit(node, 100.0)
    assert policy.value(near[0], 101.0) > policy.value(far[0], 101.0)
    assert policy.key(near[0]) > policy.key(far[0])


def asks(*spec: tuple[float, list[int]]) -> Trace:
    """A session per prompt: (time, tokens)."""
    return Trace("asks", tuple(Turn(at, i, 0, tuple(prompt), 1, None) for i, (at, prompt) in enumerate(spec)), ())


def hits(policy: str, trace: Trace, device: int) -> int:
    """Tokens found on the device."""
    spec = sized(device, host=8)
    made = Clairvoyant(Meter(SPEC.link.block_s), foresee(trace, BLOCK)) if policy == "clairvoyant" else None
    replica = replica_of(spec, policy) if made is None else Replica(spec, made)
    replay = Replay(replica, trace)
    replay.history()
    replay.run()
    counters = replica.manager.counters
    return counters.kv_hit_tokens - counters.kv_host_hit_tokens


def test_a_loop_longer_than_the_device_is_lost_on_lru_and_not_on_who_knows():
    """Belady's textbook case: cycling through a little more than fits."""
    prompts = [[100 + i] * 33 for i in range(4)]  # 8 blocks each, and the device has room for two and a half
    trace = asks(*((float(i), prompts[i % 4]) for i in range(40)))
    assert hits("lru", trace, device=20) == 0
    assert hits("clairvoyant", trace, device=20) > 15 * 32


def test_foresight_uses_the_answers_that_the_replica_will_give():
    """A second turn's blocks hold the first one's answer: they are found in the oracle, block by block."""
    turns = (Turn(0.0, 1, 0, (9,) * 6, 10, 0), Turn(9.0, 1, 1, (5,) * 4, 1, 0))
    trace = Trace("two", turns, ("a0",))
    policy = Clairvoyant(Meter(SPEC.link.block_s), foresee(trace, BLOCK))
    replica = Replica(sized(64), policy)
    replay = Replay(replica, trace)
    replay.until(5.0)  # between the two
    below = list(replica.manager.tree.below(replica.manager.adapters[1]))
    assert len(below) == (6 + 10 - 1) // BLOCK
    assert [node.count for node in below] == pytest.approx([START_S + 9.0] * len(below))
