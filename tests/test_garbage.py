"""When Python collects garbage in a server: never a full collection in a step. Counted by generation, not by time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jlora import config
from jlora.ports import ServerGarbage, System
from jlora.types import Request
from tests.engine._replica import Running
from tests.engine.test_engine import BASE, GREEDY, serve

YOUNG, MIDDLE = 50, 4  # thresholds: of objects, and of young collections
FULL = 2  # the oldest generation
ALIVE = 8 * YOUNG * MIDDLE * MIDDLE  # objects that would make Python collect everything more than once


class Collected(NamedTuple):
    """One collection: its generation, its thread, and whether a step of the engine was under way there."""

    generation: int
    thread: str
    in_step: bool


class Watch:
    """A clock that a test moves, and the collections so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen: list[Collected] = []

    def __call__(self) -> float:
        return self.now

    def note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            frame, in_step = sys._getframe(), False
            while frame is not None:
                in_step |= frame.f_code.co_qualname == "Engine.step"
                frame = frame.f_back
            self.seen.append(Collected(info["generation"], threading.current_thread().name, in_step))

    @property
    def full(self) -> list[Collected]:
        return [one for one in self.seen if one.generation == FULL]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """With small thresholds; the collector's state comes back afterwards."""
    thresholds, watch = gc.get_threshold(), Watch()
    gc.set_threshold(YOUNG, MIDDLE, MIDDLE)
    gc.callbacks.append(watch.note)
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch.note)
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_the_loaded_program_is_frozen_and_full_collections_leave_pythons_hands(watch: Watch):
    gc.collect()
    gc.freeze()
    gc.collect()  # Python waits with the next one until the old objects are a quarter more, and now there are none
    grown = [[] for _ in range(ALIVE)]
    assert watch.full, "Python collects everything by itself"
    ServerGarbage(watch).begin()
    assert gc.get_freeze_count() > len(grown)
    assert not any(one is grown for one in gc.get_objects()), "a later collection does not look at it"
    assert gc.get_threshold() == (YOUNG, MIDDLE, ServerGarbage.NEVER)
    watch.seen.clear()
    grown.append([[] for _ in range(ALIVE)])
    assert not watch.full and {one.generation for one in watch.seen} == {0, 1}


def test_a_full_collection_needs_a_pause_of_ten_seconds_or_a_quarter_of_an_hour_of_steps(watch: Watch):
    garbage = ServerGarbage(watch)
    garbage.begin()
    watch.seen.clear()

    def collected(at: float) -> list[str]:
        """Who collected when both were asked at this time, the step's end first."""
        watch.now, found = at, []
        for name, ask in (("step", garbage.after_step), ("idle", garbage.idle)):
            before = len(watch.full)
            ask()
            found += [name] * (len(watch.full) - before)
        return found

    idle, busy = ServerGarbage.IDLE_S, ServerGarbage.BUSY_S
    assert (idle, busy) == (10.0, 900.0)
    assert collected(idle - 0.01) == [] and collected(idle) == ["idle"]
    assert collected(2 * idle - 0.01) == [] and collected(2 * idle) == ["idle"]  # from the last one on

    last, watch.now = 2 * idle, 2 * idle + busy - 0.01
    before = len(watch.full)
    garbage.after_step()
    assert len(watch.full) == before
    assert collected(last + busy) == ["step"]  # none is left for the pause


def test_what_is_young_is_collected_as_ever_and_what_is_old_in_the_pause(watch: Watch):
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.itself = self  # only the collector frees it
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    garbage = ServerGarbage(watch)
    garbage.begin()
    for _ in range(ALIVE):
        Node()
    assert Node.alive < 2 * YOUNG * (MIDDLE + 1), "short-lived cycles do not wait for a full collection"
    old = [Node() for _ in range(YOUNG)]
    gc.collect(0), gc.collect(1)  # it has survived both: only a full collection finds it
    old.clear()
    gc.collect(1)
    assert Node.alive >= YOUNG
    watch.now = ServerGarbage.IDLE_S
    garbage.idle()
    assert Node.alive == 0


def test_steps_of_a_server_make_no_full_collection_and_its_idle_engine_makes_one(watch: Watch, tiny_model: Path):
    settings = {**BASE, "model.path": str(tiny_model)}
    service = Running(config.load(None, settings), System(garbage=ServerGarbage(watch)))
    try:
        assert gc.get_threshold()[FULL] == ServerGarbage.NEVER and gc.get_freeze_count()
        watch.seen.clear()
        for round in range(2):
            serve(service, [Request(f"r{round}{i}", (3, 4, 5 + i), GREEDY) for i in range(8)])
        steps = [one for one in watch.seen if one.in_step]
        assert steps and {one.generation for one in steps} <= {0, 1}
        assert not watch.full, "the clock stands still"

        watch.now += ServerGarbage.IDLE_S
        while not watch.full:  # the engine's thread looks at the clock in each of its rounds
            service.stats()
        service.stop()
        assert watch.full == [Collected(FULL, "jlora-engine", in_step=False)]
    finally:
        service.stop()
