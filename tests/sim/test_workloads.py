"""The built-in workloads: shapes that need no files, the same every time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from jlora.errors import ConfigError
from jlora.sim.trace import Trace
from jlora.sim.workloads import SERVICE_PROMPT, SOURCES, Load, play, ranks

LOAD = Load(rate=5, seconds=60, gap_s=6, adapters=20, shrink=8, vocab=300, max_len=600)


@pytest.fixture(params=SOURCES)
def trace(request: pytest.FixtureRequest) -> Trace:
    return play(SOURCES[request.param](None), LOAD)


def test_a_seed_gives_one_trace(trace: Trace):
    source = SOURCES[trace.name[:2]](None)
    assert play(source, LOAD) == trace
    assert play(source, replace(LOAD, seed=1)) != trace


def test_the_rate_is_the_one_asked_for(trace: Trace):
    real = [turn for turn in trace.turns if turn.at >= 0]
    assert len(real) == pytest.approx(LOAD.rate * LOAD.seconds, rel=0.3)
    assert all(0 <= turn.at < LOAD.seconds for turn in real)
    assert [turn.at for turn in trace.turns] == sorted(turn.at for turn in trace.turns)


def test_a_session_stays_with_its_adapter_and_below_the_context(trace: Trace):
    length: Counter[int] = Counter()
    adapter: dict[int, int | None] = {}
    for turn in trace.turns:
        assert adapter.setdefault(turn.session, turn.adapter) == turn.adapter
        length[turn.session] += len(turn.adds) + turn.output
        assert turn.adds and turn.output >= 1
    assert max(length.values()) <= LOAD.max_len + 1  # the history's answer is one token
    assert max(Counter(turn.session for turn in trace.turns).values()) > 2


def test_history_comes_first_and_once(trace: Trace):
    past = [turn for turn in trace.turns if turn.at < 0]
    assert past and all(turn.turn == -1 for turn in past)
    assert len({turn.session for turn in past}) == len(past)


def test_popularity_is_zipf(trace: Trace):
    sessions = {turn.session: turn.adapter for turn in play(SOURCES["W3"](None), replace(LOAD, rate=50)).turns}
    shares = [count / len(sessions) for _, count in Counter(sessions.values()).most_common()]
    expected = [1 / i**0.9 for i in range(1, LOAD.adapters + 1)]
    assert shares[0] == pytest.approx(expected[0] / sum(expected), rel=0.3)
    assert shares[0] > 3 * shares[len(shares) // 2]


def test_agents_of_an_adapter_share_its_service_prompt():
    starts: dict[int | None, set[tuple[int, ...]]] = {}
    seen: set[int] = set()
    for turn in play(SOURCES["W3"](None), LOAD).turns:
        if turn.session not in seen:
            starts.setdefault(turn.adapter, set()).add(turn.adds[: SERVICE_PROMPT // LOAD.shrink])
            seen.add(turn.session)
    assert all(len(prompts) == 1 for prompts in starts.values())
    assert len({next(iter(prompts)) for prompts in starts.values()}) == len(starts)


def test_half_of_the_adapters_have_the_large_rank():
    assert Counter(ranks(LOAD)) == {4: 10, 8: 10}


def test_a_directory_without_the_traces_is_one_clear_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="topical_chat_dialogs"):
        SOURCES["W1"](tmp_path)
    with pytest.raises(ConfigError, match="sgd_dialogs"):
        SOURCES["W3"](tmp_path)
