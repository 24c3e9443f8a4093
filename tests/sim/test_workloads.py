"""The built-in workloads: shapes that need no files, the same every time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from jlora.errors import ConfigError
from jlora.sim.script import Script, user_of
from jlora.sim.trace import Trace, Turn, facts
from jlora.sim.workloads import SERVICE_PROMPT, SOURCES, Load, closed, mixes, play, ranks
from jlora.sim.workloads.arrivals import gamma
from jlora.sim.workloads.popularity import distinct, identical, uniform

LOAD = Load(rate=5, seconds=60, gap_s=6, adapters=20, shrink=8, vocab=300, max_len=600)
ONE_REQUEST = ["W2", "W4", "W4b", "W5", "W7"]
SESSIONS = sorted(set(SOURCES) - set(ONE_REQUEST))


LONG = {"W1b": 16, "W8": 32}  # their lengths are divided by so much more


def draw(name: str, load: Load = LOAD) -> Trace:
    return play(SOURCES[name](None), replace(load, shrink=load.shrink * LONG.get(name, 1)))


def sessions(trace: Trace) -> dict[int, list[Turn]]:
    found: dict[int, list[Turn]] = {}
    for turn in trace.turns:
        found.setdefault(turn.session, []).append(turn)
    return found


@pytest.fixture(params=SOURCES)
def trace(request: pytest.FixtureRequest) -> Trace:
    return draw(request.param)


def test_a_seed_gives_one_trace(trace: Trace):
    name = trace.name.partition(" ")[0]
    assert draw(name) == trace and draw(name).digest() == trace.digest()
    assert draw(name, replace(LOAD, seed=1)).digest() != trace.digest()


def test_a_seed_gives_one_trace_in_any_process():
    code = """
from jlora.sim.workloads import SOURCES, Load, play
load = Load(rate=5, seconds=60, gap_s=6, adapters=20, shrink=8, vocab=300, max_len=600)
print(*(play(SOURCES[name](None), load).digest() for name in ("W1", "W4", "W6")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [draw(name).digest() for name in ("W1", "W4", "W6")], done.stderr


def test_the_rate_is_the_one_asked_for(trace: Trace):
    real = [turn for turn in trace.turns if turn.at >= 0]
    # In a minute of few sessions, bursts and cut sessions show.
    assert len(real) == pytest.approx(LOAD.rate * LOAD.seconds, rel=0.5)
    assert all(0 <= turn.at < LOAD.seconds for turn in real)
    assert [turn.at for turn in trace.turns] == sorted(turn.at for turn in trace.turns)


def test_a_context_stays_within_its_limit(trace: Trace):
    for turns in sessions(trace).values():
        length = 0
        for turn in turns:
            assert turn.adds and turn.output >= 1 and all(3 <= token < LOAD.vocab for token in turn.adds)
            # The history's answer of one token stands for what was answered, which is in its text.
            assert length + len(turn.adds) + turn.output <= LOAD.max_len + 1
            length += 0 if turn.aside else len(turn.adds) + turn.output


@pytest.mark.parametrize("name", ["W1", "W1b", "W3", "W8"])
def test_a_session_stays_with_its_adapter(name: str):
    for turns in sessions(draw(name)).values():
        assert len({turn.adapter for turn in turns}) == 1


@pytest.mark.parametrize("name", SESSIONS)
def test_history_comes_first_and_once(name: str):
    trace = draw(name)
    past = [turn for turn in trace.turns if turn.at < 0]
    assert past and all(turn.turn == -1 for turn in past)
    assert len({turn.session for turn in past}) == len(past)
    assert max(Counter(turn.session for turn in trace.turns).values()) > 2


def test_agents_of_an_adapter_share_its_service_prompt():
    starts: dict[int | None, set[tuple[int, ...]]] = {}
    for turns in sessions(draw("W3")).values():
        starts.setdefault(turns[0].adapter, set()).add(turns[0].adds[: SERVICE_PROMPT // LOAD.shrink])
    assert all(len(prompts) == 1 for prompts in starts.values())
    assert len({next(iter(prompts)) for prompts in starts.values()}) == len(starts)


def test_a_pipeline_is_base_then_checkers_aside_then_base():
    for turns in sessions(draw("W6")).values():
        groups = {turn.adapter // 3 for turn in turns if turn.adapter is not None}
        assert len(groups) <= 1  # the checkers of one pipeline
        assert all(turn.aside == (turn.adapter is not None) for turn in turns if turn.turn >= 0)
    found = facts(draw("W6"), 4, [8] * LOAD.adapters)
    assert found.bound_shared > found.bound + 0.03  # a checker reads what the base computed


def test_coding_agents_think_after_the_answer():
    trace = draw("W8", replace(LOAD, rate=10))
    later = [turn for turns in sessions(trace).values() for turn in turns[1:]]
    assert later and all(turn.after is not None and turn.after > 0 for turn in later)
    assert all(turn.after is None for name in ("W1", "W3", "W7") for turn in draw(name).turns)


def test_the_same_sessions_can_have_another_popularity():
    a, b = draw("W1"), draw("W1", replace(LOAD, popularity=identical))
    assert [(t.at, t.session, len(t.adds), t.output) for t in a.turns] == [
        (t.at, t.session, len(t.adds), t.output) for t in b.turns
    ]
    assert len({t.adapter for t in b.turns}) == 1 < len({t.adapter for t in a.turns})
    taking_turns = draw("W7", replace(LOAD, popularity=distinct))
    assert len({turn.adapter for turn in taking_turns.turns[:20]}) == 20


def test_arrivals_can_be_burstier():
    calm, bursty = (draw("W7", replace(LOAD, seconds=200, arrivals=gamma(cv))) for cv in (1.0, 6.0))
    sizes = [1] * LOAD.adapters
    assert facts(bursty, 4, sizes).burstiness > 2 * facts(calm, 4, sizes).burstiness


@pytest.mark.parametrize("adapters", [1, 20, 2000])
def test_any_number_of_adapters_can_be_served(adapters: int):
    for name in SOURCES:
        trace = draw(name, replace(LOAD, adapters=adapters))
        assert len(trace.adapters) == adapters
        assert all(turn.adapter is None or 0 <= turn.adapter < adapters for turn in trace.turns)


def test_users_ask_one_thing_at_a_time_and_lose_none():
    trace = draw("W3")
    loop = closed(trace, 4)
    assert {user_of(turn) for turn in loop.turns} == set(range(4))
    assert Counter((t.session, t.turn, t.adds) for t in loop.turns) == Counter(
        (t.session, t.turn, t.adds) for t in trace.turns
    )
    script, most, now = Script(loop.turns), 0, -1.0
    live: list[Turn] = []
    while script or live:
        live += [turn for _, turn in script.take(now)]
        most = max(most, len(live))
        if live:
            script.answered(live.pop(0), [5], now)
        else:
            now = script.next_due() or 0.0
    assert most == 4 and now > 0


def test_half_of_the_adapters_have_the_large_rank():
    assert Counter(ranks(LOAD)) == {4: 10, 8: 10}
    trace = draw("W7", replace(LOAD, popularity=uniform, adapters=50))
    assert Counter(mixes.ranks_of("8,16,32,64,128", trace, 0)) == dict.fromkeys((8, 16, 32, 64, 128), 10)
    assert mixes.ranks_of("8,16", trace, 0) != mixes.ranks_of("8,16", trace, 1)


def test_hot_adapters_can_have_the_high_ranks():
    trace = draw("W7")
    dealt = mixes.ranks_of("hot:8,64", trace, 0)
    low = [trace.asked[a] for a, rank in enumerate(dealt) if rank == 8]
    high = [trace.asked[a] for a, rank in enumerate(dealt) if rank == 64]
    assert len(low) == len(high) == 10 and max(low) <= min(high)


def test_a_wrong_mix_of_ranks_is_one_clear_line():
    for text in ("", "a,b", "0", "cold:8", "8,,16"):
        with pytest.raises(ConfigError, match="ranks"):
            mixes.ranks_of(text, Trace("", (), ("a",)), 0)


def test_a_load_that_leaves_little_says_why():
    with pytest.raises(ConfigError, match=r"W8 synthetic: only 0 of \d+ requests .* max_len 600 with --shrink 8"):
        play(SOURCES["W8"](None), LOAD)
    with pytest.raises(ConfigError, match=r"W1 synthetic: only [1-9]\d* of \d+ requests .* max_len 90 "):
        draw("W1", replace(LOAD, max_len=90))
    with pytest.raises(ConfigError, match="W7: no request within 0.001 s"):
        draw("W7", replace(LOAD, seconds=0.001))


@pytest.mark.parametrize("field", ["rate", "seconds", "adapters", "shrink", "max_len", "gap_s"])
def test_a_wrong_load_names_its_field(field: str):
    with pytest.raises(ConfigError, match=f"load {field}: 0"):
        replace(LOAD, **{field: 0})


def test_a_directory_without_the_traces_is_one_clear_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="topical_chat_dialogs"):
        SOURCES["W1"](tmp_path)
    with pytest.raises(ConfigError, match="sgd_dialogs"):
        SOURCES["W6"](tmp_path)
