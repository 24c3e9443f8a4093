"""The tree finds exactly the blocks that hold a prompt's prefix, and forgets them without a trace."""

from __future__ import annotations

import pytest

from jlora.cache.tree import AdapterNode, Node, Origin, Tree

BLOCK = 4


def grown(tree: Tree, adapter: AdapterNode, tokens: list[int], tenant: str = "") -> list[Node]:
    """The nodes of all full blocks of `tokens`, each with a device block."""
    path: list[Node] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        path.append(tree.insert(path[-1] if path else adapter, Origin(adapter, tenant), tokens, start))
        path[-1].device = (1,)
    return path


@pytest.fixture
def tree() -> Tree:
    return Tree(BLOCK)


@pytest.fixture
def adapter() -> AdapterNode:
    return AdapterNode(uid=1, size=2)


def test_a_prompt_is_found_up_to_its_last_full_block_within_the_limit(tree: Tree, adapter: AdapterNode):
    path = grown(tree, adapter, list(range(11)))
    assert len(path) == 2
    assert tree.match(Origin(adapter), list(range(11)), limit=10) == path
    assert tree.match(Origin(adapter), list(range(8)), limit=7) == path[:1]
    assert tree.match(Origin(adapter), [0, 1, 2, 3, 9, 5, 6, 7, 8], limit=8) == path[:1]
    assert tree.match(Origin(adapter), [9, *range(10)], limit=10) == []


def test_two_prompts_share_what_is_equal_and_split_at_a_block(tree: Tree, adapter: AdapterNode):
    first, second = grown(tree, adapter, [1] * 12), grown(tree, adapter, [1] * 8 + [2] * 4)
    assert first[:2] == second[:2] and first[2] is not second[2]
    assert set(first[1].branches()) == {first[2], second[2]}
    assert tree.match(Origin(adapter), [1] * 8 + [2] * 5, limit=12) == second


def test_a_branch_marks_everything_above_it_as_shared_and_nothing_below(tree: Tree, adapter: AdapterNode):
    first = grown(tree, adapter, [1] * 12)
    assert not any(node.shared for node in first)
    second = grown(tree, adapter, [1] * 8 + [2] * 4)
    assert [node.shared for node in first] == [True, True, False] and not second[2].shared


class Colliding(str):
    """A salt whose hash is that of all others."""

    def __hash__(self) -> int:
        return 1


def test_equal_hashes_are_no_match(tree: Tree, adapter: AdapterNode):
    salts = [Colliding(f"tenant {i}") for i in range(5)]
    assert len({hash((salt, b"")) for salt in salts}) == 1
    paths = [grown(tree, adapter, [1] * 8, tenant=salt) for salt in salts[:4]]
    assert [tree.match(Origin(adapter, salt), [1] * 9, limit=8) for salt in salts] == [*paths, []]
    assert len({id(path[0]) for path in paths}) == 4


def test_tenants_and_adapters_have_trees_of_their_own(tree: Tree, adapter: AdapterNode):
    other = AdapterNode(uid=2, size=2)
    grown(tree, adapter, [1] * 8, tenant="a")
    for node, tenant in ((adapter, "b"), (adapter, ""), (other, "a")):
        assert tree.match(Origin(node, tenant), [1] * 9, limit=8) == []
    assert len(tree.match(Origin(adapter, "a"), [1] * 9, limit=8)) == 2


def test_a_match_ends_where_data_is_missing_and_counts_what_is_on_the_host_or_on_its_way(
    tree: Tree, adapter: AdapterNode
):
    path = grown(tree, adapter, [1] * 16)
    path[1].device, path[1].host = (), (1,)
    path[2].coming, path[2].host = True, (2,)
    assert tree.match(Origin(adapter), [1] * 17, limit=16) == path
    path[3].device, path[3].host, path[3].saving = (), (3,), True  # a host copy that is not complete
    assert tree.match(Origin(adapter), [1] * 17, limit=16) == path[:3]
    path[1].host = ()
    assert tree.match(Origin(adapter), [1] * 17, limit=16) == path[:1]


def test_a_removed_leaf_is_gone_and_its_siblings_are_not(tree: Tree, adapter: AdapterNode):
    paths = [grown(tree, adapter, [1] * 4 + [letter] * 4) for letter in (2, 3, 4)]
    above = paths[0][0]
    for left in (2, 1, 0):
        leaf, stamp = paths[left][1], paths[left][1].stamp
        assert tree.remove(leaf) is above
        assert leaf.parent is None and leaf.stamp > stamp  # entries of it in orders are stale
        found = [len(tree.match(Origin(adapter), [1] * 4 + [letter] * 5, limit=8)) for letter in (2, 3, 4)]
        assert found == [2] * left + [1] * (3 - left)
    assert above.children is None


def test_nothing_is_removed_that_is_used_or_has_something_below(tree: Tree, adapter: AdapterNode):
    path = grown(tree, adapter, [1] * 8)
    with pytest.raises(AssertionError):
        tree.remove(path[0])
    path[1].users = 1
    with pytest.raises(AssertionError):
        tree.remove(path[1])


def test_below_gives_every_node_once_parents_first(tree: Tree, adapter: AdapterNode):
    nodes = {node for letter in (1, 2, 3) for node in grown(tree, adapter, [1] * 4 + [letter] * 8)}
    found = list(tree.below(adapter))
    assert len(found) == len(nodes) == 7 and set(found) == nodes
    assert all(node.parent is adapter or found.index(node.parent) < found.index(node) for node in found)
