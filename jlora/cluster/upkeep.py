"""What follows from the registry, again and again: pins at replicas, versions to drop, digests to learn.

Nothing is remembered of what replicas have. Each round compares the registry with what they say, so it is the
same after a lost call, a replica that was away, and a new controller.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from jlora.adapters.catalogue import Row
from jlora.adapters.names import is_key
from jlora.cluster.controller import Controller
from jlora.cluster.directory import Member, Version
from jlora.cluster.found import Found
from jlora.cluster.registry import info_of, key_of
from jlora.cluster.view import THERE
from jlora.errors import DataLoss, JloraError, NotFound, ResourceExhausted
from jlora.ports import System

log = logging.getLogger(__name__)

ROUND_S = 0.5  # between two rounds: what a replica says has changed by then
AGAIN_S = 10.0  # before what has failed, or what a replica's messages do not show yet, is tried again
POLL_S = 5.0  # between two looks at adapters.dir
THREADS = 4  # calls of replicas at once, most of them short
SAVES = 4  # versions without files of their own that are on their way to a second replica at once
SHOWN = 10  # keys in one line of the log
FULL_S = 60.0  # before a replica that has no room for such versions is asked again

EVERY = "*"  # in place of a version's key

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
        self._pins: dict[Task, tuple[bool, int]] = {}  # what a replica was told, and after how many calls
        self._compared: set[Task] = set()
        self._checked: set[Task] = set()
        self._epoch = 0  # of the table that these are of
        self._current: frozenset[str] = frozenset()
        self._found_keys: set[str] = set()  # current versions that nobody had read when they were registered
        self._to_pin: frozenset[str] = frozenset()
        self._full: dict[tuple[str, str], float] = {}  # replicas (name, address) that save no more, and until when

    def start(self) -> None:
        """Registers what is found at start, and begins the rounds. Raises JloraError."""
        self._controller.add(self._found.first(self._controller.registry))
        self._threads.start("jlora-upkeep", self._run)

    def close(self) -> None:
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _goes_on(self) -> bool:
        return not self._ended.is_set()

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
        self._forget(members, now)
        self._compared &= self._begun.keys()
        self._checked &= self._begun.keys()
        for task in list(self._pins):
            if task not in self._begun:
                self._pins.pop(task, None)
        self._read_table()
        pins, dropped = self._wanted_pins(), list[Task]()
        for member in members:
            for key in member.tiers.keys() - self._current:
                drop = ("drop", member.name, member.address, key)
                if is_key(key) and not self._controller.wanted(key) and self._begin(drop, now, self._unload):
                    dropped.append(drop)
            if member.draining:
                continue
            if (compare := ("compare", member.name, member.address, EVERY)) not in self._compared:
                self._begin(compare, now, self._compare)
            for key, wanted in pins.items():
                task = ("pin", member.name, member.address, key)
                gone = key in self._to_pin and member.tiers.get(key) not in ("HBM", "LOADING")
                if gone or self._pins.get(task) != wanted:
                    self._begin(task, now, self._pin_at)
            for key in self._found_keys & member.tiers.keys():
                task = ("digest", member.name, member.address, key)
                if task not in self._checked and member.tiers[key] in THERE:
                    self._begin(task, now, self._check)
        if dropped:
            self._tell(dropped)
        if now - self._looked >= POLL_S:
            self.look()
            self._looked = self._clock()

    def _tell(self, drops: Sequence[Task]) -> None:
        """A line for all drops of a round. Two controllers of the same replicas drop each other's versions for ever."""
        keys, replicas = sorted({task[3] for task in drops}), ", ".join(sorted({task[1] for task in drops}))
        shown = ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")
        if any(int(key.rpartition("@")[2]) > self._controller.registry.last for key in keys):
            why = "this controller has not given all these numbers: does another one have the same replicas?"
            log.warning("replicas (%s) drop versions that are not current: %s; %s", replicas, shown, why)
        else:
            log.info("replicas (%s) drop versions that are not current: %s", replicas, shown)

    def _forget(self, members: Sequence[Member], now: float) -> None:
        """Tasks of replicas that are gone, and those that are over and whose versions are not current any more."""
        up = {(member.name, member.address) for member in members}
        kept = self._current | {EVERY}
        self._begun = {
            task: at for task, at in self._begun.items() if task[1:3] in up and (at > now or task[3] in kept)
        }

    def _read_table(self) -> None:
        epoch, registry = self._controller.table.epoch, self._controller.registry
        if epoch == self._epoch:
            return
        versions = registry.versions()
        self._current = frozenset(version.key for version in versions)
        self._found_keys |= {version.key for version in versions if not version.digest}
        self._found_keys &= self._current
        self._to_pin = frozenset(version.key for version in versions if version.pinned)
        self._epoch = epoch

    def _wanted_pins(self) -> dict[str, tuple[bool, int]]:
        """Versions that every replica is told of: whether it pins them, and after how many calls of clients."""
        asked = self._controller.pins()
        keys = self._to_pin | (asked.keys() & self._current)
        return {k: (k in self._to_pin, asked.get(k, 0)) for k in keys if not self._controller.pinning(k)}

    def _unload(self, task: Task) -> None:
        _, _, address, key = task
        if not self._controller.wanted(key):
            self._controller.calls.unload(address, key).result(self._goes_on)

    def _pin_at(self, task: Task) -> None:
        """Tells a replica what the registry says now, unless a client is about to change it."""
        _, name, address, key = task
        calls, version = self._controller.pins().get(key, 0), self._controller.current(key.rpartition("@")[0])
        if version.key != key or self._controller.pinning(key):
            return
        told = self._controller.ask_to_pin(Member(name, address), version, version.pinned)
        try:
            told(self._goes_on)
        except NotFound:
            if version.pinned:  # what it lacks it has not pinned
                raise
        self._pins[task] = version.pinned, calls

    def _compare(self, task: Task) -> None:
        """A replica that comes may have pins that were undone while it was away, or by an earlier controller."""
        _, name, address, _ = task
        for key in self._controller.calls.pinned(address, self._goes_on):
            if key in self._current and key not in self._to_pin:
                self._pin_at(("pin", name, address, key))
        self._compared.add(task)

    def _check(self, task: Task) -> None:
        """The first replica that reads a version says what its digest is; one that read something else loses it."""
        _, _, address, key = task
        info = self._controller.calls.get(address, key).result(self._goes_on)
        try:
            self._controller.learn(key, info)
        except DataLoss:
            self._controller.calls.unload(address, key).result(self._goes_on)
            raise
        if info.digest:
            self._checked.add(task)

    def look(self) -> None:
        """Directories that have come and gone."""
        self._controller.add(self._found.look(self._controller.registry))
        members = self._controller.members()
        held = _holders(members)
        staying = _holders(self._controller.up())
        self._save([key for key in held if staying[key] < 2], members)
        for row in self._found.gone(self._controller.registry.all()):
            if key_of(row) not in held and self._controller.forget(row):  # otherwise a replica can still serve it
                log.info("adapter %s is not known any more: its files are gone", row.name)

    def _save(self, lonely: Sequence[str], members: Sequence[Member]) -> None:
        """Has a second replica keep the versions that one has in memory, and that no path has any more.

        Those of a replica that drains, too, for it may end soon. The most used first, `SAVES` at once. How many a
        replica keeps is its own affair: its host tier has to hold them until the files are back.
        """
        now = self._clock()
        self._full = {where: until for where, until in self._full.items() if until > now}
        left = SAVES - self._coming(members, now)
        with_room = [m for m in self._controller.by_room() if (m.name, m.address) not in self._full]
        on_device = {key for member in members for key, tier in member.tiers.items() if tier == "HBM"}
        for key in sorted(lonely, key=lambda k: (self._controller.uses.begun(k), k in on_device), reverse=True):
            row = self._controller.row(key)
            other = next((m for m in with_room if m.tiers.get(key, "DISK") == "DISK"), None)
            if left <= 0:
                return
            if other is not None and row is not None and self._is_lost(row):
                task = ("keep", other.name, other.address, key)
                left -= self._begin(task, now, self._keep)

    def _is_lost(self, row: Row) -> bool:
        """Whether a version's files are gone; or, of one that was replaced, are those of another version."""
        now = self._controller.registry.find(row.name)
        if now is not None and now.uid == row.uid:
            return self._found.is_gone(row.path)
        if not row.digest:  # no replica has read it: whatever is at its path would be taken for it
            return False
        overwritten = now is not None and now.path == row.path and now.digest != row.digest
        return overwritten or not self._found.is_intact(row)

    def _coming(self, members: Sequence[Member], now: float) -> int:
        """Versions that were to be kept a short time ago, and have not come."""
        tiers = {(member.name, member.address): member.tiers for member in members}
        kept = (task for task, until in self._begun.items() if task[0] == "keep" and until > now)
        return sum(tiers.get(task[1:3], {}).get(task[3]) not in THERE for task in kept)

    def _keep(self, task: Task) -> None:
        _, name, address, key = task
        if (row := self._controller.row(key)) is not None:
            version = Version.of(info_of(row), row.path)
            peers = self._controller.peers(version, name)
            try:
                self._controller.calls.hold(address, version, peers, lost=True).result(self._goes_on)
            except ResourceExhausted:
                self._full[name, address] = self._clock() + FULL_S
                raise

    def _begin(self, task: Task, now: float, run: Callable[[Task], None]) -> bool:
        """Runs a task, unless it has begun a short time ago; whether it does."""
        if self._begun.get(task, 0.0) > now:
            return False
        self._begun[task] = now + AGAIN_S

        def tried() -> None:
            try:
                run(task)
            except NotFound:
                pass  # it has gone by itself
            except JloraError as e:
                log.warning("%s of adapter %s at replica %s: %s", task[0], task[3], task[1], e)
            except Exception:
                log.exception("%s of adapter %s at replica %s has failed", task[0], task[3], task[1])

        self._pool.submit(tried)
        return True


def _holders(members: Sequence[Member]) -> Counter[str]:
    """Version key -> replicas that have it in memory, or soon."""
    return Counter(key for member in members for key, tier in member.tiers.items() if tier != "DISK")
