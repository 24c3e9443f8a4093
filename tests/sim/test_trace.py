"""What a trace says of itself, and a user's own file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jlora.errors import ConfigError
from jlora.sim.trace import COLUMNS, Trace, Turn, facts, read_csv

HEAD = ",".join(COLUMNS)


def write(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


def test_a_csv_becomes_turns_that_continue_their_session(tmp_path: Path):
    trace = read_csv(write(tmp_path, "10.0,8,4,de,s1", "12.5,15,2,de,s1", "11.0,6,1,,"), vocab=100)
    assert [turn.at for turn in trace.turns] == [0.0, 1.0, 2.5]
    first, other, second = trace.turns
    assert first.session == second.session != other.session
    assert (len(first.adds), len(second.adds), second.turn) == (8, 15 - (8 + 4), 1)
    assert trace.adapters == ("de",) and first.adapter == 0 and other.adapter is None
    assert all(3 <= token < 100 for turn in trace.turns for token in turn.adds)


def test_a_prompt_shorter_than_its_session_starts_anew(tmp_path: Path):
    trace = read_csv(write(tmp_path, "0,8,4,de,s1", "1,12,2,de,s1", "2,20,2,fr,s1"), vocab=100)
    assert len({turn.session for turn in trace.turns}) == 3
    assert [len(turn.adds) for turn in trace.turns] == [8, 12, 20]


@pytest.mark.parametrize(
    "text, says",
    [
        ("arrival_s,prompt_tokens\n0,1\n", "no column 'output_tokens'"),
        (f"{HEAD}\n0,1,1,a,s\n1,many,1,a,s\n", "line 3"),
        (f"{HEAD}\n0,0,1,a,s\n", "at least 1"),
        (f"{HEAD}\n0,1.5,1,a,s\n", "must be a whole number"),
        (f"{HEAD}\nnan,1,1,a,s\n", "line 2: arrival_s = 'nan': must be a number"),
        (f"{HEAD}\n0,1,1,a,s\n1,1,1,a,s,,\n", "line 3: has 7 fields: must be at most 5, as in the first line"),
    ],
)
def test_a_wrong_csv_is_one_clear_line(tmp_path: Path, text: str, says: str):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_csv(path, vocab=100)
    with pytest.raises(ConfigError, match="no.csv"):
        read_csv(tmp_path / "no.csv", vocab=100)


@pytest.mark.parametrize("seconds", [".1", "+0.1", " 0.1", "1e-1"])
def test_seconds_may_be_written_as_python_reads_them(tmp_path: Path, seconds: str):
    assert read_csv(write(tmp_path, "0,8,4,de,s1", f"{seconds},9,2,de,s2"), vocab=100).turns[1].at == 0.1


def test_a_column_that_is_not_used_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "mine.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,sesion\n0,8,4,a\n")
    assert len(read_csv(path, vocab=100).turns) == 1
    assert "not used: sesion; used: arrival_s" in caplog.text


def test_a_csv_of_a_spreadsheet_without_adapters_and_sessions_is_read(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text("\ufeffarrival_s,prompt_tokens,output_tokens\n0,8,4\n1,9,2\n", encoding="utf-8")
    trace = read_csv(path, vocab=100)
    assert [len(turn.adds) for turn in trace.turns] == [8, 9] and not trace.adapters
    assert len({turn.session for turn in trace.turns}) == 2
    path.write_bytes("arrival_s,prompt_tokens,output_tokens,adapter\n0,8,4,größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="mine.csv: is no CSV in UTF-8"):
        read_csv(path, vocab=100)


def test_facts_count_what_a_cache_of_any_size_would_find():
    # Two sessions share a first block of 4; the second turn of session 0 comes back to 3 full blocks.
    shared = (3, 4, 5, 6)
    turns = (
        Turn(0.0, 0, 0, (*shared, 7, 8), 4, 0),  # prompt 6, context 10
        Turn(1.0, 1, 0, (*shared, 9), 1, 0),  # finds 1 block of 5 tokens
        Turn(2.0, 0, 1, (10, 11, 12), 1, 0),  # prompt 13: finds 2 blocks
    )
    found = facts(Trace("t", turns, ("a",)), block_tokens=4, sizes=[5])
    # The block that its own answer filled is known, the one that holds the answer's last token is not.
    assert found.bound == pytest.approx((4 + 8) / (6 + 5 + 13))
    assert found.requests == 3 and found.sessions == 2 and found.top10 == 1
    # From 0 to 2 the shared block and the adapter are both needed again.
    assert (found.kv_blocks, found.adapter_blocks) == (1, 5)


def test_history_is_cached_but_not_counted():
    turns = (Turn(-1.0, 0, -1, tuple(range(3, 12)), 1, None), Turn(1.0, 0, 0, (40,), 1, None))
    found = facts(Trace("t", turns, ()), block_tokens=4, sizes=[])
    assert found.requests == 1 and found.prompt[0] == 11
    assert found.bound == pytest.approx(8 / 11)
    assert found.kv_blocks == 2


def test_an_aside_reads_its_context_and_leaves_nothing_there():
    base = (3, 4, 5, 6, 7, 8, 9, 10)
    turns = (
        Turn(0.0, 0, 0, base, 1, None),
        Turn(0.0, 0, 1, (11,), 1, 0, aside=True),  # prompt 10: nothing of its own adapter's KV yet
        Turn(0.0, 0, 2, (12,), 1, None),  # prompt 10: both blocks of the base
    )
    found = facts(Trace("t", turns, ("a",)), block_tokens=4, sizes=[5])
    assert found.prompt[0] == pytest.approx((8 + 10 + 10) / 3)
    assert found.bound == pytest.approx(8 / 28)
    assert found.bound_shared == pytest.approx((8 + 8) / 28)  # the aside, too


def test_the_last_token_of_a_prompt_is_always_computed():
    prompt = (3, 4, 5, 6, 7, 8, 9, 10)
    turns = tuple(Turn(float(i), i, 0, prompt, 1, None) for i in range(2))
    assert facts(Trace("t", turns, ()), block_tokens=4, sizes=[]).bound == pytest.approx(4 / 16)


def test_facts_know_how_often_a_recent_adapter_comes_back():
    turns = tuple(Turn(float(i), i, 0, (3,), 1, i % 12 if i < 24 else 11) for i in range(36))
    found = facts(Trace("t", turns, tuple("abcdefghijkl")), block_tokens=4, sizes=[1] * 12)
    assert found.recent10 == pytest.approx(12 / 36)  # in a round of 12 the last ten never help
    assert found.top10 == pytest.approx((14 + 9 * 2) / 36)


def test_a_trace_without_a_request_has_no_facts():
    with pytest.raises(ConfigError, match="has no request"):
        facts(Trace("t", (Turn(-1.0, 0, -1, (3,), 1, None),), ()), block_tokens=4, sizes=[])


def test_a_digest_names_the_work():
    turn = Turn(1.0, 0, 0, (3, 4), 2, 0)
    trace = Trace("t", (turn,), ("a",))
    assert trace.digest() == Trace("other name", (turn,), ("a",)).digest()
    others = [
        Trace("t", (turn, turn), ("a",)),
        Trace("t", (turn,), ("b",)),
        *(
            Trace("t", (replace(turn, **change),), ("a",))
            for change in ({"adds": (3, 5)}, {"after": 1.0}, {"output": 3})
        ),
    ]
    assert len({trace.digest(), *(other.digest() for other in others)}) == len(others) + 1


def test_the_facts_are_told_in_a_few_lines():
    text = facts(Trace("t", (Turn(1.0, 0, 0, (3, 4), 2, 0),), ("a",)), block_tokens=4, sizes=[5]).text("mine")
    assert text.startswith("mine: 1 requests of 1 sessions, 1.00/s") and "working set 0 blocks" in text
