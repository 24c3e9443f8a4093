"""Merging and the adapter's copies: it begins with none that is under way, and ends without one on the host."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jlora.adapters.registry import AdapterRegistry
from jlora.cache.tree import AdapterNode
from jlora.engine.merging import AdapterCost, Merging, Times
from jlora.engine.switching import Switching
from tests import port


class Counted:
    """A merger of four pieces."""

    def __init__(self) -> None:
        self.done, self.pieces, self.host_bytes, self.reloads = 0, 4, 0, 0
        self.piece_s = self.back_s = 0.1
        self.forgotten = self.collected = 0

    def forget(self) -> None:
        self.forgotten += 1

    def forward(self) -> None:
        self.done += 1

    def collect(self) -> None:
        self.collected += 1

    def back(self) -> None:
        self.done -= 1

    def whole(self) -> bool:
        return True


def test_what_is_merged_of_an_adapter_whose_host_copy_leaves_is_taken_out(monkeypatch: pytest.MonkeyPatch):
    merger: Any = Counted()
    policy = Merging(8, 2.0, Times(AdapterCost()))
    none: Any = None
    switching = Switching(policy, merger, AdapterRegistry(), none)
    node = AdapterNode(1, 3)
    node.host = (4, 5, 6)
    port.take_for_measured(switching, node, monkeypatch)
    assert port.advance(switching, 0.42) and merger.done == 2
    node.host = ()
    assert port.advance(switching, 0.1) and merger.done == 1
    assert port.advance(switching, 0.1) and merger.done == 0
    node.host = (7, 8, 9)
    assert port.advance(switching, 0.82) and merger.done == 4
    node.host = ()  # the weights have all of it
    assert port.advance(switching, 0.1) and merger.done == 4 and merger.collected == 1


def test_a_step_waits_for_pieces_for_half_of_its_usual_time(monkeypatch: pytest.MonkeyPatch):
    """So it ends within twice that time, with what else a switch costs it; but one piece goes on in any case."""
    merger: Any = Counted()
    policy = Merging(8, 2.0, Times(AdapterCost()))
    none: Any = None
    switching = Switching(policy, merger, AdapterRegistry(), none)
    node = AdapterNode(1, 3)
    node.host = (4, 5, 6)
    port.take_for_measured(switching, node, monkeypatch)
    assert port.advance(switching, 0.62) and merger.done == 3, "all four would take 0.4 s"
    assert port.advance(switching, 0.01) and merger.done == 4
    port.want(switching, None)
    assert port.advance(switching, 0.31) and merger.done == 1, "others wait: it takes out what fits into a whole step"
    assert port.advance(switching, 0.01) and merger.done == 0


def test_an_adapter_on_its_way_is_merged_when_it_has_landed(monkeypatch: pytest.MonkeyPatch):
    merger: Any = Counted()
    policy = Merging(8, 2.0, Times(AdapterCost()))
    none: Any = None
    switching = Switching(policy, merger, none, none)
    node = AdapterNode(1, 3)
    node.host = (4, 5, 6)
    port.take_for_measured(switching, node, monkeypatch)
    node.coming = True
    assert port.advance(switching, 0.1) and merger.done == 0
    node.coming = False
    assert port.advance(switching, 0.1) and merger.done == 1
    node.coming = True  # it left the device and comes again: it is merged in part, and the host does not help it
    assert port.advance(switching, 0.1) and merger.done == 2


@pytest.mark.parametrize("live,forgotten", [(1, 0), (0, 1)])
def test_a_measurement_for_which_nobody_asks_any_more_gives_its_memory_back(
    monkeypatch: pytest.MonkeyPatch, live: int, forgotten: int
):
    merger: Any = Counted()
    node, none = AdapterNode(1, 3), cast(Any, None)
    policy: Any = SimpleNamespace(refused=set(), live=Counter({node: live}), choose=lambda *_: None)
    switching = Switching(policy, merger, none, none)
    port.take_for_measured(switching, node, monkeypatch)
    switching.decide(0.0)
    switching.decide(0.1)
    assert merger.forgotten == forgotten


def test_taking_out_that_has_begun_goes_on_although_the_policy_would_have_it_merged(monkeypatch: pytest.MonkeyPatch):
    """Else each request of another that is cancelled would cost pieces that no budget has paid."""
    merger: Any = Counted()
    node, none = AdapterNode(1, 3), cast(Any, None)
    node.host = (4, 5, 6)
    chosen, prices = [node], list[float]()
    policy: Any = SimpleNamespace(refused=set(), live=Counter({node: 1}), choose=lambda *_: chosen[-1])
    policy.begun = prices.append
    switching = Switching(policy, merger, AdapterRegistry(), none)
    port.take_for_measured(switching, node, monkeypatch)
    assert port.advance(switching, 0.82) and merger.done == 4
    chosen.append(none)
    switching.decide(0.0)
    assert port.advance(switching, 0.1) and merger.done == 3
    chosen.append(node)
    for left in (2, 1, 0):
        switching.decide(0.1)
        assert switching.busy and port.advance(switching, 0.1) and merger.done == left
    assert len(prices) == 1
    switching.decide(0.2)
    assert port.advance(switching, 0.82) and merger.done == 4
    assert prices == pytest.approx([0.4, 0.4])


def test_the_policy_decides_again_once_the_price_of_an_adapter_is_known():
    merger: Any = Counted()
    node = AdapterNode(1, 3)
    node.host = (4, 5, 6)
    seen = list[float]()
    policy: Any = SimpleNamespace(refused=set(), live=Counter({node: 1}), begun=seen.append)
    policy.choose = lambda now, merged, switch_s: seen.append(switch_s) or (node if switch_s < 1 else None)
    record = SimpleNamespace(projections=(), name="chat", alora_invocation_tokens=())
    registry: Any = SimpleNamespace(live=lambda uid: record, by_uid=lambda uid: record)
    swapper: Any = SimpleNamespace(read=None)
    switching = Switching(policy, merger, registry, swapper)
    port.measured_loss(switching, node)

    def begin(*factors: object) -> None:
        merger.piece_s = merger.back_s = 0.5

    merger.begin = begin
    for _ in range(3):
        switching.decide(0.0)
        assert port.advance(switching, 0.82) and merger.done == 0
    assert seen == pytest.approx([0.4, 2.0, 2.0])
