"""A peak is found to the factor asked for, in few runs, or given up."""

from __future__ import annotations

import math

import pytest

from benchmarks.studies.peaks import Bracket, find_best, find_peak


class Replica:
    """Bears rates up to its peak."""

    def __init__(self, peak: float):
        self.peak = peak
        self.asked: list[float] = []

    def over(self, rate: float) -> bool:
        self.asked.append(rate)
        return rate > self.peak


@pytest.mark.parametrize(
    "peak, bracket",
    [
        (0.5, Bracket(0.0, 3.0, 1.3)),
        (2.9, Bracket(0.0, 3.0, 1.3)),
        (3.0, Bracket(3.0, math.inf, 1.3)),
        (3.01, Bracket(3.0, math.inf, 1.06)),
        (11.0, Bracket(3.0, math.inf, 1.3)),
        (1.7, Bracket(1.0, 3.02, 1.3)),
    ],
)
def test_a_peak_is_found_to_the_factor_asked_for_in_few_runs(peak: float, bracket: Bracket):
    replica = Replica(peak)
    found = find_peak(replica.over, bracket, 1.03)
    assert found <= peak < 1.03 * found * 1.001
    assert len(replica.asked) <= 12 and len(set(replica.asked)) == len(replica.asked)


def test_a_bracket_that_is_close_enough_takes_no_run():
    replica = Replica(3.0)
    assert find_peak(replica.over, Bracket(2.95, 3.02, 1.3), 1.03) == 2.95 and not replica.asked


def test_a_peak_that_is_not_there_is_given_up():
    assert find_peak(Replica(0.0).over, Bracket(0.0, 3.0, 1.3), 1.03) == pytest.approx(0.3, rel=0.3)
    assert find_peak(Replica(math.inf).over, Bracket(3.0, math.inf, 1.3), 1.03) == pytest.approx(30.0, rel=0.3)


@pytest.mark.parametrize(
    ("valley", "tried"), [(3, [2, 3, 4]), (0, [0, 1, 2, 3, 4]), (6, [2, 3, 4, 5, 6]), (5, [2, 3, 4, 5, 6])]
)
def test_the_best_choice_is_looked_for_outward_until_it_has_a_worse_one_on_both_sides(valley: int, tried: list[int]):
    asked: list[float] = []

    def cost(choice: float) -> float:
        asked.append(choice)
        return abs(choice - valley)

    assert find_best(cost, [0, 1, 2, 3, 4, 5, 6], slice(2, 5)) == valley
    assert sorted(asked) == tried and len(asked) == len(set(asked))
