"""What seeds have found, each told by hand: it fails without its mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jlora.errors import NotFound, ResourceExhausted, Unavailable
from jlora.sim.world.sites import Shortage
from jlora.types import Request, SamplingParams, TokenEvent
from tests import port
from tests.sim.world._script import Script


def test_an_unload_under_a_pin_that_waits_for_the_disk_gives_the_reader_back():
    """The pin's future has ended when the reading does; that once kept its blocks and its reader for good."""
    world = Script()
    world.load("lora1", lazy=True)
    pinned = world.replica.pin_adapter("lora1", True)
    world.until(lambda: port.reading(world.shelf))
    gone = world.replica.unload_adapter("lora1")
    with pytest.raises(NotFound, match="lora1"):
        world.wait(pinned)
    world.wait(gone)
    world.until(lambda: not port.reading(world.shelf))
    assert not world.manager.reserved and world.manager.host.free == world.manager.host.total
    world.finish()


def test_a_pin_that_waits_for_the_disk_ends_with_the_engine():
    """It once waited for ever."""
    world = Script()
    world.load("lora1", lazy=True)
    pinned = world.replica.pin_adapter("lora1", True)
    world.until(lambda: port.reading(world.shelf))
    closing = world.tasks.start("close", world.replica.close)
    world.until(lambda: closing.ended and not world.tasks.live)
    assert isinstance(pinned.exception(0), Unavailable)


def test_a_replacement_that_finds_no_memory_leaves_the_old_version_in_service(monkeypatch: pytest.MonkeyPatch):
    """Also if memory, not room, was too short; the old version once stayed for good, and had lost its name."""
    world = Script()
    uid = world.load("lora1")
    with monkeypatch.context() as patch:

        def short(node: object) -> None:
            raise Shortage("planted")

        patch.setattr(world.manager, "bring_in", short)
        with pytest.raises(MemoryError):
            world.load("lora1", replace=True)
    assert world.wait(world.replica.adapter("lora1")).uid == uid
    world.wait(world.replica.unload_adapter("lora1"))
    world.finish()


WAITS = 8  # a seed whose requests wait for whole copies


def test_a_failed_copy_ends_its_request_alone_where_memory_is_too_short_to_queue_it_again(
    monkeypatch: pytest.MonkeyPatch,
):
    """The queue's shortage once ended the engine."""
    world = Script(WAITS)
    assert world.replica.info.config.engine.cold_start == "wait"
    world.load("lora1", lazy=True)
    ended: list[TokenEvent] = []
    request = Request("r", tuple(range(7, 20)), SamplingParams(seed=1, max_tokens=2), adapter="lora1")

    def short(*_: object) -> None:
        raise Shortage("planted")

    def fails(ids: Sequence[int], _: object) -> None:
        error = Shortage("planted")
        world.struck.copy(error, ids)
        raise error

    monkeypatch.setattr(world.memory, "stage", fails)
    world.replica.submit(request, ended.extend)
    scheduler: Any = world.parts.scheduler
    world.until(lambda: scheduler.loading)
    monkeypatch.setattr(scheduler.queue, "enqueue", short)
    world.until(lambda: ended)
    assert isinstance(ended[0].error, ResourceExhausted) and not world.over
    monkeypatch.undo()
    world.finish()


SMALL = 4  # a seed of the smallest pool, which adapters and KV share


def test_pins_leave_an_answer_without_a_limit_half_the_pool():
    """It was once taken for one that ended early."""
    world = Script(SMALL)
    assert world.manager.total == 20 and world.context == 40 < world.replica.info.limits.max_len
    for name in ("lora0", "lora1", "lora5"):  # of 2, 4 and 4 blocks
        world.load(name, pinned=name != "lora5")
    events: list[TokenEvent] = []
    request = Request("r", tuple(range(7, 33)), SamplingParams(seed=1, ignore_eos=True), adapter="lora5")
    world.replica.submit(request, events.extend)
    world.until(lambda: events and events[-1].finish_reason)
    assert len(request.prompt) + len(events) == world.context
    world.finish()
