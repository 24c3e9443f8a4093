"""Flags -> the trace that a load run replays, within what a server can take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jlora.errors import ConfigError
from jlora.loadgen import trace as load_trace
from jlora.loadgen import workloads as workload_facts
from jlora.loadgen.cli import limits_of
from jlora.loadgen.server import Server
from jlora.loadgen.trace import Limits, draw, models
from jlora.serve.flags import Parser
from jlora.serve.proto import jlora_pb2 as pb
from jlora.sim.script import user_of
from jlora.sim.trace import COLUMNS, Trace, facts, longest, shrunk
from jlora.sim.workloads import flags

SERVER = Limits(max_len=512, vocab=300, adapters=["sql", "de", "fr"])


def drawn(*argv: str, limits: Limits = SERVER) -> Trace:
    made = Parser("test", "")
    flags.add(made, load_trace.DRAWN)
    args = made.parse(list(argv))
    flags.check(args)
    return draw(args, limits)


def csv(tmp_path: Path, *rows: str) -> str:
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    return str(path)


@pytest.mark.parametrize("name", ["W1", "W3", "W6", "W7", "W8"])
def test_a_workload_that_is_too_long_says_which_shrink_would_do(name: str):
    argv = ["--workload", name, "--rate", "10", "--gap", "4"]
    with pytest.raises(ConfigError, match=f"workload {name}: .* context of 512 tokens: give --shrink") as e:
        drawn(*argv)
    shrink = re.search(r"--shrink (\d+)", str(e.value))
    assert shrink
    trace = drawn(*argv, "--shrink", shrink[1])
    assert longest(trace) <= 512 + 1
    assert all(3 <= token < 300 for turn in trace.turns for token in turn.adds)
    if int(shrink[1]) > 2:  # and half of it would not
        with pytest.raises(ConfigError, match="give --shrink"):
            drawn(*argv, "--shrink", str(int(shrink[1]) // 2))


def test_a_trace_of_ones_own_is_taken_whole_or_refused(tmp_path: Path):
    path = csv(tmp_path, "0,600,40,de,s", "5,700,60,de,s", "9,20,4,,")
    with pytest.raises(
        ConfigError, match="a request of 760 tokens exceeds the server's context of 512: give --shrink 2"
    ):
        drawn("--trace", path)
    trace = drawn("--trace", path, "--shrink", "2")
    assert [(len(turn.adds), turn.output) for turn in trace.turns] == [(300, 20), (30, 30), (10, 2)]
    assert trace == shrunk(drawn("--trace", path, limits=Limits(4096, 300, SERVER.adapters)), 2)


def test_adapters_go_by_name_where_all_are_there_and_else_in_turn():
    assert models(Trace("t", (), ("fr", "sql")), SERVER) == ["fr", "sql"]
    assert models(Trace("t", (), ("x", "y")), SERVER) == ["sql", "de"]


def test_names_that_the_server_lacks_share_its_adapters_in_turn(tmp_path: Path):
    trace = drawn("--trace", csv(tmp_path, *(f"{i},40,4,x{i}," for i in range(5)), "9,40,4,,"))
    assert trace.name == "mine, 5 names dealt to 3"
    assert [turn.adapter for turn in trace.turns] == [0, 1, 2, 0, 1, None]
    assert models(trace, SERVER) == ["sql", "de", "fr"]
    assert facts(trace, 16, [1, 1, 1]).adapters == 3


def test_a_trace_of_known_and_unknown_adapters_is_refused(tmp_path: Path):
    many = Limits(512, 300, ["fr", *(f"b{i}" for i in range(5000))])
    with pytest.raises(ConfigError, match="asks for adapter 'nosuch', which is not on every server") as e:
        drawn("--trace", csv(tmp_path, "0,40,4,fr,", "1,40,4,nosuch,"), limits=many)
    assert "they have fr, b0, b1, " in str(e.value) and "and 4993 more" in str(e.value) and len(str(e.value)) < 250


def test_a_built_in_workload_takes_whatever_names_a_server_has():
    """Its own are placeholders, and one of them may be a server's by chance."""
    limits = Limits(512, 300, ["sql", "a1", "a7"])
    assert models(drawn("--shrink", "2", limits=limits), limits) == ["sql", "a1", "a7"]


def test_speed_is_part_of_the_trace_and_its_facts(tmp_path: Path):
    path = csv(tmp_path, "0,40,4,de,s", "8,60,4,de,s")
    slow, fast = drawn("--trace", path), drawn("--trace", path, "--speed", "4")
    assert fast.turns[1].at == 2 and fast.digest() != slow.digest()
    assert facts(fast, 16, [1]).rate == 4 * facts(slow, 16, [1]).rate


def test_the_base_model_alone_can_be_loaded(tmp_path: Path):
    bare = Limits(512, 300, [])
    trace = drawn("--trace", csv(tmp_path, "0,40,4,,"), limits=bare)
    assert len(trace.turns) == 1 and models(trace, bare) == []
    with pytest.raises(ConfigError, match="no adapters to ask for"):
        drawn("--trace", csv(tmp_path, "0,40,4,de,"), limits=bare)


def test_more_users_than_sessions_are_refused(tmp_path: Path):
    path = csv(tmp_path, "0,40,4,de,s", "1,60,4,de,s", "2,40,4,de,t")
    assert drawn("--trace", path, "--users", "2").users == 2
    with pytest.raises(ConfigError, match="--users 3: must be at most 2, the sessions of trace mine; a larger --sec"):
        drawn("--trace", path, "--users", "3")


def test_activated_adapters_are_not_asked_for():
    info = pb.ServerInfo(max_model_len=64, vocab=100)
    servers = [
        Server("a", info, {"sql": 4, "judge": 4}, frozenset({"judge"})),
        Server("b", info, {"judge": 4, "sql": 4}),
    ]
    assert limits_of(servers, None).adapters == ["sql"]
    with pytest.raises(ConfigError, match="--adapters judge: is an activated LoRA"):
        limits_of(servers, ["judge"])


def test_a_closed_loop_and_a_law_can_be_asked_for():
    trace = drawn("--workload", "W7", "--rate", "20", "--shrink", "2", "--users", "3", "--popularity", "distinct")
    assert {user_of(turn) for turn in trace.turns} == {0, 1, 2}
    plain = drawn("--workload", "W7", "--rate", "20", "--shrink", "2", "--popularity", "distinct")
    assert len({turn.adapter for turn in plain.turns[:3]}) == 3


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--users", "-1"], "--users -1"),
        (["--shrink", "0"], "--shrink 0"),
        (["--rate", "0"], "--rate 0: must be above 0"),
        (["--popularity", "zipff"], "popularity 'zipff'"),
        (["--arrivals", "gama:2"], "arrivals 'gama:2'"),
        (["--trace", "no.csv"], "no.csv"),
        (["--speed", "0"], "--speed 0"),
        (["--rate", "inf"], "--rate inf: must be above 0, and finite"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--seconds", "0.001"], "workload W7: no request within 0.001 s at 1/s"),
        (
            ["--trace", "no.csv", "--workload", "W7"],
            "--workload W7: shapes a named workload, and cannot be given with --trace no.csv",
        ),
        (["--trace", "no.csv", "--rate", "1"], "--rate 1.0: shapes"),
        (["--trace", "no.csv", "--seconds", "60"], "--seconds 60.0: shapes"),
        (["--trace", "no.csv", "--gap", "2"], "--gap 2.0: shapes"),
        (["--trace", "no.csv", "--popularity", "uniform"], "--popularity uniform: shapes"),
        (["--trace", "no.csv", "--arrivals", "poisson"], "--arrivals poisson: shapes"),
        (["--workload", "W6a", "--shrink", "16"], "--workload W6a: invokes activated LoRAs"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(argv: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        drawn(*argv)


def test_a_server_without_adapters_cannot_be_loaded():
    with pytest.raises(ConfigError, match="no adapters to ask for"):
        drawn(limits=Limits(512, 300, []))


@pytest.mark.slow
def test_the_facts_of_workloads_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert workload_facts.main(["W7", "W8", "--seconds", "60"]) == 0
    told = capsys.readouterr().out
    assert "W7: " in told and "W8 synthetic, lengths / 16: " in told and told.count("working set") == 2
    assert workload_facts.main(["--trace", csv(tmp_path, "0,40,4,de,s", "1,60,4,fr,t")]) == 0
    assert "mine: 2 requests of 2 sessions" in capsys.readouterr().out
    assert workload_facts.main(["W9"]) == 1
    assert "'W9': must be one of W1, " in capsys.readouterr().err
    for wrong in (["--rate", "4"], ["--adapters", "50"], ["W7"]):
        assert workload_facts.main(["--trace", "mine.csv", *wrong]) == 1
        assert f"jlora bench workloads: {wrong[0]}" in capsys.readouterr().err
