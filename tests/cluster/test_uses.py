"""Which versions stay while routers are away."""

from __future__ import annotations

import pytest

from jlora.cluster.uses import Uses
from tests.cluster import _port as port


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_router_whose_stream_has_ended_keeps_its_versions_for_a_while(clock: Clock):
    uses, dropped = Uses(0, 30, clock), []
    clock.now += 30
    uses.saw("stream", "r", 5, ["a@1"])
    uses.left("stream")
    uses.retire("a@1", 4, lambda: dropped.append("a@1"))
    uses.retire("b@2", 6, lambda: dropped.append("b@2"))  # current in the table that the router has
    clock.now += 29
    uses.look()
    assert not dropped and uses.holds("a@1") and uses.holds("b@2")
    clock.now += 1
    uses.look()
    assert dropped == ["a@1", "b@2"] and not uses.holds("a@1")


def test_a_router_that_stops_keeps_nothing(clock: Clock):
    uses, dropped = Uses(0, 30, clock), []
    uses.saw("before", "r", 5, ["a@1"])
    uses.left("before")
    uses.saw("stream", "r", 0, [])
    uses.saw("other", "s", 5, ["b@2"])
    uses.retire("a@1", 4, lambda: dropped.append("a@1"))
    uses.retire("b@2", 4, lambda: dropped.append("b@2"))
    uses.retire("c@3", 5, lambda: dropped.append("c@3"))
    uses.leaves("r")
    assert dropped == ["a@1", "c@3"] and uses.holds("b@2")


def test_the_end_of_an_old_stream_takes_nothing_from_the_new_one(clock: Clock):
    uses, dropped = Uses(0, 30, clock), []
    uses.saw("old", "r", 5, ["a@1"])
    uses.saw("new", "r", 0, [])
    uses.saw("new", "r", 5, ["a@1"])
    uses.left("old")
    clock.now += 60
    uses.look()
    uses.retire("a@1", 4, lambda: dropped.append("a@1"))
    assert not dropped and uses.holds("a@1")
    uses.saw("new", "r", 5, [])
    assert dropped == ["a@1"]


def test_a_router_that_comes_back_says_all_that_it_uses(clock: Clock):
    uses, dropped = Uses(0, 30, clock), []
    uses.saw("old", "r", 5, ["a@1"])
    uses.retire("a@1", 4, lambda: dropped.append("a@1"))
    uses.left("old")
    uses.saw("new", "r", 0, [])
    assert not dropped
    uses.saw("new", "r", 5, [])
    assert dropped == ["a@1"]


def test_a_table_is_known_once_every_router_that_follows_has_it(clock: Clock):
    uses, known = Uses(0, 30, clock), []
    uses.tell(2, lambda: known.append("alone"))
    uses.saw("one", "r1", 2, [])
    uses.saw("two", "r2", 2, [])
    uses.tell(3, lambda: known.append(3))
    uses.tell(4, lambda: known.append(4))
    uses.saw("one", "r1", 4, [])
    assert known == ["alone"]
    uses.saw("two", "r2", 3, [])
    assert known == ["alone", 3]
    uses.left("two")  # it begins again with the whole table
    assert known == ["alone", 3, 4]


def test_after_a_restart_nothing_is_dropped_before_routers_can_have_said_what_they_use(clock: Clock):
    uses, dropped = Uses(7, 30, clock), []
    assert uses.holds("gone@3")
    uses.retire("a@7", 2, lambda: dropped.append("a@7"))
    uses.retire("b@8", 3, lambda: dropped.append("b@8"))  # no router of before can know it
    assert dropped == ["b@8"]
    clock.now += 30
    uses.look()
    assert dropped == ["b@8", "a@7"] and not uses.holds("gone@3")


def test_an_end_looks_at_its_own_version_alone(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    """Thousands of old versions may wait for a router; every request of every adapter ends on the event loop."""
    uses, dropped, looked = Uses(0, 0, clock), [], list[str]()
    uses.saw("stream", "r", 1, [])
    for number in range(1, 101):
        key = f"a@{number}"
        uses.begin(key)
        uses.retire(key, 1, lambda key=key: dropped.append(key))
    uses.begin("b@101")
    seam = port.looks_at()
    real = getattr(*seam)

    def look(of: Uses, key: str, epoch: int) -> bool:
        looked.append(key)
        return real(of, key, epoch)

    monkeypatch.setattr(*seam, look)
    uses.end("b@101")
    uses.end("a@7")
    assert looked == dropped == ["a@7"]
