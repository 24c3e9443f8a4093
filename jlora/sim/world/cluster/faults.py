"""Faults that strike processes and the paths between them, and what heals them."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jlora.errors import Unavailable
from jlora.sim.world.cluster.adapters import NAMES
from jlora.sim.world.cluster.follower import Follower
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.members import ReplicaProcess, RouterProcess
from jlora.sim.world.cluster.model import SPOILED
from jlora.sim.world.cluster.net import DELAY_S
from jlora.types import AdapterInfo

if TYPE_CHECKING:
    from jlora.sim.world.cluster.world import World

WHILE_S = (0.05, 2.5)  # that most faults last
RESTART_S = (0.05, 1.0)
BURST_S = 0.3  # in which the clients of a burst come
EXCUSED_S = 13.0  # after a fault in which a replica may be lost


@dataclass(slots=True)
class Command:
    """A client's load, unload or pin of an adapter, from `begun` to `ended`.

    Attributes:
        router: whom the client asks; with its life, which `loop` is, the command ends, unanswered.
        unknown: its name stood for nothing when it came.
    """

    kind: str
    name: str
    begun: float
    answer: Future[AdapterInfo]
    router: RouterProcess
    loop: Loop
    path: str = ""
    digest: str = ""  # of what is there
    ended: float = math.inf
    unknown: bool = False

    @property
    def loaded(self) -> bool:
        """Whether its client was told so."""
        return self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None

    @property
    def goes_on(self) -> bool:
        """Whether it may be answered yet."""
        return not (self.answer.done() or self.loop.dead)

    @property
    def published(self) -> float:
        """The latest time at which a load has taken place: one that another router has lost may come later."""
        lost = isinstance(self.router.directory, Follower) and not self.loaded
        return math.inf if lost else self.ended


class Faults:
    """Asks every site with every step. Each fault has its end, or ends with `heal`."""

    def __init__(self, world: World):
        self._world = world
        self._strike: dict[str, Callable[[], bool]] = {
            "net.slow": self._slow,
            "net.cut": self._cut,
            "net.reset": lambda: self._reset(True, True),
            "net.half_open": self._half_open,
            "net.call_lost": self._lose_calls,
            "net.late_hello": self._late_hello,
            "replica.killed": lambda: self._kill_replica(False),
            "replica.lost": lambda: self._kill_replica(True),
            "replica.stopped": lambda: self._stop(self._replica()),
            "replica.drained": self._drain,
            "engine.hung": self._hang,
            "engine.compiles": self._compile,
            "engine.fails": self._fail,
            "router.killed": lambda: self._kill_router(False),
            "router.lost": lambda: self._kill_router(True),
            "router.stopped": lambda: self._stop(self._router()),
            "fleet.removed": self._remove,
            "adapter.loaded": lambda: self.load(self._name()),
            "adapter.unloaded": self._unload,
            "adapter.pinned": self._pin,
            "adapter.changed": self._change,
            "clients.burst": lambda: self._burst(False),
            "clients.flood": self._flood,
        }
        self._excused: dict[tuple[str, str], float] = {}  # (router, replica or controller's router) -> until
        self._calls_lost: dict[str, float] = {}  # replica -> when the controller's calls there were lost last
        self._spoiled: dict[str, str] = {}  # path -> what was there
        self.commands: list[Command] = []
        self._going: list[Callable[[], object]] = []  # routers that are about to be gone
        self.unloaded: set[str] = set()
        self.asking_until = 0.0  # clients of bursts come until then

    @property
    def loads(self) -> list[Command]:
        """The commands that load."""
        return [one for one in self.commands if one.kind == "load"]

    def step(self) -> None:
        """What strikes now."""
        for replica in self._world.replicas:
            if not replica.alive and not replica.restarts:
                self._restart(replica)
        for name, strike in self._strike.items():
            if not self._world.sites.fires(name):
                continue
            if strike():
                self._world.journal.write(f"{self._world.time.now:.6f} {name}")
            else:
                self._world.sites.missed(name)

    def heal(self) -> None:
        """From now on everything works."""
        world = self._world
        self._go()
        for path in list(self._spoiled):
            self._mend(path)
        for replica in world.replicas:
            self.excuse(replica.name, seconds=2.0)
            if replica.alive and replica.backend.draining:
                replica.kill()
            if replica.alive and replica.loop.stopped:
                replica.loop.go_on()
            if not replica.alive:
                replica.start()
            replica.replica.hung = False
        for router in world.routers:
            if router.alive and router.loop.stopped:
                router.loop.go_on()
            if not router.alive:
                world.start_router(router)
            for other in self._others(router):
                world.net.path(router.name, other).heal()
        world.place()

    # -- what excuses a loss ------------------------------------------------------------------

    def excuse(self, one: str, other: str = "", seconds: float = EXCUSED_S) -> None:
        """A process, or a path, is disturbed: links may be lost for a while."""
        until = self._world.time.now + seconds
        for router in self._world.routers:
            for name in self._others(router):
                pair = (router.name, name)
                if one in pair and (not other or other in pair):
                    self._excused[pair] = max(until, self._excused.get(pair, 0.0))

    def excused(self, router: str, replica: str) -> bool:
        if self._excused.get((router, replica), 0.0) > self._world.time.now:
            return True
        return any(one.name == replica and not one.alive for one in self._world.replicas)

    def disturbed(self, replica: ReplicaProcess, since: float) -> bool:
        """Whether the controller may have failed to reach a replica, since then."""
        router = self._world.routers[0].name
        last = max(self._excused.get((router, replica.name), -1.0), self._calls_lost.get(replica.name, -1.0))
        return not replica.alive or last >= since

    def apart(self, router: RouterProcess, since: float) -> bool:
        """Whether a router may have failed to reach the controller, since then."""
        return self._excused.get((router.name, self._world.routers[0].name), -1.0) >= since

    def hinders(self, router: str, replica: str) -> bool:
        """Whether messages may not arrive just now: also where the other end is gone, and only silence will tell."""
        world = self._world
        path = world.net.path(router, replica)
        lives = [one for one in (*world.routers, *world.replicas) if one.name in (router, replica)]
        links = [stream for stream in world.net.between(router, replica) if stream.first]
        late = not links or any(stream.up.late for stream in links)
        stands = any(not one.alive or one.loop.stopped for one in lives)
        return late or stands or path.cut or path.slow != DELAY_S

    # -- the network ----------------------------------------------------------------------------

    def _others(self, router: RouterProcess) -> list[str]:
        """The processes that a router calls: the replicas, and that of the controller."""
        first = self._world.routers[0]
        return [*(one.name for one in self._world.replicas), *([] if router is first else [first.name])]

    def _pair(self) -> tuple[str, str]:
        draw = self._world.draw
        router = draw.choice(self._world.routers)
        return router.name, draw.choice(self._others(router))

    def _slow(self) -> bool:
        one, other = self._pair()
        path, draw = self._world.net.path(one, other), self._world.draw
        path.slow = (0.0, draw.choice((0.05, 0.2, 1.0)))
        self._world.time.after(draw.uniform(*WHILE_S), path.heal)
        self.excuse(one, other)
        return True

    def _cut(self) -> bool:
        one, other = self._pair()
        path = self._world.net.path(one, other)
        path.cut = True
        self._world.time.after(self._world.draw.uniform(0.05, 8.0), path.heal)
        self.excuse(one, other, 25.0)
        return True

    def _reset(self, client: bool, server: bool) -> bool:
        one, other = self._pair()
        streams = self._world.net.between(one, other)
        for stream in streams:
            stream.reset(client, server)
        self.excuse(one, other)
        return bool(streams)

    def _half_open(self) -> bool:
        end = self._world.draw.random() < 0.5
        return self._reset(end, not end)

    def _lose_calls(self) -> bool:
        """Of the controller, at one replica; their link is another connection. No loss is excused by it."""
        world = self._world
        calls = [call for call in world.net.calls() if call.client is world.routers[0].loop]
        if calls:
            server = world.draw.choice(calls).server
            self._calls_lost[server.name] = world.time.now
            for call in calls:
                if call.server is server:
                    call.reset(client=False)
        return bool(calls)

    def _late_hello(self) -> bool:
        """No loss is excused by it."""
        world = self._world
        one, other = self._pair()
        streams = [s for s in world.net.opened if s.client is not None and s.first and s.client.name == one]
        streams = [s for s in streams if s.server.name == other and not s.server.dead]
        if streams:
            world.net.late_hello(world.draw.choice(streams))
        return bool(streams)

    # -- processes --------------------------------------------------------------------------------

    def _replica(self) -> ReplicaProcess:
        return self._world.draw.choice(self._world.replicas)

    def _router(self) -> RouterProcess:
        return self._world.draw.choice(self._world.routers)

    def _kill_replica(self, silent: bool) -> bool:
        replica = self._replica()
        if not replica.alive:
            return False
        self.excuse(replica.name)
        replica.kill(silent)
        return True

    def _restart(self, replica: ReplicaProcess) -> None:
        """A supervisor starts it again, and the fleet says where."""
        draw, world = self._world.draw, self._world
        replica.restarts = True
        self.excuse(replica.name)

        def start() -> None:
            if not replica.alive:
                self.excuse(replica.name)
                replica.start(keep_address=draw.random() < 0.5)
                world.time.after(draw.uniform(0.0, 0.5), world.place)

        world.time.after(draw.uniform(*RESTART_S), start)

    def _kill_router(self, silent: bool) -> bool:
        router, world = self._router(), self._world
        if not router.alive or router.loop.stopped:
            return False
        if silent:  # what runs for long would run on
            for _ in range(2):
                world.ask(router, plain=True, long=True)
        self.excuse(router.name, seconds=EXCUSED_S + 0.5)
        life = router.life
        self._going += [lambda: router.life == life and router.alive and self._router_is_gone(router, silent)]
        world.time.after(0.5 if silent else 0.0, self._go)
        return True

    def _go(self) -> None:
        for gone in self._going:
            gone()
        self._going = []

    def _router_is_gone(self, router: RouterProcess, silent: bool) -> None:
        world = self._world
        world.gone[router.id] = world.time.now
        router.kill(silent)
        for ask in world.asks:
            ask.lost |= ask.router is router and not ask.over
        world.time.after(world.draw.uniform(*RESTART_S), lambda: router.alive or world.start_router(router))

    def controller_dies(self) -> None:
        """The process of the controller is killed, just now."""
        router = self._world.routers[0]
        self.excuse(router.name)
        self._router_is_gone(router, False)

    def _stop(self, process: ReplicaProcess | RouterProcess) -> bool:
        if not process.alive or process.loop.stopped:
            return False
        loop = process.loop
        loop.stop_process()
        self.excuse(process.name)
        self._world.time.after(self._world.draw.uniform(*WHILE_S), lambda: loop.dead or loop.go_on())
        return True

    def _drain(self) -> bool:
        replica = self._replica()
        if not replica.alive or replica.backend.draining:
            return False
        replica.backend.draining = True
        self._world.blame.drains(replica.loop)
        self.excuse(replica.name)
        loop = replica.loop
        self._world.time.after(self._world.draw.uniform(0.2, 1.0), lambda: loop.dead or replica.kill())
        return True

    def _remove(self) -> bool:
        """The fleet no longer says where it is; it runs on."""
        gone, world = self._replica(), self._world
        self.excuse(gone.name)
        for router in world.routers:
            if router.alive:
                router.router.place({n: a for n, a in world.addresses().items() if n != gone.name})
        world.time.after(world.draw.choice((0.0, world.draw.uniform(*WHILE_S))), world.place)
        return True

    # -- engines ----------------------------------------------------------------------------------

    def _hang(self) -> bool:
        process = self._replica()
        replica = process.replica
        replica.hung = True
        self.excuse(process.name, seconds=30.0)
        self._world.time.after(self._world.draw.uniform(1.0, 14.0), lambda: setattr(replica, "hung", False))
        return process.alive

    def _compile(self) -> bool:
        """It says so, and is silent a while later, for less than the router's patience."""
        process, world = self._replica(), self._world
        loop, seconds = process.loop, world.draw.uniform(0.3, 4.0)
        process.replica.compiles = world.time.now + seconds + 0.2
        world.time.after(0.2, lambda: loop.dead or loop.stop_process())
        world.time.after(0.2 + seconds, lambda: loop.dead or loop.go_on())
        self.excuse(process.name)
        return process.alive

    def _fail(self) -> bool:
        process = self._replica()
        process.replica.fails = Unavailable("a step has failed")
        return process.alive

    # -- adapters and clients -----------------------------------------------------------------------

    def load(self, name: str) -> bool:
        """A client loads new weights under a name, which may be in use."""
        router = self._router()
        if not router.alive:
            return False
        path = self._written(name, router is self._world.routers[0])
        self._command("load", name, router, router.router.load_adapter(name, path, replace=True), path)
        return True

    def _written(self, name: str, in_place: bool) -> str:
        """Where new weights are: often in place of those that are served, unless somebody may read these just now."""
        world, path = self._world, ""
        assert world.adapters.controller is not None
        row = world.adapters.controller.registry.find(name) if in_place else None
        if row is not None and row.path not in (*self._loading(), *self._spoiled) and world.draw.random() < 0.6:
            path = row.path
            world.blame.changed(name)
        return world.adapters.write(name, path)

    def _loading(self) -> list[str]:
        return [one.path for one in self.loads if one.goes_on]

    def restore(self) -> None:
        """An owner puts back what is served, where a load that came to nothing has overwritten it."""
        world, loading = self._world, self._loading()
        assert world.adapters.controller is not None
        for row in world.adapters.controller.registry.all():
            there = self._spoiled if row.path in self._spoiled else world.disk.files
            if there[row.path] != row.digest and row.path not in loading:
                there[row.path] = row.digest
                world.blame.changed(row.name)

    def _command(
        self, kind: str, name: str, router: RouterProcess, answer: Future[AdapterInfo], path: str = ""
    ) -> None:
        world = self._world
        digest = world.disk.files.get(path, "")
        command = Command(kind, name, world.time.now, answer, router, router.loop, path, digest)
        assert world.adapters.controller is not None
        command.unknown = world.adapters.controller.registry.find(name) is None
        self.commands.append(command)

        def ended(_: object) -> None:
            command.ended = world.time.now
            if command.loaded and kind == "load":
                world.blame.loaded(command)
            self.restore()

        answer.add_done_callback(ended)

    def _name(self) -> str:
        return self._world.draw.choice(NAMES)

    def _unload(self) -> bool:
        router, name = self._router(), self._name()
        if router.alive:
            self.unloaded.add(name)
            self._command("unload", name, router, router.router.unload_adapter(name))
        return router.alive

    def _pin(self) -> bool:
        router = self._router()
        if router.alive:
            name = self._name()
            self._command("pin", name, router, router.router.pin_adapter(name, self._world.draw.random() < 0.7))
        return router.alive

    def _change(self) -> bool:
        """The files of an adapter are others for a while."""
        world = self._world
        loaded, loading = [one for one in self.loads if one.loaded], self._loading()
        path = world.draw.choice([one.path for one in loaded if one.path not in loading] or [""])
        if not path or path in self._spoiled:
            return False
        self._spoiled[path] = world.disk.files[path]
        world.disk.files[path] = SPOILED
        self._tell(path)
        world.time.after(world.draw.uniform(*WHILE_S), lambda: self._mend(path))
        return True

    def _mend(self, path: str) -> None:
        if path in self._spoiled:
            self._world.disk.files[path] = self._spoiled.pop(path)
            self._tell(path)

    def _tell(self, path: str) -> None:
        self._world.blame.changed(next(one.name for one in self.loads if one.path == path))

    def _flood(self) -> bool:
        """Clients who leave at once, while a replica reads nothing."""
        replica, world = self._replica(), self._world
        loop = replica.loop
        if loop.dead or loop.stopped:
            return False
        loop.stop_process()
        self.excuse(replica.name)
        world.time.after(0.4, lambda: loop.dead or loop.go_on())
        return self._burst(True)

    def _burst(self, hasty: bool) -> bool:
        """From one router's clients, within a moment."""
        world, router = self._world, self._router()
        draw, self.asking_until = world.draw, world.time.now + BURST_S
        for _ in range(draw.randint(10, 60)):
            at = draw.uniform(0.0, BURST_S)
            world.time.after(at, lambda: router.alive and world.ask(router, hasty=hasty))
        return True
