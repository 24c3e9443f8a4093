"""Errors inside the engine's step: at its seams, the calls between its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jlora.cache.inspect import cells
from jlora.engine.ports import Parts
from jlora.sim.world.sites import Planted, Shortage, Site, Sites

SITES = {
    "plan.grow": Site("memory is too short for a decoding sequence's next block", 0.02),
    "plan.acquire": Site("memory is too short for a lease", 0.06),
    "plan.streams": Site("memory is too short for the list of streamed copies", 0.02),
    "plan.copies": Site("memory is too short for the list of copies", 0.02),
    "plan.take": Site("memory is too short to take blocks", 0.02),
    "plan.tend": Site("memory is too short for the monitor", 0.02),
    "queue.enter": Site("memory is too short to queue a sequence", 0.02),
    "commit.publish": Site("an error in taking in a sequence's step", 0.01),
    "plan.guilty": Site("an error in planning a sequence", 0.005),
    "plan.nobody": Site("an error in planning that is due to nobody", 0.01, ends=True, rare=0.5),
}


def plant(parts: Parts, sites: Sites) -> None:
    """Lets the sites strike in the parts of an engine."""
    scheduler: Any = parts.scheduler
    manager = scheduler.manager
    leases, device = manager.leases, cells(manager).device
    for name, thing, method in (
        ("plan.grow", leases, "grow"),
        ("plan.acquire", leases, "acquire"),
        ("plan.streams", leases, "streams"),
        ("plan.copies", manager, "take_copies"),
        ("plan.take", device, "take"),
        ("plan.tend", manager, "tend"),
        ("queue.enter", scheduler.queue, "enqueue"),
    ):
        _before(thing, method, name, sites, Shortage)
    _before(leases, "publish", "commit.publish", sites, Planted)
    _before(leases, "grow", "plan.guilty", sites, Planted)
    _before(leases, "streams", "plan.nobody", sites, Planted)


def _before(thing: Any, method: str, name: str, sites: Sites, error: Callable[[str], Exception]) -> None:
    """Each call of the method asks the site first."""
    real = getattr(thing, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if sites.fires(name):
            raise error(name)
        return real(*args, **kwargs)

    setattr(thing, method, call)
