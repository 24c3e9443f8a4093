"""The adapters of a modelled service: the product's controller in the first router's process, over a registry whose
disk may be locked or full. `follower` has the routers that follow its table.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jlora.adapters.catalogue import Row
from jlora.cluster.calls import Answer, Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory_server import DirectoryServicer
from jlora.cluster.found import Found
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.cluster.registry import Registry
from jlora.cluster.secret import Secret
from jlora.cluster.upkeep import ROUND_S, Upkeep
from jlora.cluster.uses import Uses
from jlora.config import Config
from jlora.ports import Clock, Stamp, System, Threads
from jlora.serve.client import Login
from jlora.sim.world.cluster.blame import Blame
from jlora.sim.world.cluster.fibers import Fibers
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.model import Disk
from jlora.sim.world.cluster.net import Net, Server
from jlora.sim.world.cluster.waits import Waits
from jlora.sim.world.sites import Sites

NAMES = ("a0", "a1", "a2")
HOLD_S = 2.0  # as `jlora.cluster.uses.HOLD_S`, at the scale of a world
CONTROLLER = "controller:1"  # its address, whatever life it has

# Called with a name and the digest that its next requests get.
Told = Callable[[str, str], None]


class Connection:
    """One process's connection to the registry's file, which outlives it."""

    def __init__(self, file: sqlite3.Connection, sites: Sites, struck: Callable[[str], None], die: Callable[[], None]):
        """`struck` hears which fault strikes; `die` ends the process, and never returns."""
        self._file, self._sites, self._struck, self._die = file, sites, struck, die
        self.strikes = False
        self._commits = 0

    @property
    def in_transaction(self) -> bool:
        return self._file.in_transaction

    def execute(self, statement: str, *values: Any) -> Any:
        if statement == "begin immediate" and self._fires("registry.locked"):
            raise _error("database is locked", "SQLITE_BUSY")
        dies = statement == "commit" and self._fires("controller.killed")
        self._commits += statement == "commit"
        if dies and self._commits % 2:  # before it is written
            self._die()
        done = self._file.execute(statement, *values)
        if dies:
            self._die()
        return done

    def executemany(self, statement: str, values: Iterable[Any]) -> Any:
        if self._fires("registry.full"):
            raise _error("database or disk is full", "SQLITE_FULL")
        return self._file.executemany(statement, values)

    def _fires(self, name: str) -> bool:
        fires = self.strikes and self._sites.fires(name)
        if fires:
            self._struck(name)
        return fires

    def close(self) -> None:
        if self._file.in_transaction:
            self._file.rollback()


def _error(message: str, name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(message)
    error.sqlite_errorname = name
    return error


class WatchedRegistry(Registry):
    """Tells of what it makes current, and of every name that changes."""

    def __init__(self, threads: Threads, connect: Callable[..., Any], told: Told, changed: Callable[[str], None]):
        super().__init__("", threads, connect)
        self._told, self._changed = told, changed

    def put(self, rows: Sequence[Row]) -> None:
        super().put(rows)
        for row in rows:
            self._changed(row.name)
            self._told(row.name, row.digest)

    def remove(self, name: str) -> None:
        super().remove(name)
        self._changed(name)


class WatchedUses(Uses):
    """Says since when it knows what a router uses."""

    def __init__(self, last: int, clock: Clock):
        super().__init__(last, HOLD_S, clock)
        self._now = clock
        self._since: dict[object, tuple[str, float]] = {}  # by stream

    def saw(self, stream: object, router: str, epoch: int, keys: Iterable[str]) -> None:
        if epoch:
            self._since.setdefault(stream, (router, self._now()))
        super().saw(stream, router, epoch, keys)

    def left(self, stream: object) -> None:
        self._since.pop(stream, None)
        super().left(stream)

    def knows(self, router: str, seconds: float) -> bool:
        """Whether a stream has told it for so long."""
        return any(name == router and self._now() - since >= seconds for name, since in self._since.values())


class WatchedCalls(Calls):
    """Tells of the versions that replicas are about to drop."""

    def __init__(self, login: Login, drops: Callable[[str], None]):
        super().__init__(login)
        self._drops = drops

    def unload(self, address: str, key: str) -> Answer:
        self._drops(key)
        return super().unload(address, key)


class DiskFiles:
    """The modelled disk, as far as a controller looks at it."""

    def __init__(self, disk: Disk):
        self._disk = disk

    def stamp(self, directory: str, names: Iterable[str]) -> Stamp:
        if directory not in self._disk.files:
            raise FileNotFoundError(directory)
        return (1,)


class Adapters:
    """The registry's file, and the controller of the present life."""

    def __init__(self, net: Net, disk: Disk, sites: Sites, draw: random.Random, blame: Blame):
        self.disk, self.draw = disk, draw
        self._blame = blame
        self.file = sqlite3.connect(":memory:", isolation_level=None)
        self.number = 0
        self.controller: Controller | None = None
        self.uses: WatchedUses | None = None  # of the controller
        self.lives: list[tuple[Fibers, Controller]] = []
        self._net, self._sites = net, sites

    def write(self, name: str, path: str = "") -> str:
        """New weights, in a new directory or in place of others; where they are."""
        self.number += 1
        path = path or f"/adapters/{name}/{self.number}"
        self.disk.files[path] = f"{self.draw.getrandbits(64):016x}"
        return path

    def begin(self, loop: Loop, told: Told, dies: Callable[[], None]) -> Controller:
        """A controller begins, in the process of a loop; `dies` kills that."""
        time = self._net.time
        fibers = Fibers(time, loop)
        if self.file.in_transaction:  # of a life that was killed
            self.file.rollback()

        def die() -> None:
            dies()
            fibers.vanish()

        connection = Connection(self.file, self._sites, self._blame.file, die)
        registry = WatchedRegistry(fibers, lambda *_, **how: connection, told, self._blame.changed)
        connection.strikes = True
        files: Any = DiskFiles(self.disk)
        system = System(clock=time, wall=lambda: 0.0, files=files, threads=fibers)
        found = Found(Config(), system)
        calls = WatchedCalls(Waits(self._net, loop, fibers), self._blame.drops)
        controller = Controller(registry, found, calls, system)
        controller.uses = self.uses = WatchedUses(registry.last, time)
        upkeep = Upkeep(controller, found, system)
        self.controller = controller
        server: Any = Server(loop)
        rpc.add_DirectoryServicer_to_server(DirectoryServicer(controller, Secret()), server)
        self._net.listen(CONTROLLER, server)
        self.lives.append((fibers, controller))

        def round() -> None:
            if not loop.dead:
                fibers.start("upkeep", upkeep.round)
                time.after(ROUND_S, round)

        time.after(ROUND_S, round)
        return controller

    def bury(self) -> None:
        for fibers, controller in self.lives:
            controller.calls.close()
            fibers.bury()
        self.file.close()
