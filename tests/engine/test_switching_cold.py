"""Merging and the adapter's copies: it begins with none that is under way, and ends without one on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jlora.adapters.registry import AdapterRegistry
from jlora.cache.tree import AdapterNode
from jlora.engine.merging import AdapterCost, Merging, Times
from jlora.engine.plan import NOTHING
from jlora.engine.ports import Loss, Price
from jlora.engine.switching import Switching
from tests import port


class Counted:
    """A merger of four pieces."""

    def __init__(self) -> None:
        self.done, self.pieces, self.host_bytes, self.reloads = 0, 4, 0, 0
        self.seconds = 0.1
        self.forgotten = self.collected = 0

    def price(self, projections: Sequence[str], lost: float) -> Price:
        return Price(self.seconds, self.seconds * (1 + 9 * lost))

    def begin(self, *factors: object) -> None:
        pass

    def measure(self) -> Loss:
        return Loss(1.0, 1.0)

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
    switching = Switching(policy, merger, AdapterRegistry(), none)
    node = AdapterNode(1, 3)
    node.host = (4, 5, 6)
    port.take_for_measured(switching, node, monkeypatch)
    node.coming = True
    assert port.advance(switching, 0.1) and merger.done == 0
    node.coming = False
    assert port.advance(switching, 0.1) and merger.done == 1
    node.coming = True  # it left the device and comes again: it is merged in part, and the host does not help it
    assert port.advance(switching, 0.1) and merger.done == 2


class Script:
    """A policy that chooses what it is told, and notes what it is asked and what switches cost."""

    def __init__(self, live: Counter[AdapterNode], chosen: AdapterNode | None, most_s: float = 1e9):
        self.live, self.chosen, self.most_s = live, chosen, most_s
        self.refused = set[int]()
        self.asked, self.costs = list[float](), list[float]()

    def most_asked(self) -> AdapterNode | None:
        return next(iter(self.live), None)

    def choose(self, now: float, merged: AdapterNode | None, switch_s: float) -> AdapterNode | None:
        self.asked.append(switch_s)
        return self.chosen if switch_s < self.most_s else None

    def spent(self, seconds: float) -> None:
        self.costs.append(seconds)


NODE, OTHER = AdapterNode(1, 3), AdapterNode(2, 3)


@pytest.mark.parametrize("live,forgotten", [((NODE,), 0), ((), 0), ((OTHER,), 1)])
def test_a_measurement_gives_its_memory_back_once_others_ask_and_nobody_asks_for_its_adapter(
    live: tuple[AdapterNode, ...], forgotten: int, monkeypatch: pytest.MonkeyPatch
):
    merger: Any = Counted()
    policy: Any = Script(Counter(live), None)
    switching = Switching(policy, merger, AdapterRegistry(), cast(Any, None))
    port.take_for_measured(switching, NODE, monkeypatch)
    switching.decide(0.0)
    switching.decide(0.1)
    assert merger.forgotten == forgotten


@pytest.mark.parametrize("end", ["known", "others", "another", "short"])
def test_a_measurement_is_paid_when_it_ends_or_is_given_up(end: str):
    merger: Any = Counted()
    nodes = AdapterNode(1, 3), AdapterNode(2, 3)
    for node in nodes:
        node.host = (4, 5, 6)
    losses = [None, None, None]
    merger.measure = lambda: losses.pop()
    policy: Any = Script(Counter(nodes), nodes[0])
    record = SimpleNamespace(projections=("q",), name="chat", alora_invocation_tokens=())
    registry: Any = SimpleNamespace(live=lambda uid: record, by_uid=lambda uid: record)
    switching = Switching(policy, merger, registry, cast(Any, SimpleNamespace(read=None)))
    for _ in range(2):
        switching.decide(0.0)
        assert port.advance(switching, 0.1)
    assert sum(policy.costs) == 0 and len(losses) == 1
    pieces = 2
    if end == "known":
        losses[0], pieces = cast(Any, Loss(1.0, 0.0)), 3
    elif end == "others":
        policy.live, policy.chosen = Counter(nodes[1:]), None
    elif end == "another":
        policy.chosen = nodes[1]
    else:
        losses.clear()
        merger.measure, pieces = _short, 3
    switching.decide(0.0)
    port.advance(switching, 0.1)
    assert sum(policy.costs) == pytest.approx(0.1 * pieces)


def _short() -> Loss:
    raise MemoryError


@pytest.mark.parametrize("away", ["dying", "gone"])
def test_a_measurement_of_what_leaves_gives_its_memory_back_although_nobody_asks(
    away: str, monkeypatch: pytest.MonkeyPatch
):
    merger: Any = Counted()
    node = AdapterNode(1, 3)
    setattr(node, away, True)
    policy: Any = Script(Counter(), None)
    switching = Switching(policy, merger, AdapterRegistry(), cast(Any, None))
    port.take_for_measured(switching, node, monkeypatch)
    switching.decide(0.0)
    assert merger.forgotten == 1


def leaving(monkeypatch: pytest.MonkeyPatch) -> tuple[Switching, Any, Any]:
    """An adapter of whose four pieces one has been taken out, with its merger and its policy."""
    merger: Any = Counted()
    node = AdapterNode(1, 3)
    node.host = (4, 5, 6)
    policy: Any = Script(Counter((node,)), None)
    switching = Switching(policy, merger, AdapterRegistry(), cast(Any, None))
    port.take_for_measured(switching, node, monkeypatch)
    assert port.advance(switching, 0.82) and merger.done == 4
    switching.decide(0.0)
    assert port.advance(switching, 0.1) and merger.done == 3
    policy.chosen = node
    return switching, merger, policy


def test_taking_out_that_has_begun_goes_on_although_the_policy_would_have_it_merged(monkeypatch: pytest.MonkeyPatch):
    """Else each request of another that is cancelled would cost pieces both ways."""
    switching, merger, policy = leaving(monkeypatch)
    for left in (2, 1, 0):
        switching.decide(0.1)
        assert switching.busy and port.advance(switching, 0.1) and merger.done == left
    assert policy.costs == pytest.approx(8 * [0.1]), "each piece, in and out"
    switching.decide(0.2)
    assert port.advance(switching, 0.82) and merger.done == 4


def test_weights_that_are_loaded_anew_while_an_adapter_is_taken_out_can_be_merged_into(monkeypatch: pytest.MonkeyPatch):
    switching, merger, _ = leaving(monkeypatch)
    merger.done = 0  # memory was short for an integrity check
    switching.decide(0.0)
    assert port.advance(switching, 0.82) and merger.done == 4


def test_the_policy_decides_again_once_the_loss_of_an_adapter_is_known():
    """The more is lost, the longer it takes to take out."""
    merger: Any = Counted()
    node = AdapterNode(1, 3)
    node.host = (4, 5, 6)
    policy: Any = Script(Counter((node,)), node, most_s=1.0)
    record = SimpleNamespace(projections=("q",), name="chat", alora_invocation_tokens=())
    registry: Any = SimpleNamespace(live=lambda uid: record, by_uid=lambda uid: record)
    switching = Switching(policy, merger, registry, cast(Any, SimpleNamespace(read=None)))
    for _ in range(3):
        switching.decide(0.0)
        assert port.advance(switching, 0.82) and merger.done == 0
    assert policy.asked == pytest.approx([0.4, 2.2, 2.2]) and sum(policy.costs) == pytest.approx(0.1)


def test_each_adapter_has_a_price_of_its_own():
    merger: Any = Counted()
    merger.price = lambda projections, lost: Price(0.1 * len(projections), 0.1)
    nodes = [AdapterNode(uid, 3) for uid in (1, 2)]
    policy: Any = Script(Counter(nodes), None)
    registry: Any = SimpleNamespace(live=lambda uid: SimpleNamespace(projections=uid * ("q",)))
    switching = Switching(policy, merger, registry, cast(Any, None))
    switching.decide(0.0)
    policy.live = Counter(nodes[1:])
    switching.decide(0.1)
    assert policy.asked == pytest.approx([0.4, 0.6])


def test_a_step_that_waited_for_a_copy_counts_but_teaches_nothing():
    policy, merger = Merging(8, 2.0, Times(AdapterCost())), cast(Any, Counted())
    switching = Switching(policy, merger, AdapterRegistry(), cast(Any, None))
    work = SimpleNamespace(sequence=SimpleNamespace(adapter=NODE))
    plan: Any = SimpleNamespace(work=[work], decode=[work], prefill=[], merged=NOTHING)
    ran = list[float]()
    policy.ran = lambda share, seconds: ran.append(seconds)
    switching.observe(plan, 5.0, stalled=True)
    assert policy.times.step_s(False, 1, NODE.size) is None
    switching.observe(plan, 0.02, stalled=False)
    assert policy.times.step_s(False, 1, NODE.size) == 0.02 and ran == [5.0, 0.02]
