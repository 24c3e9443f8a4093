"""The sliding maximum of the last minute."""

from __future__ import annotations

from jlora.gaps import WINDOW_S, Gaps
from tests import port


def test_the_longest_gap_leaves_with_its_minute():
    now = [1000.0]
    gaps = Gaps(lambda: now[0])
    assert gaps.longest() == 0.0
    gaps.note(0.5)
    gaps.note(0.2)
    assert gaps.longest() == 0.5
    now[0] += WINDOW_S / 2
    gaps.note(0.3)
    assert gaps.longest() == 0.5
    now[0] += WINDOW_S / 2 + 1
    assert gaps.longest() == 0.3
    now[0] += WINDOW_S
    assert gaps.longest() == 0.0


def test_many_gaps_take_little_room():
    now = [0.0]
    gaps = Gaps(lambda: now[0])
    for i in range(100_000):
        now[0] = i / 100
        gaps.note(1.0 / (i + 1))
    assert port.gap_records(gaps) <= WINDOW_S + 1
