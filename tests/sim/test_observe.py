"""What observers say of a replica is what its tree holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.cache import inspect
from jlora.cache.manager import CacheManager
from jlora.cache.tree import LEAVING, AdapterNode, Node
from jlora.sim.observe import SPARSE, Series
from jlora.sim.replay import Replay, start_of
from jlora.sim.replica import Replica
from tests.sim._sim import chats, replica_of, sized


def usable(node: Node) -> bool:
    """Whether everything above a node is on the device."""
    above = node.parent
    while above is not None and (above.device or (isinstance(above, AdapterNode) and not above.size)):
        above = above.parent
    return above is None


def counted(manager: CacheManager) -> int:
    """Invalid KV node by node, from below."""
    nodes = [node for adapter in manager.adapters.values() for node in manager.tree.below(adapter)]
    return sum(bool(n.device) and n.standing != LEAVING and not usable(n) for n in nodes)


class Recount:
    """Counts invalid KV after every event, in both ways."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def __call__(self, replica: Replica) -> None:
        """Raises AssertionError if they differ."""
        self.found.append(inspect.invalid_kv(replica.manager))
        assert self.found[-1] == counted(replica.manager)


@pytest.mark.parametrize("policy", ["vllm", "vllm-fair", "fastlibra-wom", "jlora"])
def test_invalid_kv_is_what_lies_below_something_that_is_not_on_the_device(policy: str):
    trace, recount = chats(sessions=24, turns=3, adapters=6, seed=3, rate=8.0), Recount()
    spec = replace(sized(device=48, host=200), adapters=(4, 2, 4, 2, 4, 2))
    Replay(replica_of(spec, policy), trace, [recount]).run()
    assert (max(recount.found) > 0) == (policy != "jlora")


def test_a_series_counts_invalid_kv_now_and_then_where_that_walks_the_tree():
    trace = chats(sessions=24, turns=3, adapters=6, seed=3, rate=8.0)
    spec = replace(sized(device=48, host=200), adapters=(4, 2, 4, 2, 4, 2))
    series = Series(start_of(trace), 0.05)
    Replay(replica_of(spec, "fastlibra-wom"), trace, [series]).run()
    assert max(series.invalid_kv) > 0
    for at, value in enumerate(series.invalid_kv):
        assert value == series.invalid_kv[at - at % SPARSE]
