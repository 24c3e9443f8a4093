"""Errors inside the engine's step: at its seams, the calls between its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jlora.cache.inspect import cells
from jlora.cache.lease import Lease
from jlora.engine.ports import Parts
from jlora.sim.world.sites import Planted, Shortage, Site, Sites
from jlora.sim.world.struck import Struck

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
    "plan.nobody": Site("an error in planning that is due to nobody", 0.015, ends=True, rare=0.5),
}

# Whom a fault in a call with these arguments strikes: the handle of a request, or nobody known.
Whom = Callable[[tuple[Any, ...]], int | None]


def plant(parts: Parts, sites: Sites, struck: Struck) -> None:
    """Lets the sites strike in the parts of an engine, and says whom they strike."""
    scheduler: Any = parts.scheduler
    manager = scheduler.manager
    leases, device = manager.leases, cells(manager).device

    def planned(args: tuple[Any, ...]) -> int | None:
        """Whose turn it is."""
        return None if scheduler.suspect is None else scheduler.suspect.handle

    def owner(args: tuple[Any, ...]) -> int | None:
        """Whose lease it is."""
        lease: Lease = args[0]
        return next((s.handle for s in (*scheduler.running, *scheduler.loading) if s.lease is lease), None)

    for name, thing, method in (
        ("plan.grow", leases, "grow"),
        ("plan.acquire", leases, "acquire"),
        ("plan.streams", leases, "streams"),
        ("plan.copies", manager, "take_copies"),
        ("plan.take", device, "take"),
        ("plan.tend", manager, "tend"),
        ("queue.enter", scheduler.queue, "enqueue"),
    ):
        _before(thing, method, _raiser(sites, struck, name, Shortage, planned))
    _before(leases, "publish", _raiser(sites, struck, "commit.publish", Planted, owner))
    _before(leases, "grow", _raiser(sites, struck, "plan.guilty", Planted, planned))
    _before(leases, "streams", _raiser(sites, struck, "plan.nobody", Planted, planned))


def _raiser(
    sites: Sites, struck: Struck, name: str, error: Callable[[str], Exception], whom: Whom
) -> Callable[[tuple[Any, ...]], None]:
    """Asks a site, and raises its error."""

    def ask(args: tuple[Any, ...]) -> None:
        if sites.fires(name):
            if (handle := whom(args)) is not None:
                struck.request(handle)
            raise error(name)

    return ask


def _before(thing: Any, method: str, ask: Callable[[tuple[Any, ...]], None]) -> None:
    """Each call of the method asks the site first."""
    real = getattr(thing, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        ask(args)
        return real(*args, **kwargs)

    setattr(thing, method, call)
