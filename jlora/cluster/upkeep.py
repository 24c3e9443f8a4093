"""What follows from the registry, again and again: pins at replicas that come, versions to drop, digests to learn.

Nothing is remembered of what replicas have. Each round compares the registry with what they say, so it is the
same after a lost call, a replica that was away, and a new controller.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from jlora.adapters.names import is_key
from jlora.cluster.controller import Controller, key_of
from jlora.cluster.directory import Member
from jlora.cluster.found import Found
from jlora.errors import DataLoss, JloraError, NotFound
from jlora.ports import System

log = logging.getLogger(__name__)

ROUND_S = 0.5
AGAIN_S = 10.0  # before what has failed, or what a replica's messages do not show yet, is tried again
POLL_S = 5.0  # between two looks at adapters.dir
THREADS = 4

Task = tuple[str, str, str, str]  # what, replica, its address, key


class Upkeep:
    """The rounds of one controller, on a thread of their own, until `close`."""

    def __init__(self, controller: Controller, found: Found, system: System):
        self._controller = controller
        self._found = found
        self._clock = system.clock
        self._pool = system.threads.pool("jlora-upkeep", THREADS)
        self._threads = system.threads
        self._ended = threading.Event()
        self._looked = system.clock()
        self._begun: dict[Task, float] = {}  # tasks under way or done, and when they may begin again
        self._pinned: set[Task] = set()
        self._checked: set[Task] = set()
        self._epoch = 0  # of the table that these are of
        self._current: frozenset[str] = frozenset()
        self._found_keys: set[str] = set()  # current versions that nobody had read when they were registered
        self._to_pin: list[str] = []

    def start(self) -> None:
        """Registers what is found at start, and begins the rounds. Raises JloraError."""
        self._controller.add(self._found.first(self._controller.registry))
        self._threads.start("jlora-upkeep", self._run)

    def close(self) -> None:
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._ended.wait(ROUND_S):
            try:
                self.round()
            except Exception:
                log.exception("the upkeep of adapters has failed; it goes on")

    def round(self) -> None:
        """Compares registry and replicas once, and begins what is missing."""
        members, now = self._controller.members(), self._clock()
        self._controller.calls.keep([member.address for member in members])
        self._controller.uses.look()
        up = {(member.name, member.address) for member in members}
        self._begun = {task: at for task, at in self._begun.items() if task[1:3] in up}
        self._pinned &= self._begun.keys()
        self._checked &= self._begun.keys()
        self._read_table()
        for member in members:
            for key in member.tiers.keys() - self._current:
                if is_key(key) and not self._controller.wanted(key):
                    self._begin(("drop", member.name, member.address, key), now, self._unload)
            for key in self._to_pin:
                task = ("pin", member.name, member.address, key)
                if task not in self._pinned or member.tiers.get(key) not in ("HBM", "LOADING"):
                    self._begin(task, now, self._pin_at)
            for key in self._found_keys & member.tiers.keys():
                task = ("digest", member.name, member.address, key)
                if task not in self._checked and member.tiers[key] in ("HBM", "HOST"):
                    self._begin(task, now, self._check)
        if now - self._looked >= POLL_S:
            self.look()
            self._looked = self._clock()

    def _read_table(self) -> None:
        epoch, registry = self._controller.table.epoch, self._controller.registry
        if epoch == self._epoch:
            return
        versions = registry.versions()
        self._current = frozenset(version.key for version in versions)
        self._found_keys |= {version.key for version in versions if not version.digest}
        self._found_keys &= self._current
        self._to_pin = [version.key for version in versions if version.pinned]
        self._epoch = epoch

    def _unload(self, task: Task) -> None:
        _, _, address, key = task
        if not self._controller.wanted(key):
            self._controller.calls.unload(address, key).result(lambda: not self._ended.is_set())

    def _pin_at(self, task: Task) -> None:
        _, name, address, key = task
        version = self._controller.current(key.rpartition("@")[0])
        if version.key == key and version.pinned:
            pinned = self._controller.ask_to_pin(Member(name, address), version, True)
            pinned(lambda: not self._ended.is_set())
            self._pinned.add(task)

    def _check(self, task: Task) -> None:
        """The first replica that reads a version says what its digest is; one that read something else loses it."""
        _, _, address, key = task
        info = self._controller.calls.get(address, key).result(lambda: not self._ended.is_set())
        try:
            self._controller.learn(key, info)
        except DataLoss:
            self._controller.calls.unload(address, key).result(lambda: not self._ended.is_set())
            raise
        if info.digest:
            self._checked.add(task)

    def look(self) -> None:
        """Directories that have come and gone."""
        self._controller.add(self._found.look(self._controller.registry))
        members = self._controller.members()
        held = Counter(key for member in members for key, tier in member.tiers.items() if tier != "DISK")
        self._save([key for key, holders in held.items() if holders == 1])
        for row in self._found.gone(self._controller.registry.all()):
            if key_of(row) not in held:  # otherwise a replica can still serve it
                log.info("adapter %s is not known any more: its files are gone", row.name)
                self._controller.unload(row.name)

    def _save(self, lonely: Sequence[str]) -> None:
        """Has a second replica keep each version that one has in memory, and whose files are gone."""
        members = self._controller.by_room()
        for key in lonely:
            row = self._controller.registry.find(key.rpartition("@")[0])
            if row is None or key_of(row) != key or not self._found.is_gone(row.path):
                continue
            other = next((m for m in members if m.tiers.get(key, "DISK") == "DISK"), None)
            if other is not None:
                self._begin(("keep", other.name, other.address, key), self._clock(), self._keep)

    def _keep(self, task: Task) -> None:
        _, name, address, key = task
        version = self._controller.current(key.rpartition("@")[0])
        if version.key == key:
            peers = self._controller.peers(version, name)
            self._controller.calls.hold(address, version, peers).result(lambda: not self._ended.is_set())

    def _begin(self, task: Task, now: float, run: Callable[[Task], None]) -> None:
        """Runs a task, unless it has begun a short time ago."""
        if self._begun.get(task, 0.0) > now:
            return
        self._begun[task] = now + AGAIN_S

        def tried() -> None:
            try:
                run(task)
            except NotFound:
                pass  # it has gone by itself
            except JloraError as e:
                log.warning("%s of adapter %s at replica %s: %s", task[0], task[3], task[1], e)

        self._pool.submit(tried)
