"""The page lists the planted bugs that there are, as they are, with seeds that CI plays."""

from __future__ import annotations

from tests.sim.world import planted, table


def test_the_table_lists_every_planted_bug_and_no_other():
    bugs, seeds = planted.bugs(), table.seeds()
    assert list(seeds) == [bug.name for mended in (True, False) for bug in bugs if bug.mended is mended]
    assert table.written() == table.rendered(bugs, seeds), "python -m tests.sim.world.planted writes it"
    assert all(seeds[bug.name] in planted.SEEDS[bug.world] for bug in bugs)
