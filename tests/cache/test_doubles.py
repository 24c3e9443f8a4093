"""Which copies on the host are given up first when it is full."""

from __future__ import annotations

from jlora.cache.doubles import Doubles
from jlora.cache.policies import Policy
from jlora.cache.transfer import Meter
from jlora.cache.tree import KV, AdapterNode, Node
from tests.cache._books import check_idle
from tests.cache._cache import A, B, C, Cache, D


class Flat(Policy):
    """KV leaves in order of use, one kind of two heaps, and is worth as much as is said."""

    def __init__(self, worth: dict[Node, float]):
        super().__init__(Meter(1e-3, 1.0))
        self.worth = worth

    def key(self, node: Node) -> tuple[int, float]:
        return int(node.shared), node.last_use

    def value(self, node: Node, now: float) -> float:
        return self.worth[node]


def double(worth: dict[Node, float], last_use: float, value: float, shared: bool = False) -> Node:
    node = Node(None, b"")
    node.device, node.host, node.last_use, node.shared = (1,), (2,), last_use, shared
    worth[node] = value
    return node


def doubles(worth: dict[Node, float], lookahead: int = 0) -> Doubles:
    policy = Flat(worth)
    policy.lookahead = lookahead or policy.lookahead
    found = Doubles(policy, lambda: 10.0)
    for node in worth:
        found.push(node)
    return found


def test_of_idle_kv_goes_what_leaves_the_device_last_whatever_it_is_worth_at_this_moment():
    worth: dict[Node, float] = {}
    old, young = double(worth, 1.0, 0.9), double(worth, 9.0, 0.1)
    found = doubles(worth)
    assert found.first(saved=old) is young and found.first(saved=young) is None


def test_between_heaps_worth_decides():
    worth: dict[Node, float] = {}
    crowd, own = double(worth, 1.0, 0.5, shared=True), double(worth, 9.0, 0.4)
    found = doubles(worth)
    assert found.first(saved=own) is crowd
    crowd.host = ()
    assert found.first(saved=crowd) is None and found.first(saved=None) is own


def test_what_is_in_use_goes_before_all_that_is_idle_and_only_as_long_as_it_is():
    worth: dict[Node, float] = {}
    used, idle = double(worth, 1.0, 0.1), double(worth, 9.0, 0.9)
    found = doubles(worth)
    used.users = 1
    found.push(used)
    assert found.first(saved=idle) is used and found.first(saved=None) is used
    used.users = 0
    found.push(used)
    assert found.first(saved=None) is idle


def test_what_has_changed_since_is_passed():
    worth: dict[Node, float] = {}
    nodes = [double(worth, 1.0, 0.5) for _ in range(4)]
    for node in nodes[:3]:
        node.users = 1
    found = doubles(worth)
    nodes[0].host, nodes[1].device, nodes[2].saving = (), (), True
    assert found.first(None) is nodes[3]
    nodes[3].host = ()
    assert found.first(None) is None


def test_adapters_have_their_only_master_copy_on_the_host():
    adapter = AdapterNode(1, 2)
    adapter.device, adapter.host = (1, 2), (3, 4)
    assert doubles({adapter: 1.0}).first(None) is None


def test_the_host_gives_the_place_of_what_is_in_use_to_what_may_leave():
    cache = Cache(device=16, host=4)
    cache.run(A)
    cache.run(B)  # the host is full
    cache.run(C)
    assert [cache.tiers(x) for x in (A, B, C)] == ["bb", "bb", "dd"]
    lease = cache.leased(A)
    cache.tend()
    cache.land()
    assert [cache.tiers(x) for x in (A, B, C)] == ["dd", "bb", "bb"]
    cache.manager.leases.release(lease)
    cache.run(B)
    cache.run(C)
    cache.tend()
    cache.land()
    assert cache.tiers(A) == "bb"  # it has come to be the coldest
    check_idle(cache.manager)


def test_kv_that_is_computed_again_may_lose_the_copy_it_had():
    cache = Cache(device=16, host=2)
    cache.run(A)
    cache.drop_from_device(A)
    cache.manager.policy.meter.token_s = 1e-9  # computing is cheap: the copy is not used
    lease = cache.leased(A)
    cache.manager.leases.publish(lease, A, 9)
    assert cache.tiers(A) == "bb"
    assert cache.cells.make_host_room(2)
    assert cache.tiers(A) == "dd" and cache.manager.counters.blocks_lost == 0


def test_the_last_to_leave_is_found_though_it_is_worth_least_among_the_first():
    worth: dict[Node, float] = {}
    old, young = double(worth, 1.0, 0.9), double(worth, 9.0, 0.1)
    saved = double(worth, 5.0, 0.5)
    saved.host = ()
    found = doubles(worth, lookahead=2)  # as of policies whose worth does not fall with age
    assert found.first(saved) is young
    young.host = ()
    assert found.first(saved) is None and old.host


def test_what_the_queue_needs_outstays_what_nobody_waits_for():
    worth: dict[Node, float] = {}
    needed, saved = double(worth, 1.0, 0.1), double(worth, 9.0, 0.9)
    saved.host, needed.wanted = (), (1,)
    found = doubles(worth)
    assert found.first(saved) is needed
    saved.wanted = (1,)
    assert found.first(saved) is None


def test_a_request_that_asks_takes_no_copy_from_its_own_prefix():
    cache = Cache(device=20, host=2, policy="vllm")
    cache.run(A)
    cache.cells.make_room(kv=cache.cells.room(KV) + 2)  # writes A out
    cache.land()
    cache.run(A)
    for prompt in (B, C, D):
        cache.run(prompt)
    assert [cache.tiers(x) for x in (A, B, C, D)] == ["bb", "dd", "dd", "dd"]
    cache.lease([*A[:8], *([9] * 4 * (cache.cells.room(KV) + 2))])
    assert cache.tiers(A) == "bb"
