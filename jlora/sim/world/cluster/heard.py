"""What the product logs while a world is played: an error is a find, and so is a replica lost without a reason."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from jlora.sim.world.cluster.asks import Violation
from jlora.sim.world.cluster.loop import Loop

if TYPE_CHECKING:
    from jlora.sim.world.cluster.world import World

LOST = "replica %s at %s is lost: %s"
UNWRITTEN = "the registry of adapters was not written"
LEFT = "it has left the service"


class Heard(logging.Handler):
    """Takes the place of the product's log from `with` to its end."""

    def __init__(self, world: World):
        super().__init__(logging.WARNING)
        self._world = world
        self._found: list[str] = []
        self._log = logging.getLogger("jlora")

    def __enter__(self) -> Heard:
        self._before = self._log.handlers, self._log.propagate, self._log.level
        self._log.handlers, self._log.propagate = [self], False
        self._log.setLevel(logging.WARNING)
        return self

    def __exit__(self, *error: object) -> None:
        self._log.handlers, self._log.propagate = self._before[:2]
        self._log.setLevel(self._before[2])

    def emit(self, record: logging.LogRecord) -> None:
        loop = asyncio._get_running_loop()
        who = loop.name if isinstance(loop, Loop) else "-"
        if isinstance(loop, Loop) and not loop.watched:
            return
        self._world.journal.write(f"{self._world.time.now:.6f} {who}: {record.getMessage()}")
        if record.msg == UNWRITTEN and self._world.sites.fired:
            return
        if record.levelno >= logging.ERROR:
            error = record.exc_info[1] if record.exc_info else None
            self._found.append(f"{who} logs an error: {record.getMessage()} ({type(error).__name__}: {error})")
        elif record.msg == LOST and isinstance(record.args, tuple):
            name, _, why = map(str, record.args)
            self._world.blame.lost(who, name)
            if why != LEFT and not self._world.faults.excused(who, name):
                self._found.append(f"{who} loses replica {name} without a reason: {why}")

    def check(self) -> None:
        """Raises Violation for the first find of all processes."""
        for process in (*self._world.routers, *self._world.replicas):
            for context in process.loop.errors:
                error = context.get("exception")
                raise Violation(f"{process.name}: {context.get('message')}: {type(error).__name__}: {error}") from error
        for found in (*self._world.net.failures, *self._found, *self._world.blame.found):
            raise Violation(found)
