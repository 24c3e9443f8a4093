"""Which errors clients of a modelled service may get: each is tied to the fault that has struck it.

A replica may fail an attempt that a fault struck there: its step, its adapter, its full queue, its drain. An attempt
may be lost with its link. The client hears of none of these, unless they have cost its request all its attempts, or
a second replica lacks what the first did. Everything else must end well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.requests import MOST_LOSSES, MOST_MOVES, Routed
from jlora.errors import (
    AlreadyExists,
    Busy,
    DataLoss,
    FailedPrecondition,
    JloraError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jlora.sim.world.cluster.asks import Ask
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.net import Stream

if TYPE_CHECKING:
    from jlora.sim.world.cluster.faults import Command
    from jlora.sim.world.cluster.members import RouterProcess
    from jlora.sim.world.cluster.world import World


KNOWN_S = 10.0  # that a message of the controller may have been under way
SAID_S = 0.01  # between a router's words and what follows from them
SHORT = "ResourceExhausted"
LACKS = ("NotFound", "DataLoss", SHORT, "ShortOfMemory")  # with these, a router asks one other replica


class Blame:
    """What has struck whom. `found`: errors that nothing explains."""

    def __init__(self, world: World):
        self.found: list[str] = []
        self._world = world
        self._attempts: set[tuple[str, str, str]] = set()  # (replica, its name of a request, kind of error)
        # (replica, version's key, kind of error) -> when it was so last.
        self._unread: dict[tuple[str, str, str], float] = {}
        self._draining: set[Loop] = set()
        self._over: dict[tuple[str, int], str] = {}  # attempts that have ended: (router, number) -> why
        self._files: dict[str, float] = {}  # a fault of the registry's file, and when it struck last
        self._changed: dict[str, float] = {}  # when a name's files, or what it stands for, changed last

    # -- what strikes -----------------------------------------------------------------------------

    def attempt(self, replica: str, request: str, kind: str) -> None:
        """A fault ends an attempt at a replica with an error of this kind."""
        self._attempts.add((replica, _attempt(request), kind))

    def unread(self, replica: str, key: str, kind: str) -> None:
        """A replica cannot read a version."""
        self._unread[replica, key, kind] = self._world.time.now

    def drains(self, replica: Loop) -> None:
        self._draining.add(replica)

    def file(self, fault: str) -> None:
        """A fault strikes the registry's file."""
        self._files[fault] = self._world.time.now

    def changed(self, name: str) -> None:
        """An adapter's files are others, or its name stands for another version, or for none."""
        self._changed[name] = self._world.time.now

    def loaded(self, one: Command) -> None:
        """A load is answered, just now: every router that follows must serve what it has loaded, or something later."""
        controller, number = self._world.adapters.controller, one.answer.result().uid
        row = None if controller is None else controller.registry.find(one.name)
        if row is None or row.uid != number:  # it has been replaced, or unloaded
            return
        for follower in self._world.followers:
            was = follower.table[one.name].number if one.name in follower.table else 0
            if follower.follows() and not follower.over and was < number:
                self.found.append(f"{one.name} is loaded as version {number}, and a router serves version {was}")

    def drops(self, key: str) -> None:
        """A controller is about to have a version dropped."""
        for follower in self._world.followers:
            if follower.follows(SAID_S) and not follower.over and key in follower.used:
                self.found.append(f"the controller drops {key}, and a router that follows uses it")

    def dropped(self, replica: str, key: str) -> None:
        """A replica drops a version, as its controller has told it a moment ago."""
        for router in self._world.routers:
            if not router.alive or not router.is_known(KNOWN_S):
                continue
            for routed in router.router._dispatcher.table.all():
                if routed.version is not None and routed.version.key == key:
                    self.found.append(f"{replica} drops {key}, and request {routed.request.id} uses it")

    # -- what follows -----------------------------------------------------------------------------

    def lost(self, router: str, replica: str) -> None:
        """A router is about to lose a replica; whether it may is looked at elsewhere."""
        process = next(one for one in self._world.routers if one.name == router)
        for routed in process.router._dispatcher.table.at(replica):
            self._over[process.id, routed.rid] = "lost"

    def watch(self, router: RouterProcess) -> None:
        """Hears when a router's attempts are over before their requests are."""
        table: Any = router.router._dispatcher.table
        lose = table.lose

        def over(routed: Routed, now: float, refused: bool = False, moved: bool = False, drained: bool = False) -> Any:
            self._given_up(router.id, routed, refused, moved)
            return lose(routed, now, refused, moved, drained)

        table.lose = over

    def heard(self, stream: Stream, message: Any) -> None:
        """A router is about to take a replica's message."""
        router = next((one for one in self._world.routers if one.loop is stream.client), None)
        if router is None or not isinstance(message, link.FromReplica):
            return
        for failure in message.failures:
            routed = router.router._dispatcher.table.attempt(failure.rid)
            if routed is None:  # nobody waits for it
                continue
            if not self._caused(stream.server, router, routed, failure):
                what = f"{failure.kind}: {failure.message}"
                self.found.append(
                    f"{stream.server.name} fails request {routed.request.id}, which nothing struck: {what}"
                )
            ask = self._ask(routed)
            ask.causes[failure.kind] += 1
            if self._final(router, routed, failure):
                ask.final.add(failure.kind)
            else:
                self._over[router.id, routed.rid] = failure.kind

    def judge(self, ask: Ask, error: BaseException) -> None:
        """A client gets an error, just now."""
        if not isinstance(error, JloraError) or not self._excused(ask, error):
            happened = f"{ask.losses} attempts in a row were lost, and replicas said {dict(ask.causes)}"
            self.found.append(f"{ask.name} has failed: {type(error).__name__}: {error}; {happened}")

    def command(self, one: Command) -> bool:
        """Whether a command may have failed as it has."""
        error, begun, name = one.answer.exception(), one.begun, one.name
        if isinstance(error, Unavailable):
            away = all(self._world.faults.disturbed(replica, begun) for replica in self._world.replicas)
            apart = self._world.faults.apart(one.router, begun)
            return apart or self._files.get("registry.locked", -1.0) >= begun or (one.kind == "load" and away)
        if isinstance(error, ResourceExhausted):
            return self._files.get("registry.full", -1.0) >= begun or (one.kind == "pin" and self._short(name) >= begun)
        if isinstance(error, NotFound):
            return one.kind != "load" and (self._changed.get(name, -1.0) >= begun or one.unknown)
        if isinstance(error, FailedPrecondition):
            later = [other for other in self._world.faults.commands if other.kind == one.kind == "pin"]
            return any(o.name == name and o is not one and begun <= o.begun <= one.ended for o in later)
        return isinstance(error, DataLoss | AlreadyExists) and self._changed.get(name, -1.0) >= begun

    # -- inside -----------------------------------------------------------------------------------

    def _short(self, name: str) -> float:
        """When a replica last had no memory for an adapter."""
        times = [at for (_, key, kind), at in self._unread.items() if (kind, key.rpartition("@")[0]) == (SHORT, name)]
        return max(times, default=-1.0)

    def _ask(self, routed: Routed) -> Ask:
        return self._world.asks[int(routed.request.id[1:])]

    def _caused(self, replica: Loop, router: RouterProcess, routed: Routed, failure: link.Failure) -> bool:
        if (replica.name, f"{failure.rid}@{router.id}", failure.kind) in self._attempts:
            return True
        if failure.kind == "Unavailable" and replica in self._draining:
            return True
        return routed.version is not None and (replica.name, routed.version.key, failure.kind) in self._unread

    def _final(self, router: RouterProcess, routed: Routed, failure: link.Failure) -> bool:
        """Whether no other replica is asked after this failure: one is, for what the first lacks."""
        if failure.elsewhere or failure.kind == "QueueFull":
            return False
        ask, view = self._ask(routed), router.router._dispatcher.books.view
        if failure.kind not in LACKS or ask.lacked:
            return True
        ask.lacked = True
        return not any(seen.health == "up" for name, seen in view.items() if name != routed.replica)

    def _given_up(self, router: str, routed: Routed, refused: bool, moved: bool) -> None:
        ask, why = self._ask(routed), self._over.pop((router, routed.rid), "")
        ask.lose(refused, moved)
        drains = any(loop.name == routed.replica for loop in self._draining)
        if ask.moves > MOST_MOVES:
            self.found.append(f"{ask.name} has moved {ask.moves} times")
        if not (moved or drains or why) or refused != (why == "QueueFull"):
            self.found.append(f"{ask.name} gives up an attempt at {routed.replica}, which nothing struck: {why!r}")

    def _excused(self, ask: Ask, error: JloraError) -> bool:
        if isinstance(error, Busy):
            return ask.refusals >= MOST_LOSSES or _full(ask)
        if isinstance(error, Unavailable):
            deadline = ask.request.deadline
            late = deadline is not None and self._world.time.now >= deadline
            return late or ask.losses >= MOST_LOSSES or ask.router.waits_for_table
        if isinstance(error, NotFound) and not _known(ask):
            return True
        return type(error).__name__ in ask.final


def _attempt(request: str) -> str:
    """A replica's name of a request, without the epoch of its stream."""
    return request.rpartition(".")[0]


def _full(ask: Ask) -> bool:
    dispatcher = ask.router.router._dispatcher
    engine = dispatcher.info.config.engine
    return dispatcher.table.completions + ask.request.sampling.n > engine.max_queue + engine.max_seqs


def _known(ask: Ask) -> bool:
    """Whether its router knows its adapter now."""
    try:
        ask.router.directory.current(ask.request.adapter)
    except NotFound:
        return False
    return True
