"""A world without faults, whose commands a test gives by hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from jlora.engine.shelf import Shelf
from jlora.sim.world.disk import versions
from jlora.sim.world.replica import World
from jlora.sim.world.report import Journal
from tests import port

T = TypeVar("T")


class Script(World):
    """A replica whose tasks go on only as the test says."""

    def __init__(self, seed: int = 0):
        super().__init__(seed, Journal())
        self.sites.heal()
        for number, version in enumerate(versions()):
            self.disk.put(f"lora{number}", version)

    @property
    def shelf(self) -> Shelf:
        return port.engine(self.replica).adapters.shelf

    def until(self, done: Callable[[], object]) -> None:
        """Lets tasks go on until something holds."""
        last = self.tasks.turns + 20_000
        while not done():
            assert self.tasks.turns < last, "it never comes"
            self.turn()

    def wait(self, future: Future[T]) -> T:
        self.until(future.done)
        return future.result()

    def load(self, name: str, **how: Any) -> int:
        """Loads an adapter from the directory of its name; its uid."""
        uid = self.wait(self.replica.load_adapter(name, name, **how)).uid
        self.clients.loaded.add(uid)
        return uid
