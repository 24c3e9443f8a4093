"""The adapters of a modelled service: the product's controller in the first router's process, over a registry whose
disk may be locked or full. Further routers follow its table.
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jlora.adapters.catalogue import Row
from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory import Members, Version, peers
from jlora.cluster.found import Found
from jlora.cluster.registry import Registry
from jlora.cluster.upkeep import ROUND_S, Upkeep
from jlora.cluster.uses import Uses
from jlora.config import Config
from jlora.errors import NotFound, Unavailable
from jlora.ports import Stamp, System, Threads
from jlora.sim.world.cluster.blame import Blame
from jlora.sim.world.cluster.fibers import Fibers
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.model import Disk
from jlora.sim.world.cluster.net import Net
from jlora.sim.world.cluster.waits import Waits
from jlora.sim.world.sites import Sites

NAMES = ("a0", "a1", "a2")
HOLD_S = 2.0  # as `jlora.cluster.uses.HOLD_S`, at the scale of a world
FOLLOWS_S = (0.001, 0.2)  # behind a change of the table

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
        controller = Controller(registry, found, Calls(Waits(self._net, loop, fibers)), system)
        controller.uses = Uses(registry.last, HOLD_S, time)
        upkeep = Upkeep(controller, found, system)
        self.controller = controller
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


class Follower:
    """The directory of a router that follows the controller's table, as `RemoteDirectory` does."""

    def __init__(self, adapters: Adapters, net: Net, loop: Loop, told: Told):
        self._adapters, self._net, self._loop, self._told = adapters, net, loop, told
        self._members: Members = lambda: ()
        self._versions: dict[str, Version] = {}
        self._uses: Counter[str] = Counter()
        self._epoch = 0
        self._stream: tuple[object, Controller] | None = None
        self._since = math.inf  # when that began
        self._look()

    @property
    def began(self) -> bool:
        """Whether a table has come."""
        return bool(self._epoch)

    def follows(self, seconds: float = 0.0) -> bool:
        """Whether the controller that lives has known it for so long."""
        known = self._stream is not None and self._stream[1] is self._adapters.controller
        return known and self._net.time.now - self._since >= seconds

    def number(self, name: str) -> int:
        """Of the version that it serves; 0 without one."""
        return self._versions[name].number if name in self._versions else 0

    def follow(self, members: Members) -> None:
        self._members = members

    def current(self, name: str) -> Version:
        if not self._epoch:
            raise Unavailable("the controller has not answered yet; try again")
        if name not in self._versions:
            raise NotFound(f"adapter {name!r} is not loaded")
        return self._versions[name]

    def peers(self, version: Version, near: str) -> tuple[str, ...]:
        return peers(self._members(), version.key, near)

    def begin(self, version: Version) -> None:
        self._uses[version.key] += 1

    def asked(self, version: Version, prompt: int) -> None:
        """No placement counts them here."""

    def end(self, version: Version, output: int = 0) -> None:
        self._uses[version.key] -= 1
        self._uses += Counter()

    @property
    def uses(self) -> Counter[str]:
        return self._uses

    @property
    def over(self) -> bool:
        """Whether its process is gone."""
        return self._loop.dead

    def _look(self) -> None:
        """Takes what is new from the controller that lives, if it is reached, and says what is in use here."""
        if self._loop.dead:
            self._leave()
            return
        self._net.time.after(self._net.draw.uniform(*FOLLOWS_S), self._look)
        controller, fibers = self._adapters.controller, self._adapters.lives[-1][0]
        if self._stream is not None and self._stream[1] is not controller:
            self._stream, self._epoch = None, 0
        if controller is None or self._loop.stopped or not fibers.runs or self._path(fibers).cut:
            return
        if self._stream is None:
            self._stream, self._since = (object(), controller), self._net.time.now
            controller.uses.saw(self._stream[0], self._loop.name, 0, ())
        change = controller.table.since(self._epoch)
        if change.whole:
            self._versions.clear()
        for version in change.versions:
            self._versions[version.name] = version
            self._told(version.name, version.digest)
        for name in change.gone:
            self._versions.pop(name, None)
        self._epoch = change.epoch
        current = {version.key for version in self._versions.values()}
        old = [key for key, count in self._uses.items() if count and key not in current]
        controller.uses.saw(self._stream[0], self._loop.name, self._epoch, old)

    def _path(self, fibers: Fibers) -> Any:
        return self._net.path(self._loop.name, fibers.name)

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream[1].uses.left(self._stream[0])
