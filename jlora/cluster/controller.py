"""The adapters of the service: registered once, and at replicas as versions that never mix.

load      one replica reads and checks it under the version's key; then the registry has it; then requests see it,
          at every router that follows
unload    its name is unknown at once; replicas drop it after its last request
pin       at every replica that is up, and at those that come (`jlora.cluster.upkeep`); of two calls the later one

A replica that has not heard of a version registers it with the first request for it. So nothing here must
reach every replica: a call needs one that is up, and what the others lack or have too much follows.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from jlora.adapters.catalogue import Row
from jlora.adapters.names import check_name
from jlora.cluster.calls import Answer, Calls
from jlora.cluster.demand import Told
from jlora.cluster.directory import TIERS, Directory, Member, Members, Version, nearest_tier, peers
from jlora.cluster.found import Found
from jlora.cluster.registry import Registry, info_of, key_of, row_of
from jlora.cluster.table import Table
from jlora.cluster.uses import Uses
from jlora.engine.futures import chained, done, failed, settle
from jlora.engine.sources import check_version
from jlora.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    JloraError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jlora.ports import System
from jlora.replica import Load
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 16  # calls of clients at once; others wait
READERS = 2  # replicas that try to read an adapter's files before these count as missing or damaged
NONE_UP = "no replica is up that could read the adapter; try again later"


def _message(version: Version, load: Load) -> pb.LoadAdapterRequest:
    return pb.LoadAdapterRequest(name=version.key, path=version.path, pinned=load.pinned, replace=True, lazy=load.lazy)


@dataclass(slots=True)
class _Pins:
    """How many calls that pin a version, or unpin it, have begun and ended."""

    begun: int = 0
    ended: int = 0


class Controller(Directory):
    """The directory over the replicas' own services. One process has it; other routers ask it."""

    def __init__(self, registry: Registry, found: Found, calls: Calls, system: System):
        self.registry = registry
        self.calls = calls
        self.uses = Uses(registry.last, clock=system.clock)
        self.table = Table(registry)
        self._found = found
        self._system = system
        self._pool = system.threads.pool("jlora-controller", THREADS)
        self._publishing = threading.Lock()  # one change of the registry at a time
        self._loading: set[str] = set()  # keys that replicas have and the registry has not
        self._pins: dict[str, _Pins] = {}  # by key; only those that a client has asked for
        self._retired: dict[str, Row] = {}  # by key: versions that are not current, and that requests may still use
        self.members: Members = lambda: ()
        self.told: Callable[[str, Told], None] = lambda name, told: None  # of an adapter's requests at any router

    def follow(self, members: Members) -> None:
        self.members = members

    def close(self) -> None:
        """Begins no more; calls under way fail. The registry stays open."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.calls.close()

    # -- what requests ask ----------------------------------------------------------------------

    def current(self, name: str) -> Version:
        return self.registry.version(name)

    def peers(self, version: Version, near: str) -> tuple[str, ...]:
        return peers(self.members(), version.key, near)

    def begin(self, version: Version) -> None:
        self.uses.begin(version.key)

    def asked(self, version: Version, prompt: int) -> None:
        self.told(version.name, Told(requests=1, prompt=prompt))

    def end(self, version: Version, output: int = 0) -> None:
        self.told(version.name, Told(ended=bool(output), output=output))
        self.uses.end(version.key)

    def wanted(self, key: str) -> bool:
        """Whether replicas should keep the version."""
        return self._is_current(key) or key in self._loading or self.uses.holds(key)

    def _is_current(self, key: str) -> bool:
        row = self.registry.find(key.rpartition("@")[0])
        return row is not None and key_of(row) == key

    def row(self, key: str) -> Row | None:
        """A version that is current, or that requests may still use."""
        row = self.registry.find(key.rpartition("@")[0])
        return row if row is not None and key_of(row) == key else self._retired.get(key)

    # -- load -----------------------------------------------------------------------------------

    def load(self, load: Load) -> Future[AdapterInfo]:
        answer: Future[AdapterInfo] = Future()

        def run() -> None:
            try:
                info, epoch = self._load(load, answer)
            except CancelledError:
                if not answer.cancelled():
                    answer.cancel()
            except Exception as e:
                if answer.running() or answer.set_running_or_notify_cancel():
                    answer.set_exception(e)
            else:  # its caller's next request may go to any router, and must not get the version before
                self.uses.tell(epoch, lambda: answer.set_result(info))

        return answer if self._submit(run) else failed(Unavailable("the controller has stopped"))

    def _load(self, load: Load, answer: Future[AdapterInfo]) -> tuple[AdapterInfo, int]:
        """Publishes a version, from the returned epoch on, unless the caller cancels `answer` before."""
        name = check_name(load.name)
        if not load.replace:
            self._check_free(name)
        with ExitStack() as kept:
            version, info = self._read(load, lambda: not answer.cancelled(), kept)
            try:
                if load.pinned:
                    self._pin_everywhere(replace(version, digest=info.digest), True)
                with self._publishing:
                    if not load.replace:
                        self._check_free(name)
                    if not answer.set_running_or_notify_cancel():  # from here on it is too late to cancel
                        raise CancelledError
                    epoch = self._publish(row_of(version, info, load.pinned, self._system.wall()))
            except BaseException:
                self._drop(version.key)
                raise
        return replace(info, name=name, uid=version.number, pinned=load.pinned), epoch

    def _read(self, load: Load, wanted: Callable[[], bool], kept: ExitStack) -> tuple[Version, AdapterInfo]:
        """Has one replica read and check a new version; if it dies meanwhile, another one.

        If it cannot read the files, one other replica tries: the volume may be missing on the first one's node alone.
        Each has a version of its own: the first may come back, with other files' weights. `kept` keeps the last one.
        """
        tried: set[str] = set()
        error: JloraError | None = None
        unread = 0
        while (member := next((m for m in self.by_room() if m.name not in tried), None)) is not None:
            tried.add(member.name)
            version = self._version(load, kept)
            try:
                answer = self.calls.load(member.address, _message(version, load))
                return version, answer.result(lambda at=member: wanted() and self._is_there(at))
            except (Unavailable, ResourceExhausted, NotFound, DataLoss) as e:
                log.warning("adapter %s is not read at replica %s: %s", version.key, member.name, e)
                error = e
                unread += isinstance(e, NotFound | DataLoss)
                if unread == READERS:
                    break
            if not wanted():
                raise CancelledError
        if error is None and load.lazy:
            version = self._version(load, kept)
            return version, self._found.scan(version)  # what its files' headers say; a replica reads the rest in time
        raise error or Unavailable(NONE_UP)

    def _version(self, load: Load, kept: ExitStack) -> Version:
        """A new one, and no other, is left alone by upkeep."""
        kept.close()
        version = Version(load.name, self.registry.number(), os.path.abspath(load.path))
        kept.enter_context(self._kept(version.key))
        return version

    def _publish(self, row: Row) -> int:
        """Requests see the version from now on; the one before is dropped after its last request. The table's epoch."""
        old = self.registry.find(row.name)
        self.registry.put([row])
        epoch = self.table.changed([row.name])
        log.info("adapter %s is loaded as version %d", row.name, row.uid)
        if old is not None:
            self._retire(old, epoch, self._drop)
        return epoch

    def _retire(self, row: Row, epoch: int, then: Callable[[str], object]) -> None:
        """Calls `then` with the key of a version that is not current any more, once nobody needs it."""
        key = key_of(row)

        def free() -> None:
            self._retired.pop(key, None)
            self._later(lambda: then(key))

        self._retired[key] = row
        self.uses.retire(key, epoch, free)

    def add(self, rows: Sequence[Row]) -> None:
        """Registers adapters that no replica has read yet; a later version of a name stays."""
        with self._publishing:
            known = {row.name: self.registry.find(row.name) for row in rows}
            self._record([row for row in rows if (old := known[row.name]) is None or old.uid < row.uid])

    def _record(self, rows: Sequence[Row]) -> None:
        if rows:
            self.registry.put(rows)
            self.table.changed([row.name for row in rows])

    def learn(self, key: str, info: AdapterInfo) -> None:
        """A replica has read a version. If its digest was not known, it is known now, and binds every replica.

        Raises DataLoss if the digest is another one.
        """
        with self._publishing:
            row = self.registry.find(key.rpartition("@")[0])
            if row is None or key_of(row) != key or not info.digest:
                return
            if row.digest:
                check_version(row, info.digest, row.header)
                return
            known = row_of(Version(row.name, row.uid, row.path), info, row.pinned, row.created)
            self._record([replace(known, header=row.header, base=row.base, stamp=row.stamp)])

    # -- unload, pin ----------------------------------------------------------------------------

    def unload(self, name: str) -> Future[AdapterInfo]:
        gone: Future[AdapterInfo] = Future()

        def run() -> AdapterInfo:
            info = self._info(self.registry.get(name))
            with self._publishing:
                row = self.registry.get(name)
                epoch = self._remove(name)
            self._found.leave(row)
            log.info("adapter %s unloads", name)
            self._retire(row, epoch, lambda key: settle(gone, lambda: self._dropped(key, info)))
            return info

        return chained(self._run(run), lambda _: gone)

    def forget(self, row: Row) -> bool:
        """Unloads a version whose files are gone, and whether it does: not another one that has taken its place.

        Its directory is found again as soon as it is back, also with the same files. Errors as of `Registry.remove`.
        """
        with self._publishing:
            now = self.registry.find(row.name)
            if now is None or now.uid != row.uid:
                return False
            epoch = self._remove(row.name)
        self._retire(row, epoch, self._drop)
        return True

    def _remove(self, name: str) -> int:
        """Requests do not see the name from now on. The table's epoch."""
        self.registry.remove(name)
        return self.table.changed([name])

    def _dropped(self, key: str, info: AdapterInfo) -> AdapterInfo:
        self._drop(key)
        return info

    def pin(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        def run() -> AdapterInfo:
            version = self.current(name)
            with self._publishing:
                pins = self._pins.setdefault(version.key, _Pins())
                pins.begun = mine = pins.begun + 1
            try:
                self._pin_everywhere(version, pinned)
                with self._publishing:
                    row = self.registry.get(name)
                    if row.uid != version.number:
                        raise AlreadyExists(f"adapter {name!r} was replaced meanwhile; pin it again")
                    if pins.begun != mine:
                        raise FailedPrecondition(f"adapter {name!r} was pinned or unpinned by a later call meanwhile")
                    self._record([replace(row, pinned=pinned)])
            finally:
                with self._publishing:
                    pins.ended += 1
            return self._info(self.registry.get(name))

        return self._run(run)

    def pins(self) -> dict[str, int]:
        """Versions that clients have pinned or unpinned since this controller began, and how often.

        A version with a call under way is left out. Once its calls have ended, replicas may differ from the registry:
        some were away, or got two calls in another order.
        """
        return {key: pins.ended for key, pins in list(self._pins.items()) if pins.begun == pins.ended}

    def pinning(self, key: str) -> bool:
        """Whether a call that pins the version, or unpins it, is under way."""
        pins = self._pins.get(key)
        return pins is not None and pins.begun != pins.ended

    def _pin_everywhere(self, version: Version, pinned: bool) -> None:
        """At every replica that is up, or, if one has no room, at none. Raises ResourceExhausted."""
        members = self.up()
        answers = [(m, self.ask_to_pin(m, version, pinned)) for m in members]
        try:
            for member, answer in answers:
                try:
                    answer(lambda at=member: self._is_there(at))
                except (Unavailable, NotFound) as e:  # upkeep pins it there in time
                    log.warning("adapter %s is not pinned at replica %s: %s", version.key, member.name, e)
        except JloraError:
            if pinned and not version.pinned:
                list(self._gathered(members, lambda m: self.calls.pin(m.address, version.key, False)))
            raise

    def ask_to_pin(self, member: Member, version: Version, pinned: bool) -> Callable[[Callable[[], bool]], AdapterInfo]:
        """Asks a replica to pin a version, or not to; the answer waits. A replica that lacks it reads it.

        The answer raises DataLoss if no peer has the version now and its path has other weights.
        """
        asked = self.calls.pin(member.address, version.key, pinned)

        def result(wanted: Callable[[], bool]) -> AdapterInfo:
            try:
                return asked.result(wanted)
            except (NotFound, DataLoss):  # unknown there, or its files have changed and it knows no peer that has it
                if not pinned:
                    raise
            # Not loaded from its path: requests find a version by its key at once, so it must never hold other weights.
            self.calls.hold(member.address, version, self.peers(version, member.name)).result(wanted)
            try:
                return self.calls.pin(member.address, version.key, True).result(wanted)
            except NotFound as e:
                if not self.wanted(version.key):
                    raise
                # It has read other weights meanwhile, and forgotten the version over it.
                raise DataLoss(f"adapter {version.key!r}: its files have changed on the disk; restore them") from e

        return result

    # -- list -----------------------------------------------------------------------------------

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        members = self.members()
        return done([self._told(row, members) for row in self.registry.all(after, most)])

    def adapter(self, name: str) -> Future[AdapterInfo]:
        return self._run(lambda: self._info(self.registry.get(name)))

    def _told(self, row: Row, members: Sequence[Member]) -> AdapterInfo:
        """What the registry and the replicas' messages say."""
        key = key_of(row)
        return replace(info_of(row), tier=nearest_tier(members, key), running=self.uses.count(key))

    def _info(self, row: Row) -> AdapterInfo:
        """What all replicas say of an adapter, together."""
        key, members = key_of(row), self.members()
        found = [info for _, info in self._gathered(members, lambda m: self.calls.get(m.address, key))]
        told = self._told(row, members)
        if not found:
            return told
        return replace(
            told,
            tier=max((info.tier for info in found), key=TIERS.index),
            running=sum(info.running for info in found),
            waiting=sum(info.waiting for info in found),
            hits=sum(info.hits for info in found),
            last_used_s=min((i.last_used_s for i in found if i.last_used_s >= 0), default=-1.0),
            load_cost_s=max(info.load_cost_s for info in found),
            merged=any(info.merged for info in found),
            merge_error=max(info.merge_error for info in found),
            merge_refusal=next((info.merge_refusal for info in found if info.merge_refusal), ""),
        )

    # -- replicas -------------------------------------------------------------------------------

    def _drop(self, key: str) -> None:
        """Takes a version from every replica that is there; upkeep does so at those that come."""
        self._pins.pop(key, None)
        list(self._gathered(self.members(), lambda m: self.calls.unload(m.address, key)))

    def _gathered(
        self, members: Sequence[Member], ask: Callable[[Member], Answer]
    ) -> Iterator[tuple[Member, AdapterInfo]]:
        """The answers of those that answer."""
        for member, answer in [(member, ask(member)) for member in members]:
            try:
                yield member, answer.result(lambda at=member: self._is_there(at))
            except JloraError as e:
                log.debug("replica %s: %s", member.name, e)

    def up(self) -> list[Member]:
        """Replicas that take more."""
        return [member for member in self.members() if not member.draining]

    def by_room(self) -> list[Member]:
        """Replicas that are up, those with the fewest adapters in memory first."""
        return sorted(self.up(), key=lambda m: sum(tier != "DISK" for tier in m.tiers.values()))

    def _is_there(self, member: Member) -> bool:
        return any((m.name, m.address) == (member.name, member.address) for m in self.members())

    def _check_free(self, name: str) -> None:
        if self.registry.find(name) is not None:
            raise AlreadyExists(f"adapter {name!r} is loaded already; unload it, or set replace (HTTP: load_inplace)")

    @contextmanager
    def _kept(self, key: str) -> Iterator[None]:
        """Upkeep leaves a version to its load."""
        self._loading.add(key)
        try:
            yield
        finally:
            self._loading.discard(key)

    def _submit(self, run: Callable[[], object]) -> bool:
        """Whether a thread of the pool runs it; not once the controller is closed."""
        try:
            self._pool.submit(run)
        except RuntimeError:
            return False
        return True

    def _later(self, run: Callable[[], object]) -> None:
        if not self._submit(run):
            log.debug("the controller has stopped: the next one drops what is left")

    def _run(self, run: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        if not self._submit(lambda: settle(answer, run)):
            return failed(Unavailable("the controller has stopped"))
        return answer
