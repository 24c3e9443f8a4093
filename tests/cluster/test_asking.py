"""Which adapters replicas are asked to fetch first."""

from __future__ import annotations

from jlora.cluster.asking import AGAIN_S, COMING, Asking

LACKING = [(f"a{i}@1", "r0") for i in range(3 * COMING)]


def test_adapters_that_cannot_come_hold_up_no_others():
    """The first ones never come. All are asked for before the first ones are again, also in the next time step."""
    asking, now = Asking(), 100.0
    rounds = []
    for turn in range(6):
        if turn == 1:
            asking.begin()
        rounds.append(list(asking.due(LACKING, now + turn * AGAIN_S)))
    assert [one for part in rounds for one in part] == 2 * LACKING
    assert all(len(part) == COMING for part in rounds)


def test_what_came_and_is_missing_again_is_asked_for_in_the_next_time_step():
    asking = Asking()
    (pair,) = asking.due(LACKING[:1], 0.0)
    assert not list(asking.due([], 1.0))
    assert not list(asking.due([pair], 2 * AGAIN_S))
    asking.begin()
    assert list(asking.due([pair], 2 * AGAIN_S)) == [pair]
