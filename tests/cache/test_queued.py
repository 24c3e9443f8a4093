"""What the queue needs: it leaves last, what is needed latest first, and for a new sequence only as far as it pays."""

from __future__ import annotations

import math

import pytest

from jlora.cache.lease import Want
from jlora.cache.queued import Queued, unwant, want
from jlora.cache.transfer import Copy, Meter
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node, Origin
from tests.cache._cache import Cache

BLOCK_S = 1e-3  # a copied block, or a computed one if that is less
A, B, C, D = [1] * 5, [2] * 5, [3] * 5, [4] * 5  # prompts: a full block each, and one token more


def queued() -> Queued:
    return Queued(lambda node: bool(node.device), Meter(BLOCK_S, 1.0))


def kv(found: Queued, *places: int) -> Node:
    return candidate(found, Node(None, b""), *places)


def candidate(found: Queued, node: Node, *places: int) -> Node:
    node.device = (1,)
    for place in places:
        want(node, place)
    found.push(node)
    return node


def need(cache: Cache, tokens: list[int], place: int) -> Want:
    return cache.manager.expect(Origin(cache.manager.base), tokens, True, place)


# -- the order -----------------------------------------------------------------------------------


def test_what_is_needed_last_leaves_first_by_its_first_place():
    found = queued()
    soon, late = kv(found, 3, 90), kv(found, 7)
    assert found.worst(None) is late and len(soon.wanted) == 2
    assert unwant(soon, 3)
    found.push(soon)
    assert found.worst(None) is soon
    assert not want(late, 8) and not unwant(late, 8)


def test_one_more_in_line_copies_none_of_the_others():
    """Thousands may need one adapter; each once copied them all, when it was queued and when it was served."""
    node = kv(queued(), 5, 3)
    line = node.wanted
    want(node, 9), unwant(node, 5)
    assert node.wanted is line and list(line) == [3, 9]
    unwant(node, 3), unwant(node, 9)
    assert node.wanted is Node(None, b"").wanted, "nodes that nobody needs share one empty line"


def test_a_higher_priority_is_a_smaller_place():
    found = queued()
    usual, urgent = kv(found, 5), kv(found, 6 - (1 << 40))
    assert found.worst(KV) is usual
    usual.device = ()
    assert found.worst(KV) is urgent


@pytest.mark.parametrize(("place", "leaves"), [(30, "kv"), (300, "adapter")])
def test_what_is_dear_to_load_stays_unless_it_is_needed_far_later(place: int, leaves: str):
    meter = Meter(BLOCK_S, 1.0)
    for blocks in (1, 4) * 50:  # an adapter's block is 100 times as dear as KV's
        copy = Copy("in", AdapterNode(9, blocks), (AdapterNode(9, blocks),), (0,) * blocks, (0,) * blocks, True)
        copy.seconds = 0.1 * blocks
        meter.observe(copy)
    found = Queued(lambda node: bool(node.device), meter)
    found.served = 1000
    ratio = meter.density(ADAPTER, 1) / meter.density(KV, 1)
    adapter, node = candidate(found, AdapterNode(1, 1), 1000 + place), kv(found, 1002)
    assert 15 < ratio < 150, ratio
    assert found.worst(None) is (node if leaves == "kv" else adapter)
    assert found.worst(ADAPTER) is adapter and found.worst(KV) is node


def test_a_node_takes_as_long_to_load_as_its_blocks_together():
    found = queued()
    assert found.load_s(AdapterNode(1, 5)) == pytest.approx(5 * found.load_s(AdapterNode(2, 1)), rel=0.5)
    assert found.load_s(AdapterNode(1, 5)) > 2 * found.load_s(AdapterNode(2, 1))


def test_a_later_request_that_is_served_sooner_saves_what_another_needs():
    found = queued()
    shared, other = kv(found, 50), kv(found, 40)
    assert found.worst(KV) is shared
    assert want(shared, 30)
    shared.stamp += 1
    found.push(shared)
    assert found.worst(KV) is other


# -- room ------------------------------------------------------------------------------------------


def test_room_is_made_of_what_nobody_waits_for_then_of_what_is_needed_last():
    cache = Cache(device=5)
    for prompt in (A, B, C, D):
        cache.run(prompt)
    wants = [need(cache, A, 3), need(cache, B, 1), need(cache, D, 2)]
    assert cache.manager.device.free == 1
    for gone in (C, A, D, B):  # not in order of age, as far as somebody waits
        assert cache.cells.make_room(kv=cache.manager.device.free + 1)
        assert cache.tiers(gone) == "h"
    for wanted in wants:
        cache.manager.unexpect(wanted)


@pytest.mark.parametrize(
    ("spare_s", "left"), [(math.inf, 0), (1.5 * BLOCK_S, 0), (0.5 * BLOCK_S, 1), (0.0, 2), (-1.0, 2)]
)
def test_what_the_queue_needs_leaves_until_loading_it_takes_the_time_to_spare(spare_s: float, left: int):
    cache = Cache(device=4)
    for prompt in (A, B, C):
        cache.run(prompt)
    wants = [need(cache, A, 1), need(cache, B, 2)]
    assert cache.cells.make_room(kv=4, spare_s=spare_s) == (left == 0)
    assert cache.tiers(C) == "h"  # nobody waits for it
    assert "".join(cache.tiers(x) for x in (A, B)).count("b") == left
    for wanted in wants:
        cache.manager.unexpect(wanted)


def test_a_lease_that_would_cost_the_queue_too_much_is_refused_and_granted_when_it_may():
    cache = Cache(device=4)
    cache.run(A)
    wanted = need(cache, A, 1)
    assert cache.manager.leases.acquire(Origin(cache.manager.base), [9] * 16, True, 0, spare_s=0.0) is None
    assert cache.tiers(A) == "b"
    lease = cache.manager.leases.acquire(Origin(cache.manager.base), [9] * 16, True, 0)
    assert lease is not None and cache.tiers(A) == "h"
    cache.manager.leases.release(lease)
    cache.manager.unexpect(wanted)


def test_what_is_dearer_than_all_time_to_spare_can_still_leave():
    cache = Cache(device=12)
    adapter = cache.adapter(1, 8)
    cache.run(A, adapter)
    wants = [cache.manager.expect(Origin(adapter), A, True, 2)]
    assert cache.cells.make_room(kv=12, spare_s=0.1 * BLOCK_S) is False  # the end of its conversation
    assert cache.cells.make_room(kv=12, spare_s=0.1 * BLOCK_S) and not adapter.device
    cache.manager.unexpect(wants[0])


def test_who_was_refused_may_ask_again_when_nobody_needs_a_node_any_more():
    cache = Cache(device=4)
    cache.run(A)
    first, second = need(cache, A, 1), need(cache, A, 2)
    before = cache.manager.epoch
    cache.manager.unexpect(first)
    assert cache.manager.epoch == before
    cache.manager.unexpect(second)
    assert cache.manager.epoch > before
