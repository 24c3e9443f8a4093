"""A replica that starts again: the adapters that its catalogue has are there, under the digests that it had."""

from __future__ import annotations

from collections.abc import Sequence

from jlora.adapters.catalogue import Row
from jlora.adapters.registry import AdapterRegistry
from jlora.config import Config
from jlora.engine import sources
from jlora.engine.built import Built
from jlora.sim.world.disk import Disk
from jlora.sim.world.struck import Struck


def begin(built: Built, config: Config) -> None:
    """Registers what the catalogue knows, as a start does; on a task, for it reads the disk."""
    found = sources.find(config, built.reader, built.catalogue, False)
    built.engine.adapters.begin_with(found)


def check_kept(rows: Sequence[Row], registry: AdapterRegistry) -> None:
    """The catalogue has what was in service when its process closed. Raises AssertionError."""
    known = {row.name: (row.uid, row.digest) for row in rows}
    served = {record.name: (record.node.uid, record.digest) for record in registry.records() if record.path}
    assert known == served, f"the catalogue has {known}, and the replica served {served}"


def check_there(rows: Sequence[Row], registry: AdapterRegistry, disk: Disk, struck: Struck, since: float) -> None:
    """What was known is known again, unless its files are others, or could not be read. Raises AssertionError."""
    there = {record.name: record for record in registry.records()}
    for row in rows:
        record = there.get(row.name)
        if record is None:
            excused = disk.digest(row.path) != row.digest or struck.disturbed(row.path, since)
            assert excused, f"adapter {row.name} is not known after a start"
        elif row.digest:
            assert (record.node.uid, record.digest) == (row.uid, row.digest), f"{row.name} is another after a start"
