"""What clients are promised while requests run: an end soon after its cause, and a replica that is asked the same.

A client would hardly see the difference: an answer that runs on is a right one, and a model's tokens know no tenant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jlora.sim.world.cluster.asks import Ask, Violation
from jlora.sim.world.cluster.members import router_of
from jlora.types import Request

if TYPE_CHECKING:
    from jlora.sim.world.cluster.world import World

# That a request may take to end, while nothing hinders that: what a router leaves to the replica, and some steps.
LATE_S = 0.6
CARRIED_S = 15.0  # that a request may be on its way to a replica, whose clock starts when it comes
SAME = ("prompt", "sampling", "priority", "tenant", "cache_salt", "bypass_prefix_cache")


def soon(world: World) -> None:
    """A request ends soon after its deadline, and after its client has left; a completion soon after its stop."""
    now = world.time.now
    world.going = [ask for ask in world.going if not ask.over]
    for ask in world.going:
        ask.due = {why: ask.due.get(why, now) for why in _due(world, ask)}
        for why, since in ask.due.items():
            if now - since > LATE_S:
                raise Violation(f"{ask.name} runs on {why}")


def _due(world: World, ask: Ask) -> Iterator[str]:
    """Why it should be over, with nothing in the way just now."""
    if ask.router.loop.stopped:
        return
    deadline = ask.request.deadline
    if deadline is not None and world.time.now > deadline:
        yield "behind its deadline"
    if ask.left:
        yield "without its client"
    for index in ask.stops:
        if not ask.reasons[index] and not _hindered(world, ask):
            yield f"behind the stop of completion {index}"


def _hindered(world: World, ask: Ask) -> bool:
    """Whether its replica may not hear of a stop, or not tell the end."""
    routed = ask.router.router._dispatcher.table.get(ask.accepted)
    if routed is None or not routed.rid:
        return False
    replica = next(one for one in world.replicas if one.name == routed.replica)
    name = f"{routed.rid}@{ask.router.id}."
    if not any(run.request.id.startswith(name) for run in replica.replica.live.values()):
        return True  # it may be reading the adapter
    late = any(stream.down.late for stream in world.net.between(ask.router.name, replica.name))
    return late or not replica.works or world.faults.hinders(ask.router.name, replica.name)


def same(world: World) -> None:
    """A replica runs what the client has asked, as long as the client says."""
    routers = {router.id: router for router in world.routers if router.alive}
    for process in world.replicas:
        for run in list(process.replica.live.values()) if process.alive else ():
            if run.handle <= process.compared:
                continue
            process.compared = run.handle
            router = routers.get(router_of(run.request.id))
            rid = int(run.request.id.partition("@")[0])
            routed = None if router is None else router.router._dispatcher.table.attempt(rid)
            if routed is not None:
                ask = world.asks[int(routed.request.id[1:])]
                for what in _differs(ask.request, run.request):
                    raise Violation(f"{process.name} runs {ask.name} with another {what}")


def _differs(asked: Request, runs: Request) -> Iterator[str]:
    yield from (name for name in SAME if getattr(asked, name) != getattr(runs, name))
    if asked.adapter != (runs.adapter and runs.adapter.rpartition("@")[0]):
        yield "adapter"
    if asked.deadline is None or runs.deadline is None:
        if asked.deadline is not runs.deadline:
            yield "deadline"
    elif not -1e-6 <= runs.deadline - asked.deadline <= CARRIED_S:
        yield "deadline"
