"""Activated LoRA in the tree: what is shared with the base, what is not, and when it leaves."""

from __future__ import annotations

import tracemalloc

import pytest

from jlora.cache.inspect import invalid_kv, state
from jlora.cache.readiness import Readiness
from jlora.cache.tree import AdapterNode, Node, Origin, SuffixNode, Tree, adapter_of
from tests.cache._books import evict_all
from tests.cache._cache import BLOCK, Cache, measure

TALK = [5] * 13  # three full blocks and a token


def activated(adapter: AdapterNode, at: int, tenant: str = "") -> Origin:
    return Origin(adapter, tenant, at)


def suffixes(adapter: AdapterNode) -> list[Node]:
    return list(adapter.suffixes)


# -- sharing --------------------------------------------------------------------------------------


def test_blocks_that_end_before_the_invocation_are_the_bases_both_ways():
    cache = Cache()
    one, two = cache.adapter(1, 2), cache.adapter(2, 2)
    assert cache.run(TALK) == 0
    assert cache.run([*TALK, 8, 8, 8, 8], activated(one, 13)) == 12  # base -> activated
    assert cache.run([*TALK, 9, 9, 9, 9], activated(two, 13)) == 12  # one activated -> another
    longer = [*TALK, 1, 2, 3, 4, 5, 6, 7]
    assert cache.run([*longer, 8, 8], activated(one, 20)) == 12  # its first 20 tokens are base KV, two blocks new
    assert cache.run([*longer, 1]) == 20  # activated -> base
    assert len(suffixes(one)) == 1 and cache.manager.counters.kv_hit_tokens == 3 * 12 + 20


def test_the_block_that_the_invocation_begins_in_is_the_suffixs():
    cache = Cache()
    one = cache.adapter(1, 1)
    prompt = [*TALK, 8, 8, 8, 8]
    cache.run(prompt, activated(one, 7))
    assert cache.run(prompt) == 4  # block 0; block 1 holds activated KV
    assert cache.run(prompt, activated(one, 7)) == 16
    assert isinstance(cache.path(prompt, activated(one, 7))[1], SuffixNode)


@pytest.mark.parametrize("at", [0, 1, 3, 4, 8, 12])
def test_a_suffix_is_found_again_by_its_own_adapter_and_invocation_only(at: int):
    cache = Cache()
    one, two = cache.adapter(1, 1), cache.adapter(2, 1)
    cache.run([*TALK, 8, 8, 8, 8], activated(one, at))
    prompt, border = [*TALK, 8, 8, 8, 8], at // BLOCK * BLOCK
    assert cache.run([*prompt, 7], activated(one, at)) == 16
    assert cache.path(prompt, activated(two, at)) == cache.path(prompt)[: border // BLOCK]
    assert len(cache.path(prompt, activated(one, at, tenant="other"))) == 0
    for other in {0, 1, 2, 3, 4, 8, 12} - {at}:  # the same tokens, invoked elsewhere
        assert len(cache.path(prompt, activated(one, other))) <= min(border, other) // BLOCK


def test_a_lora_and_an_activated_lora_of_one_uid_share_nothing_but_the_tree():
    cache = Cache()
    one = cache.adapter(1, 1)
    cache.run(TALK, one)
    assert cache.run([*TALK, 1], activated(one, 12)) == 0
    assert cache.run([*TALK, 1], one) == 12


def test_an_invocation_at_the_start_hangs_below_the_base_and_keeps_tenants_apart():
    cache = Cache()
    one = cache.adapter(1, 1)
    cache.run(TALK, activated(one, 0, tenant="a"))
    assert [node.parent for node in suffixes(one)] == [cache.manager.base]
    assert cache.run(TALK, activated(one, 0, tenant="a")) == 12
    assert cache.run(TALK, activated(one, 0, tenant="b")) == 0 and cache.run(TALK) == 0


def test_a_suffix_makes_no_crowd_of_the_conversation_it_reads():
    cache = Cache()
    one = cache.adapter(1, 1)
    for uses in (TALK, [*TALK, 1, 2, 3]):
        cache.run(uses)
        cache.run([*TALK, 8, 8, 8, 8], activated(one, 13))
    assert len(suffixes(one)) == 1 and not any(node.shared for node in cache.path(TALK))
    cache.run([*TALK[:12], 7, 7, 7, 7, 7])
    assert all(node.shared for node in cache.path(TALK))


def test_suffixes_are_kept_in_order_of_use():
    cache = Cache()
    one = cache.adapter(1, 1)
    for last in (7, 8, 7):
        cache.run([*TALK, last, last, last, last], activated(one, 13))
    found = cache.path([*TALK, 7, 7, 7, 7], activated(one, 13))[-1]
    assert suffixes(one)[-1] is found and len(suffixes(one)) == 2


def test_generated_tokens_of_an_activated_lora_are_no_base_kv():
    cache = Cache()
    one = cache.adapter(1, 1)
    prompt = [*TALK[:11], 8]  # the invocation is the last token
    answer = [1, 2, 3, 4, 5]
    lease = cache.leased(prompt, activated(one, 11))
    assert cache.manager.leases.grow(lease, 17)
    cache.manager.leases.publish(lease, prompt + answer, 17)
    cache.manager.leases.release(lease)
    assert cache.run([*prompt, *answer, 6]) == 8  # what comes before the invocation's block
    assert cache.run([*prompt, *answer, 6]) == 16  # its tokens were prefilled once, as the base's


# -- dependencies ---------------------------------------------------------------------------------


def test_an_adapter_stays_while_activated_kv_of_it_is_on_the_device():
    cache = Cache(policy="lru")
    one = cache.adapter(1, 2)
    prompt = [*TALK, 8, 8, 8]
    cache.run(prompt, activated(one, 12))
    cells, suffix = cache.cells, suffixes(one)[0]
    assert one.resident == 1 and not cells.candidates.evictable(one)
    order = []
    while (node := cells.candidates.victim()) is not None:
        order.append(node)
        cells.evict(node)
    assert order.index(suffix) < order.index(one)
    assert [n for n in order if n not in (one, suffix)] == [*reversed(cache.path(TALK))]
    assert state(cache.manager, 1).invalid_kv == 0


def test_without_dependencies_activated_kv_may_stay_behind_and_counts_as_invalid():
    cache = Cache(policy="fastlibra-wom")
    one = cache.adapter(1, 2)
    cache.run([*TALK, 8, 8, 8], activated(one, 12))
    assert invalid_kv(cache.manager) == 0
    cache.cells.evict(one)
    assert invalid_kv(cache.manager) == state(cache.manager, 1).invalid_kv == 1


def test_a_suffix_on_the_host_follows_its_prefix_and_its_adapter():
    cache = Cache()
    one = cache.adapter(1, 2)
    prompt = [*TALK, 8, 8, 8, 8]
    cache.run(prompt, activated(one, 13))
    evict_all(cache.manager)
    assert cache.tiers(prompt, activated(one, 13)) == "hhhh"
    seen = []
    while (root := cache.cells.best_root()) is not None:  # a root has all that it needs
        assert all(needed.device or not needed.size for needed in root.needs)
        seen.append(root)
        cache.cells.bring(adapter_of(root), [root], demand=False)
        cache.land()
    assert {*seen} == {one, *cache.path(prompt, activated(one, 13))}


def test_a_prefix_and_a_suffix_come_back_as_copies_of_their_own():
    cache = Cache()
    one = cache.adapter(1, 2)
    prompt = [*TALK, 8, 8, 8, 8, 8]
    cache.run(prompt, activated(one, 13))
    evict_all(cache.manager)
    lease = cache.leased(prompt, activated(one, 13))
    copies = cache.copies()
    assert [(copy.adapter, len(copy.nodes)) for copy in copies] == [(one, 1), (one, 1), (cache.manager.base, 3)]
    assert (one.flying, cache.manager.base.flying) == (2, 1) and not cache.ready(lease)
    cache.land()
    assert cache.ready(lease) and lease.cached == 16
    cache.manager.leases.release(lease)


def test_what_comes_before_the_invocation_waits_for_its_own_kv_only():
    cache = Cache()
    one = cache.adapter(1, 2)
    cache.run(TALK)
    evict_all(cache.manager)
    lease = cache.leased([*TALK, 5, 5, 8], activated(one, 15))
    adapter, prefix = cache.copies()
    step = 3, 2  # tokens, and those of them before the invocation
    assert cache.manager.leases.gate.readiness(lease, *step) is Readiness.WAIT
    cache.land(prefix)
    assert cache.manager.leases.gate.readiness(lease, 2, 2) is Readiness.AHEAD
    assert not cache.manager.leases.streams([lease])  # such a step reads no adapter
    cache.now += 5.0
    cache.land(adapter)
    assert cache.manager.leases.gate.readiness(lease, *step) is Readiness.READY
    assert lease.adapter_s == 0.0  # it had other things to do
    cache.manager.leases.release(lease)


def test_a_lease_that_has_run_ahead_counts_its_waiting_from_where_it_had_to():
    cache = Cache()
    lease = cache.leased([*TALK, 8], activated(cache.adapter(1, 2), 13))
    assert cache.manager.leases.gate.readiness(lease, 13, 13) is Readiness.AHEAD
    cache.now += 5.0
    cache.manager.leases.gate.stall(lease)
    cache.now += 2.0
    cache.land()
    assert cache.ready(lease, 1) and lease.adapter_s == 2.0
    cache.manager.leases.release(lease)


def test_a_copy_that_a_step_cannot_take_as_it_comes_is_of_use_to_the_next_one():
    cache = Cache(streams=True)
    lease = cache.leased([*TALK, 8], cache.adapter(1, 2))  # 2.1 ms to copy, 1 ms a token
    forecast = cache.manager.forecast
    soon = forecast.arrival_s(lease.adapter)
    assert forecast.usable_s(lease.adapter, 13) == soon > 0, "no step has run yet"
    forecast.step_s = 0.5
    assert forecast.usable_s(lease.adapter, 13) == 0.5, "nobody knows how fast the link is"
    measure(cache.manager.policy.meter)
    assert forecast.usable_s(lease.adapter, 13) == forecast.arrival_s(lease.adapter) < 0.5, "it begins with this step"
    assert forecast.usable_s(lease.adapter, 1) == 0.5, "too short a step"
    (copy,) = cache.copies()
    assert forecast.usable_s(lease.adapter, 13) == 0.5, "the link has not taken it up"
    copy.started = cache.now
    assert forecast.usable_s(lease.adapter, 13) == forecast.arrival_s(lease.adapter) < 0.5
    assert forecast.usable_s(lease.adapter, 1) == 0.5, "too short a step"
    assert forecast.usable_s(lease.adapter, 2) == 0.5
    forecast.busy = True
    assert forecast.usable_s(lease.adapter, 2) == 0.5, "no step has been measured"
    for seconds in (9.0, 0.003):  # the first was held up
        cache.manager.policy.meter.observe_decode(seconds)
        assert cache.manager.policy.meter.decode_s == 0.003 * (seconds < 1)
    assert forecast.usable_s(lease.adapter, 2) < 0.5, "one with a prompt takes no less than one that only decodes"
    cache.manager.policy.meter.decode_s = 0.0011
    assert forecast.usable_s(lease.adapter, 2) < 0.5, "it may wait for 1.8 ms, when the device has done another step"
    forecast.busy = False
    assert forecast.usable_s(lease.adapter, 2) == 0.5
    cache.land()
    assert forecast.usable_s(lease.adapter, 1) == 0
    cache.manager.leases.release(lease)


def test_a_copy_outlasts_computing_as_long_as_it_is_measured_to():
    cache = Cache()
    lease = cache.leased([*TALK, 8], activated(cache.adapter(1, 2), 13))  # 2.1 ms to copy, 1 ms a token
    assert cache.manager.forecast.outlasts(lease.adapter, 2)
    assert not cache.manager.forecast.outlasts(lease.adapter, 3)
    assert not cache.manager.forecast.outlasts(lease.adapter, 0)
    (copy,) = cache.copies()
    copy.started, cache.now = cache.now, cache.now + 0.0015
    assert not cache.manager.forecast.outlasts(lease.adapter, 1)
    cache.land()
    assert not cache.manager.forecast.outlasts(lease.adapter, 1)
    cache.manager.leases.release(lease)


# -- the end of a version -------------------------------------------------------------------------


def test_the_end_of_an_adapter_ends_its_suffixes_and_leaves_the_bases_kv():
    cache = Cache()
    one, two = cache.adapter(1, 2), cache.adapter(2, 1)
    prompt = [*TALK, 8, 8, 8, 8]
    for origin in (activated(one, 13), activated(two, 13), activated(one, 5)):
        cache.run(prompt, origin)
    cache.manager.kill(one)
    assert one.uid not in cache.manager.adapters and not suffixes(one)
    assert cache.run([*prompt, 1], activated(two, 13)) == 16
    assert cache.run([*TALK, 1]) == 12


def test_a_version_in_use_keeps_its_suffixes_until_its_last_lease_and_copy():
    cache = Cache()
    one = cache.adapter(1, 2)
    prompt = [*TALK, 8, 8, 8, 8, 8]
    cache.run(prompt, activated(one, 13))
    lease = cache.leased(prompt, activated(one, 13))
    cache.manager.kill(one)
    assert suffixes(one)
    cache.manager.leases.release(lease)
    assert not suffixes(one) and one.uid not in cache.manager.adapters
    again = cache.adapter(2, 2)  # the same adapter loaded again finds the base's part only
    assert cache.run(prompt, activated(again, 13)) == 12


def test_a_copy_of_a_suffix_holds_its_version_and_one_of_its_prefix_does_not():
    cache = Cache()
    one = cache.adapter(1, 2)
    prompt = [*TALK, 8, 8, 8, 8, 8]
    lease = cache.leased(prompt, activated(one, 13))
    cache.land()
    cache.manager.leases.publish(lease, prompt, len(prompt))
    cache.manager.leases.release(lease)  # written through: the base's part and the suffix apart
    base, own = cache.copies()
    assert (base.adapter, own.adapter) == (cache.manager.base, one)
    cache.manager.kill(one)
    cache.land(base)
    assert one.uid in cache.manager.adapters
    cache.land(own)
    assert one.uid not in cache.manager.adapters and cache.tiers(TALK) == "bbb"


def test_a_flush_drops_suffixes_too():
    cache = Cache()
    one = cache.adapter(1, 2)
    cache.run([*TALK, 8, 8, 8, 8], activated(one, 13))
    cache.manager.flush()
    assert not suffixes(one) and not cache.manager.base.children
    assert cache.manager.device.free == 16 - 2


# -- size and speed -------------------------------------------------------------------------------


def test_a_match_looks_at_each_block_of_the_prompt_once():
    tree = Tree(BLOCK)
    one = AdapterNode(1, 1)
    tokens = list(range(4 * 64))
    for uid in range(2, 200):  # many suffixes hang at one place
        other = Origin(AdapterNode(uid, 1), "", 128)
        grow(tree, other, tokens)
    path = grow(tree, Origin(one, "", 128), tokens)
    looked = 0

    class Counted(dict):
        def get(self, *args):
            nonlocal looked
            looked += 1
            return super().get(*args)

    path[31].children = Counted({node.key: node for node in path[31].branches()})
    assert tree.match(Origin(one, "", 128), tokens, len(tokens)) == path and looked == 1


def test_a_suffix_s_first_node_is_lean():
    tree, one, size = Tree(16), AdapterNode(1, 1), 4000
    tokens = list(range(16))
    tracemalloc.start()
    for i in range(size):
        node = tree.insert(tree.base, Origin(one, "", 3), [i, *tokens[1:]], 0)
        node.device, node.host = (1000 + i,), (5000 + i,)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(one.suffixes) == size and held / size <= 600


def grow(tree: Tree, origin: Origin, tokens: list[int]) -> list[Node]:
    path: list[Node] = []
    for start in range(0, len(tokens), BLOCK):
        path.append(tree.insert(path[-1] if path else tree.top(origin), origin, tokens, start))
        path[-1].device = (1,)
    return path
