"""What must hold in a modelled service: cheap looks with every step, and nothing left at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jlora.cluster.attach import BEAT_S
from jlora.cluster.link import BEATS, LOOK_S
from jlora.cluster.requests import MOST_MOVES
from jlora.cluster.view import Held
from jlora.sim.world.cluster import promised
from jlora.sim.world.cluster.asks import Violation
from jlora.sim.world.cluster.members import ReplicaProcess, RouterProcess, router_of

if TYPE_CHECKING:
    from jlora.sim.world.cluster.world import World

STUCK_S = 0.25  # that a message waits in the router while nothing hinders it
# That the requests of a router that is gone may run on. Its last message may be late, and the replica may stand still.
LOST_S = BEATS * BEAT_S + 2 * LOOK_S + 6.0
STRAY_S = 0.5  # that a request may run on which no router's stream has: a few steps


def often(world: World) -> None:
    """Raises Violation."""
    promised.soon(world)
    promised.same(world)
    for router in world.routers:
        if router.alive:
            _tables(router)
            _sends(world, router)
    for replica in world.replicas:
        if replica.alive and not replica.loop.stopped:
            _strays(replica, world.time.now)
            for request, since in orphans(replica, world.gone):
                if world.time.now - since > LOST_S:
                    raise Violation(f"{replica.name}: {request} runs on, and its router is gone since {since:.3f}")


def orphans(replica: ReplicaProcess, gone: Mapping[str, float]) -> list[tuple[str, float]]:
    """Requests that run for a router that is gone, and since when it is."""
    live = [run.request.id for run in replica.replica.live.values()]
    return [(request, gone[router_of(request)]) for request in live if router_of(request) in gone]


def _tables(router: RouterProcess) -> None:
    """The router's table, its names, its books and its queues agree."""
    dispatcher = router.router._dispatcher
    live = dispatcher.table.all()
    rids = {routed.rid for routed in live if routed.rid}
    if dispatcher.table._attempts.keys() != rids:
        raise Violation(
            f"{router.name}: attempts {sorted(dispatcher.table._attempts)}, of live requests {sorted(rids)}"
        )
    for routed in live:
        if routed.moves > MOST_MOVES:
            raise Violation(f"{router.name}: request {routed.request.id} has moved {routed.moves} times")
    if dispatcher.table.completions != sum(routed.request.sampling.n for routed in live):
        raise Violation(f"{router.name}: counts {dispatcher.table.completions} completions")
    if dispatcher.entries.keys() != {routed.handle for routed in live}:
        raise Violation(f"{router.name}: entries of {sorted(dispatcher.entries)}")
    sent = Counter(routed.replica for routed in live if routed.rid)
    for name, seen in dispatcher.books.view.items():
        if seen.held.count != sent[name]:
            raise Violation(f"{router.name}: the books have {seen.held.count} requests at {name}, not {sent[name]}")


def _sends(world: World, router: RouterProcess) -> None:
    """What waits for a replica is bounded, and moves."""
    now, heads = world.time.now, {}
    for one in router.router._dispatcher.links.values():
        if len(one._sends) > one._terms.most_sends + 1:
            raise Violation(f"{router.name}: {len(one._sends)} messages wait for {one.name}")
        if (
            one._up
            and one._sends
            and not one._heard.state.compiling
            and not world.faults.hinders(router.name, one.name)
        ):
            head, since = router.heads.get(one.name, (None, now))
            heads[one.name] = (one._sends[0], since if head is one._sends[0] else now)
            if now - heads[one.name][1] > STUCK_S:
                raise Violation(f"{router.name}: a message for {one.name} is not sent")
    router.heads = heads


def _strays(replica: ReplicaProcess, now: float) -> None:
    """No request runs on for long that no stream has."""
    known = {live.handle for stream in replica.streams for live in stream._live.values()}
    strays = replica.replica.live.keys() - known
    replica.strays = {handle: replica.strays.get(handle, now) for handle in strays}
    for handle, since in replica.strays.items():
        if now - since > STRAY_S + 2 * replica.replica.step_s and not replica.replica.hung:
            request = replica.replica.live[handle].request.id
            raise Violation(f"{replica.name}: request {request} runs on, and no router has it")


def attached(world: World) -> bool:
    """Whether every router has every replica."""
    return all(len(router.router._dispatcher.attached) == len(world.replicas) for router in world.routers)


def followed(world: World) -> bool:
    """Whether every router that follows the controller has its table, and the controller knows that."""
    controller = world.adapters.controller
    assert controller is not None
    current = {version.name: version for version in controller.registry.versions()}
    return all(one.over or (one.follows() and one.table == current) for one in world.followers)


def at_end(world: World) -> None:
    """Nothing is left. Raises Violation."""
    for router in world.routers:
        dispatcher = router.router._dispatcher
        left = {
            "requests": list(dispatcher.table.all()),
            "attempts": dispatcher.table._attempts,
            "entries": dispatcher.entries,
            "handles": dispatcher._handles,
            "names": dispatcher.names,
            "books": [seen.held for seen in dispatcher.books.view.values() if seen.held != Held()],
        }
        for what, some in left.items():
            if some:
                raise Violation(f"{router.name}: {what} are left: {some}")
    if found := running(world):
        raise Violation(found)
    _registry(world)


def running(world: World) -> str:
    """Which requests of routers that live a replica still has; "" if none."""
    routers = {router.id for router in world.routers}
    for replica in world.replicas:
        known = [stream for stream in replica.streams if stream.router in routers]
        live = [live.rid for stream in known for live in stream._live.values()]
        runs = [run.request.id for run in replica.replica.live.values() if router_of(run.request.id) in routers]
        if live or runs:
            return f"{replica.name}: requests {live} are left, and {runs} run"
    return ""


def _registry(world: World) -> None:
    """The registry's file has what its controller says; what a client was told of is there."""
    controller = world.adapters.controller
    assert controller is not None
    written = {row.name: row for row in controller.registry._catalogue.rows()}
    both = (written, controller.registry._rows)
    file, memory = ({n: (r.uid, r.digest, r.pinned) for n, r in rows.items()} for rows in both)
    if file != memory:
        raise Violation(f"the registry's file has {file}, and its controller {memory}")
    by_digest = {one.digest: one for one in world.faults.loads}
    for one in world.faults.loads:
        if not one.loaded:
            continue
        info, row = one.answer.result(), written.get(one.name)
        if info.digest != one.digest:
            raise Violation(f"the load of {one.path} answers with the digest {info.digest}")
        if one.name in world.faults.unloaded:
            continue
        if row is None:
            raise Violation(f"adapter {one.name} was loaded as {info.uid}, and is not known any more")
        if by_digest[row.digest].published < one.begun:
            raise Violation(f"adapter {one.name} was loaded as {info.uid}, and is {row.uid} again")


def tidy(world: World) -> bool:
    """Whether replicas have no version that nobody wants, and no request uses one."""
    controller = world.adapters.controller
    assert controller is not None
    used = controller.uses.keys() or any(one.used for one in world.followers)
    return not used and all(controller.wanted(key) for one in world.replicas for key in one.replica.adapters_here)


def pins_hold(world: World) -> bool:
    """Whether every replica pins what the registry does, and nothing else."""
    controller = world.adapters.controller
    assert controller is not None
    pinned = {version.key for version in controller.registry.versions() if version.pinned}
    return all(pinned == {h.name for h in one.replica.adapters_here.values() if h.pinned} for one in world.replicas)
