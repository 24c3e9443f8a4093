"""Adapters in and out of an engine, in three parts, so that no step waits for an adapter's bytes.

reserve    the engine's thread    checks the name and takes blocks of the host tier
fill       any thread             copies the packed data into them
publish    the engine's thread    the name now means this version
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import replace as replaced

from jlora.adapters.catalogue import Row
from jlora.adapters.registry import Record
from jlora.cache.manager import Pins
from jlora.cache.tree import AdapterNode
from jlora.engine.futures import chained, done
from jlora.engine.ports import Parts
from jlora.engine.records import NewAdapter, of_files, of_row, row_of
from jlora.engine.shelf import Reading, Shelf
from jlora.engine.switching import Switching
from jlora.errors import NotFound, ResourceExhausted
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

BOUND = 0.25  # share of the host tier for adapters whose files have changed or are gone, and so cannot be read again


def check_size(name: str, size: int, most: int, total: int, hint: str = "") -> None:
    """Raises ResourceExhausted if an adapter of `size` blocks can never fit the pool."""
    if size > most:
        raise ResourceExhausted(
            f"adapter {name!r} needs {size} blocks, and at most {most} of the pool's {total} can hold an adapter; "
            f"raise cache.hbm_blocks{hint}"
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """An adapter in memory beside the files at its path.

    Attributes:
        stamp: of the files; None if there are none, or the disk does not answer.
        own: they are what the adapter was read from.
    """

    record: Record
    stamp: tuple[int, ...] | None
    own: bool


class Adapters:
    """The adapters of one engine. All methods but `fill` belong to the engine's thread."""

    def __init__(self, parts: Parts, switching: Switching | None = None):
        self._switching = switching
        self._scheduler = parts.scheduler
        self._manager = parts.scheduler.manager
        self._registry = parts.registry
        self._swapper = parts.swapper
        self._clock = parts.clock
        self._wall = parts.wall
        self._catalogue = parts.catalogue
        self.shelf = Shelf(parts)

    # -- in ---------------------------------------------------------------------------------

    def add(self, new: NewAdapter, pinned: bool = False, replace: bool = False) -> AdapterInfo:
        """Makes an adapter servable in one go. Raises what `reserve` and `publish` raise."""
        blocks = self.reserve(new, replace)
        self.fill(blocks, new)
        return self.publish(new, blocks, pinned, replace)

    def reserve(self, new: NewAdapter, replace: bool = False) -> tuple[int, ...]:
        """Host blocks for the adapter's master copy; `publish` or `cancel` ends the reservation.

        Raises:
            AlreadyExists: the name is taken and `replace` is False.
            ResourceExhausted: it can never fit the pool, or the host tier is full.
        """
        if not replace:
            self._registry.check_free(new.name)
        size, manager = len(new.projections), self._manager
        check_size(new.name, size, manager.adapter_limit, manager.total, manager.share_hint)
        blocks = self._manager.reserve(size)
        if blocks is None:
            raise ResourceExhausted(
                f"adapter {new.name!r} needs {size} blocks of the host tier, which has no room beside its adapters "
                f"and the KV in use ({self._manager.host_use}); unload one, try again, or raise cache.host_blocks"
            )
        return blocks

    def fill(self, blocks: tuple[int, ...], new: NewAdapter) -> None:
        """Copies the adapter's data into its reserved blocks. Any thread may call it."""
        self._swapper.fill(blocks, new.data)

    def cancel(self, blocks: tuple[int, ...]) -> None:
        """Gives a reservation back."""
        self._manager.cancel(blocks)

    def publish(
        self, new: NewAdapter, blocks: tuple[int, ...], pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        """Puts a filled adapter into service; with `replace` it takes over the name.

        Raises:
            AlreadyExists: the name was taken meanwhile and `replace` is False.
            ResourceExhausted: pinning it finds no room now. Nothing has changed, and the blocks are given back.
        """
        if not replace:
            try:
                self._registry.check_free(new.name)
            except Exception:
                self.cancel(blocks)
                raise
        node = self._manager.add_adapter(self._registry.new_uid(), blocks)
        record = of_files(new, node, self._wall())
        old = self._registry.remove(new.name) if self.has(new.name) else None
        self._registry.add(record)
        self._take_over(record, old, pinned)
        self._registry.purge(self._manager.adapters)
        self.back(record, bool(record.path))
        self._write(record)
        log.info("adapter %s loaded: uid=%d blocks=%d", new.name, node.uid, node.size)
        return self._info(record)

    def register(self, new: NewAdapter, replace: bool = False) -> AdapterInfo:
        """Makes an adapter servable that stays on the disk until a request needs it; `new` has no data.

        Raises:
            AlreadyExists: the name is taken and `replace` is False.
            ResourceExhausted: it can never fit the pool, or not beside the pinned adapters.
        """
        record = self._registered(new, replace)
        self._write(record)
        return self._info(record)

    def _registered(self, new: NewAdapter, replace: bool = False) -> Record:
        """As `register`, and not yet in the catalogue."""
        if not replace:
            self._registry.check_free(new.name)
        self._check_fits(new.name, len(new.projections))
        node = AdapterNode(self._registry.new_uid(), len(new.projections))
        node.gone = True
        record = of_files(new, node, self._wall())
        old = self._registry.get(new.name) if self.has(new.name) else None
        self._check_pins(record, self._pins(record, old))
        if old is not None:
            self._registry.remove(new.name)
            self._end(old)
        self._registry.add(record)
        return record

    def _restore(self, row: Row) -> None:
        """Registers an adapter that the catalogue knows, under its uid."""
        size = row.blocks
        self._check_fits(row.name, size)
        node = AdapterNode(row.uid, size)
        node.gone = True
        used = self._clock() - max(0.0, self._wall() - row.last_used) if row.last_used else 0.0
        self._registry.add(of_row(row, node, used))

    def _check_fits(self, name: str, size: int) -> None:
        manager = self._manager
        check_size(name, size, manager.adapter_limit, manager.total, manager.share_hint)
        if size > manager.host_most:
            raise ResourceExhausted(
                f"adapter {name!r} needs {size} blocks, and the host tier has {manager.host_most}; "
                "raise cache.host_blocks"
            )

    def _take_over(self, record: Record, old: Record | None, pinned: bool) -> None:
        """Brings a new version in and ends the old one; restores the old one if there is no room."""
        was_pinned = old is not None and old.node.pinned
        if old is not None:  # its blocks may make room for the new version
            self._manager.pin(old.node, False)
        try:
            if pinned:
                self._check_pins(record, self._pins(record, old, pinned=True))
                self._pin(record, True)
            else:
                self._check_pins(record, self._pins(record, old))
                self._manager.bring_in(record.node)
        except Exception:  # no room, or no memory
            self._registry.remove(record.name)
            self._manager.kill(record.node)
            if old is not None:
                self._registry.add(old)
                self._manager.pin(old.node, was_pinned)
            raise
        if old is not None:
            self._manager.kill(old.node)

    def begin_with(self, found: Iterable[Row | NewAdapter]) -> None:
        """Registers the adapters that a server starts with; all of them stay on the disk."""
        if self._catalogue is not None:  # what comes first must not get the uid of a row behind it
            self._registry.uids_from(self._catalogue.last_uid)
        new: list[Record] = []
        for item in found:
            if isinstance(item, Row):
                self._restore(item)
            else:
                new.append(self._registered(item))
        self._write(*new)

    def read_in(self, new: NewAdapter, pinned: bool) -> None:
        """Puts an adapter that is registered into memory, in one go, before anything else is read."""
        self.shelf.hint(self._registry.get(new.name))
        (reading,) = self.shelf.begin()
        self.fill(reading.blocks, new)
        self.arrive(reading, new)
        if not pinned:
            return
        try:
            self.pin(new.name, True)
        except ResourceExhausted as e:  # the pool is smaller, or another adapter larger, than when it was pinned
            log.warning("adapter %s is not pinned; the next start tries it again: %s", new.name, e)

    # -- out --------------------------------------------------------------------------------

    def remove(self, name: str) -> list[int]:
        """Takes an adapter out of service; its blocks are free when its last request has ended.

        Returns:
            uids of the versions of that name that still live, those that it replaced too (see `are_gone`).

        Raises:
            NotFound: no such adapter.
        """
        record = self._registry.remove(name)
        uids = self._registry.versions(name)
        log.info("adapter %s unloads%s: uid=%d", name, ", although it is pinned" * record.node.pinned, record.node.uid)
        self._end(record)
        if self._catalogue is not None:
            self._catalogue.remove([name])
        return uids

    def _end(self, record: Record) -> None:
        if not record.node.gone:
            self._manager.pin(record.node, False)
            self._manager.kill(record.node)

    def are_gone(self, uids: Sequence[int]) -> bool:
        """Whether all blocks and KV of these versions are free, in both tiers."""
        self._registry.purge(self._manager.adapters)
        merged = self._switching is not None and any(map(self._switching.holds, uids))
        return not merged and not any(uid in self._manager.adapters for uid in uids)

    # -- in service ---------------------------------------------------------------------------

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists if the name is taken."""
        self._registry.check_free(name)

    def has(self, name: str) -> bool:
        """Whether an adapter of that name is in service."""
        return name in self._registry

    def get(self, name: str) -> AdapterInfo:
        """Raises NotFound."""
        return self._info(self._registry.get(name))

    def check(self, name: str) -> None:
        """Raises NotFound, without near names. Any thread may ask."""
        if name not in self._registry:
            raise NotFound(f"adapter {name!r} is not loaded")

    def all(self, after: str = "", most: int | None = None) -> list[AdapterInfo]:
        """In order of name: those behind the name `after`, at most `most`."""
        return [self._info(record) for record in self._registry.all(after, most)]

    def invocation(self, name: str) -> tuple[int, ...]:
        """An activated LoRA's invocation tokens; () for another adapter or an unknown name. Any thread may ask."""
        return self._registry.invocation(name)

    def pin(self, name: str, pinned: bool) -> AdapterInfo:
        """Pins an adapter and brings it in, or unpins it. Raises NotFound, ResourceExhausted."""
        record = self._registry.get(name)
        if pinned:
            self._check_pins(record, self._pins(record, pinned=True))
        self._pin(record, pinned)
        record.keeps_pin = False
        self._write(record)
        return self._info(record)

    def pin_when_read(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        """As `pin`, for an adapter that may have to be read from the disk first.

        The future raises FailedPrecondition if the adapter is unpinned before it is read. Raises what `pin` raises.
        """
        record = self._registry.get(name)
        if not pinned:
            self.shelf.unpin(name)
        if not pinned or not (record.node.gone or record.node.reading):
            return done(self.pin(name, pinned))
        self.check_host(record.node.uid)
        arrived: Future[None] = Future()
        self.shelf.open(record).then.append(arrived)
        # The name may mean another version by then, which is on the disk.
        return chained(arrived, lambda _: self.pin_when_read(name, pinned))

    def pin_again(self, name: str) -> Future[AdapterInfo]:
        """As `pin_when_read`, for one that was pinned when the server ended; if it fails, the next start tries it."""
        record = self._registry.get(name)
        record.keeps_pin = True
        self._write(record)
        return self.pin_when_read(name, True)

    def version(self, uid: int) -> AdapterInfo | None:
        """The version of that uid; None once it is unloaded or replaced."""
        record = self._registry.live(uid)
        return None if record is None else self._info(record)

    def hasten(self, uid: int) -> None:
        """Lets the copy of a version in service, if one is under way, overtake prefetches."""
        self._manager.hasten(self._registry.by_uid(uid).node)

    def _info(self, record: Record) -> AdapterInfo:
        info = record.info(self._clock())
        if self._switching is None:
            return info
        error, refusal = self._switching.loss(record.node)
        merged = self._switching.holds(record.node.uid)
        return replaced(info, merged=merged, merge_error=error, merge_refusal=refusal)

    # -- from the disk ------------------------------------------------------------------------

    def expect(self, uid: int) -> AdapterNode:
        """The adapter's node in the cache, for which requests may queue; it is read from the disk.

        Raises ResourceExhausted if pinned adapters leave too little host memory.
        """
        self.check_host(uid)
        return self.shelf.open(self._registry.by_uid(uid)).node

    def hint(self, uid: int) -> int:
        """Reads an adapter ahead, if few others are; its blocks that are on their way."""
        record = self._registry.by_uid(uid)
        fits = not record.node.gone or record.node.size <= self._manager.host_beside_pins
        return record.node.size if fits and self.shelf.hint(record) else 0

    def check_host(self, uid: int) -> None:
        """Raises ResourceExhausted if the adapter is on the disk, and pinned ones leave too little host memory."""
        record = self._registry.by_uid(uid)
        size, room = record.node.size, self._manager.host_beside_pins
        if record.node.gone and size > room:
            raise ResourceExhausted(
                f"adapter {record.name!r} is on the disk and needs {size} blocks of the host tier, and pinned adapters "
                f"leave {room} of its {self._manager.host_most}; unpin some, or raise cache.host_blocks"
            )

    def keep(self, name: str, lost: bool) -> AdapterInfo:
        """Hints at an adapter that is on the disk only; if its files are `lost`, it cannot leave memory.

        Raises NotFound; ResourceExhausted if such adapters would take too much of the host tier.
        """
        info = self.get(name)
        if info.tier == "DISK" and lost:
            if (size := self._bound()) + info.blocks > self._most_bound:
                raise ResourceExhausted(
                    f"adapter {name!r} is not kept: {size} blocks of the host tier hold adapters without files, it "
                    f"has {info.blocks}, and at most {self._most_bound} may"
                )
        if info.tier == "DISK":
            self.hint(info.uid)
        return info

    def arrive(self, reading: Reading, new: NewAdapter) -> bool:
        """The adapter is in its host blocks, and its digest is pinned; False if nobody waits for it any more."""
        record, node = reading.record, reading.node
        self._manager.policy.meter.observe_disk(node.size, new.read_s)
        self._manager.counters.adapter_reads += 1
        self._manager.counters.adapter_read_s += new.read_s
        if not self.shelf.take(reading):
            return False
        record.digest, record.projections, record.load_cost_s = new.digest, new.projections, new.read_s
        record.stamp = new.stamp
        self._registry.share(record)
        self.back(record, True)
        self._write(record)
        for future in reading.then:
            future.set_result(None)
        if not node.wanted:
            self._manager.bring_in(node)
        return True

    def missed(self, reading: Reading, error: Exception) -> None:
        """The adapter could not be read, and the requests for it have ended."""
        if not reading.cancelled:  # otherwise nobody waits for it any more
            self._manager.counters.adapter_reads_failed += 1
        for future in reading.then:
            # It is done if nobody has waited for a while; and it is not about these files if the name has moved on.
            if not (future.done() or reading.node.gone):
                future.set_exception(error)
        self.shelf.drop(reading)

    def back(self, record: Record, intact: bool) -> None:
        """Whether the adapter's files are as they were read: otherwise it stays in memory, and so does one to merge."""
        may_leave = intact and record.name != self._merged_name
        if not record.node.gone and record.node.backed != may_leave:
            self._manager.back(record.node, may_leave)

    def compared(self, found: Iterable[Compared]) -> None:
        """What the files of adapters in memory are now.

        Those with other files stay as long as they take no more than their share of the host tier. Then the next ones
        may leave, and their requests find what the files are.
        """
        bound = self._bound()
        for one in found:
            node, own = one.record.node, one.own
            if own and one.stamp is not None:
                one.record.stamp = one.stamp
            elif one.record.stamp and one.stamp is not None and node.backed and not node.gone:
                own = bound + node.size > self._most_bound
                bound += 0 if own else node.size
            self.back(one.record, own)

    @property
    def _merged_name(self) -> str:
        return "" if self._switching is None else self._switching.name

    @property
    def _most_bound(self) -> int:
        """The most blocks that `_bound` may be."""
        return int(BOUND * self._manager.host.total)

    def _bound(self) -> int:
        """Blocks of adapters whose files have changed, or that have none; what is to be merged does not count."""
        held = [r for r in self.records() if not r.node.gone and r.name != self._merged_name]
        return sum(r.node.size for r in held if not (r.stamp if r.node.reading else r.node.backed))

    def renew(self, record: Record, new: NewAdapter) -> None:
        """Its files changed before they were first read, and are `new` now; nothing if it is no longer so."""
        if record.node.gone and not record.digest and self._registry.live(record.node.uid) is record:
            self.register(new, replace=True)

    def forget(self, record: Record) -> None:
        """Its files are gone, and it is not in memory: its name is unknown from now on."""
        if record.node.gone and self._registry.live(record.node.uid) is record:
            self.remove(record.name)

    def records(self) -> list[Record]:
        """All adapters in service, in any order. Any thread may ask."""
        return self._registry.records()

    @property
    def in_memory(self) -> int:
        """How many adapters are not on the disk only."""
        return sum(not record.node.gone for record in self.records())

    def save(self) -> None:
        """Writes down when the adapters were used."""
        if self._catalogue is not None:
            self._catalogue.put([self._row(record) for record in self._registry.all() if record.path])

    def _write(self, *records: Record) -> None:
        """In one transaction, which waits for the disk once."""
        live = [record for record in records if record.path and self._registry.live(record.node.uid) is record]
        if self._catalogue is not None and live:
            self._catalogue.put([self._row(record) for record in live])

    def _row(self, record: Record) -> Row:
        assert self._catalogue is not None
        used = self._wall() - (self._clock() - record.last_used) if record.last_used else 0.0
        return row_of(record, self._catalogue.fits, used)

    # -- pins -----------------------------------------------------------------------------------

    def _pins(self, record: Record, old: Record | None = None, pinned: bool = False) -> Pins:
        """What the pins would be with this adapter, and without `old`; any adapter on the disk needs room, too."""
        pins = self._manager.pins(record.node if pinned else None, without=old and old.node)
        if not pins.pinned:
            return pins
        gone = (r.node.size for r in self._registry.records() if r.node.gone and r is not old and r is not record)
        own = 0 if pinned else record.node.size
        return replaced(pins, largest=max(pins.largest, own, max(gone, default=0)))

    def _check_pins(self, record: Record, pins: Pins) -> None:
        """Raises ResourceExhausted if the pins would leave no room for the longest context and any one adapter."""
        if not pins.fit:
            raise ResourceExhausted(
                f"adapter {record.name!r} of {record.node.size} blocks: pinned adapters would take {pins.pinned} "
                f"blocks, the largest other adapter {pins.largest} and the longest context {pins.longest}, together "
                f"more than the {pins.total} that the pool has for them; unpin one, or raise cache.hbm_blocks"
            )

    def _pin(self, record: Record, pinned: bool) -> None:
        fits = not pinned or self._scheduler.can_pin(record.node)
        if not (fits and self._manager.pin(record.node, pinned)):
            raise ResourceExhausted(
                f"adapter {record.name!r} needs {record.node.size} blocks to be pinned, which the pool cannot spare "
                "now; try again later, or raise cache.hbm_blocks"
            )
