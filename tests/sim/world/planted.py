"""Writes the table of planted bugs: `python -m tests.sim.world.planted`.

A row keeps its seed if that still finds the bug. Otherwise all seeds of CI are played until one does: some minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from jlora.sim.world import report
from tests.sim.world import table, test_cluster, test_planted, test_seeds
from tests.sim.world.table import Bug

SEEDS = {"engine": range(test_seeds.SEEDS), "cluster": test_cluster.SEEDS}


def bugs() -> dict[Bug, AbstractContextManager[None]]:
    """All planted bugs, each with what plants it."""
    found: dict[Bug, AbstractContextManager[None]] = {}
    for plant, says in test_planted.PLANTS.items():
        found[Bug.of(plant, "engine", plant in test_planted.MENDED, says)] = _engine(plant)
    for bug, says in test_cluster.PLANTED:
        found[Bug.of(bug, "cluster", bug in test_cluster.MENDED, says)] = _cluster(bug)
    return found


@contextmanager
def _engine(plant: test_planted.Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


@contextmanager
def _cluster(bug: test_cluster.Bug) -> Iterator[None]:
    with ExitStack() as patched:
        for patch in bug():
            patched.enter_context(patch)
        yield


def finder(bug: Bug, seeds: Sequence[int]) -> int:
    """The first seed that finds the bug. Raises StopIteration if none does."""
    played = report.run(bug.world, seeds, test_seeds.STEPS)
    return next(one.seed for one in played if re.search(bug.says, one.failure))


def main() -> None:
    known, found = table.seeds(), dict[str, int]()
    for bug, planted in bugs().items():
        first = [known[bug.name]] if bug.name in known else []
        with planted:
            found[bug.name] = finder(bug, [*first, *SEEDS[bug.world]])
        print(bug.world, bug.name, found[bug.name], flush=True)
    text = table.PAGE.read_text(encoding="utf-8")
    table.PAGE.write_text(text.replace(table.written(), table.rendered(bugs(), found)), encoding="utf-8")


if __name__ == "__main__":
    main()
