"""What is due when: open loop, closed loop, users, history and asides."""

from __future__ import annotations

import pytest

from jlora.sim.script import HISTORY, Script, user_of
from jlora.sim.trace import Trace, Turn, sped_up


def turn(at: float, session: int = 0, number: int = 0, **fields) -> Turn:
    return Turn(at, session, number, (10 * session + number + 3,), 2, None, **fields)


def fast(speed: float, *turns: Turn) -> Script:
    return Script(sped_up(Trace("", turns, ()), speed).turns)


def taken(script: Script, now: float) -> list[tuple[float, int, int]]:
    return [(due, t.session, t.turn) for due, t in script.take(now)]


def test_an_open_loop_turn_waits_for_its_time_and_for_its_sessions_answer():
    first, second, other = turn(0.0), turn(1.0, number=1), turn(0.5, session=1)
    script = Script([first, other, second])
    assert (len(script), script.next_due()) == (3, 0.0)
    assert taken(script, 0.0) == [(0.0, 0, 0)]
    assert taken(script, 9.0) == [(0.5, 1, 0)]
    assert script.next_due() is None and len(script) == 1  # the second turn waits for the first one's answer
    script.answered(first, [7], 4.0)
    assert script.next_due() == 4.0
    assert taken(script, 4.0) == [(4.0, 0, 1)]


def test_an_answer_before_its_time_leaves_the_next_turn_at_its_own():
    script = Script([turn(0.0), turn(5.0, number=1)])
    script.answered(script.take(0.0)[0][1], [7], 1.0)
    assert script.next_due() == 5.0


def test_a_closed_loop_turn_is_due_some_time_after_the_answer():
    script = Script([turn(0.0), turn(3.0, number=1, after=3.0)])
    script.answered(script.take(0.0)[0][1], [7], 20.0)
    assert script.next_due() == 23.0


def test_a_user_asks_one_thing_at_a_time_over_its_sessions():
    a, b = turn(0.0, session=1, user=0), turn(0.0, session=2, user=0, after=1.5)
    script = Script([a, b])
    assert taken(script, 100.0) == [(0.0, 1, 0)]
    script.answered(a, [7], 10.0)
    assert taken(script, 100.0) == [(11.5, 2, 0)]
    assert user_of(a) == user_of(b) == 0 and user_of(turn(0.0, session=4)) == 4


def test_speed_divides_times_and_thoughts():
    script = fast(2.0, turn(4.0), turn(8.0, number=1, after=4.0))
    assert script.next_due() == 2.0
    script.answered(script.take(2.0)[0][1], [7], 3.0)
    assert script.next_due() == 5.0


def test_a_prompt_is_what_was_said_and_heard():
    first, second = turn(0.0), turn(1.0, number=1)
    script = Script([first, second])
    script.take(0.0)
    assert script.prompt(first) == (3,)
    script.answered(first, [70, 71], 0.5)
    assert script.prompt(second) == (3, 70, 71, 4)


def test_an_aside_leaves_no_mark_and_a_failure_leaves_its_question():
    first, aside, last = turn(0.0), turn(0.0, number=1, aside=True), turn(0.0, number=2)
    script = Script([first, aside, last])
    script.take(0.0)
    script.answered(first, [], 1.0)
    assert script.prompt(aside) == (3, 4)
    script.take(1.0)
    script.answered(aside, [9], 2.0)
    assert script.prompt(last) == (3, 5)


def test_history_is_taken_first_and_does_not_move_the_clock():
    past, first = turn(-3.0, number=-1), turn(2.0, number=0, after=50.0)
    script = Script([past, first, turn(0.0, session=1)])
    assert taken(script, HISTORY) == [(-3.0, 0, -1)]
    script.answered(past, [8], -1.0)
    assert taken(script, HISTORY) == []
    assert taken(script, 2.0) == [(0.0, 1, 0), (2.0, 0, 0)]  # `after` counts from answers, and history has none


def test_history_is_history_at_any_speed():
    past, again = turn(-1e-6, number=-1), turn(-1e-7, session=1, number=-1, user=0)
    script = fast(1e6, past, again, turn(0.0, user=0))
    for session in (0, 1):
        ((_, one),) = script.take(HISTORY)
        assert one.session == session
        script.answered(one, [8], 2 * HISTORY)
    assert script.take(HISTORY) == [] and script.next_due() == 0.0


def test_only_a_taken_turn_is_counted_out():
    script = Script(turn(float(i), session=i) for i in range(3))
    assert len(script) == 3
    script.take(1.0)
    assert len(script) == 1


@pytest.mark.parametrize("count", [1, 7])
def test_turns_of_one_moment_keep_their_order(count: int):
    script = Script(turn(1.0, session=i) for i in range(count))
    assert [session for _, session, _ in taken(script, 1.0)] == list(range(count))
