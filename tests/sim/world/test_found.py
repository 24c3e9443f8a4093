"""What seeds have found, each told by hand: it fails without its mend."""

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest

from jlora.sim.world.sites import Shortage
from tests.sim.world._script import Script


def test_an_unload_under_a_pin_that_waits_for_the_disk_gives_the_reader_back():
    """The pin's future has ended when the reading does; that once kept its blocks and its reader for good."""
    world = Script()
    world.load("lora1", lazy=True)
    pinned = world.replica.pin_adapter("lora1", True)
    world.until(lambda: world.shelf._under_way)
    gone = world.replica.unload_adapter("lora1")
    with pytest.raises(CancelledError):
        world.wait(pinned)
    world.wait(gone)
    world.until(lambda: not world.shelf._under_way)
    assert not world.manager.reserved and world.manager.host.free == world.manager.host.total
    world.finish()


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
