"""The orders of candidates give what a sort would give, through every touch and however much is stale."""

from __future__ import annotations

import itertools
import random

import pytest

from jlora.cache.order import Order
from jlora.cache.tree import Node


def node() -> Node:
    return Node(None, b"")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("nodes, most", [(40, 5), (300, 60), (300, 8)])
def test_it_agrees_with_a_sort_through_random_touches_and_losses(sign: int, nodes: int, most: int):
    """Equal keys come in the order they were pushed; more are asked for than stay in order, and fewer."""
    draw, turn = random.Random(nodes + most), itertools.count()
    lost: set[Node] = set()
    order = Order(lambda n: n not in lost, sign)
    keys: dict[Node, tuple[int, int]] = {}

    def touch(each: Node) -> None:
        each.stamp += 1
        keys[each] = draw.randint(0, 50), next(turn)
        order.push(each, keys[each][0])

    for _ in range(nodes):
        touch(node())
    for _ in range(1500):
        if not keys:
            break
        each = draw.choice(list(keys))
        if draw.random() < 0.1:
            lost.add(each)
            del keys[each]
        else:
            touch(each)
        expected = sorted(keys, key=lambda n: (sign * keys[n][0], keys[n][1]))
        count = draw.randint(1, most)
        assert order.first(count) == expected[:count]
    assert order.first(nodes) == sorted(keys, key=lambda n: (sign * keys[n][0], keys[n][1]))


def test_looking_takes_nothing_out():
    order = Order(lambda n: True)
    nodes = [node() for _ in range(5)]
    for key, each in enumerate(nodes):
        order.push(each, key)
    assert order.first(3) == order.first(3) == nodes[:3] and order.first(9) == nodes
    assert len(order) == 5


def test_equal_keys_come_in_the_order_they_were_pushed():
    order = Order(lambda n: True)
    nodes = [node() for _ in range(10)]
    for each in nodes:
        order.push(each, 1.0)
    assert order.first(10) == nodes


def test_stale_entries_never_outgrow_the_candidates():
    order = Order(lambda n: True)
    nodes = [node() for _ in range(100)]
    for turn in range(200):
        for each in nodes:
            each.stamp += 1
            order.push(each, turn)
        assert len(order) <= 2 * len(nodes) + 65
    assert len(order.first(1000)) == 100


def test_an_empty_order_has_no_first():
    order = Order(lambda n: False)
    assert order.first(1) == order.first(3) == []
    order.push(node(), 1.0)
    assert order.first(1) == order.first(3) == []
