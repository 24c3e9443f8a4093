"""`jlora sim`: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jlora import __version__, machine
from jlora.cli import main
from jlora.sim import cli
from jlora.sim.observe import Observer
from jlora.sim.scenario import Scenario, Work
from jlora.step_model import FORMAT, StepModel

SHORT = ["sim", "--workload", "W3", "--rate", "4", "--seconds", "8", "--gap", "10", "--adapters", "20"]


def test_a_run_prints_the_workloads_facts_and_a_row_per_policy(capsys: pytest.CaptureFixture[str]):
    assert main([*SHORT, "--hbm-share", "0.25", "--link-gbps", "2", "--policy", "jlora", "vllm-fair:0.3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("W3 synthetic: ") and "working set" in "".join(lines)
    assert any("1 x npu, llama-2-7b" in line and "link 2 GB/s" in line for line in lines)
    head, *rows = lines[-5:-2]
    assert lines[-1].startswith("simulated in: jlora ")
    assert "TTFT ms" in head and "KV host" in head
    assert [row.split()[0] for row in rows] == ["jlora", "vllm-fair:0.3"]


def test_the_json_holds_everything_and_is_the_same_for_the_same_seed(tmp_path: Path):
    texts = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.json"
        assert main([*SHORT, "--policy", "jlora", "--chip", "h200", "--model", "llama-3-8b", "--json", str(path)]) == 0
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]
    record = json.loads(texts[0])
    (run,) = record["runs"]
    assert run["setting"]["chip"] == "h200" and len(run["requests"]["rows"]) == record["facts"]["requests"]
    assert len(run["requests"]["columns"]) == len(run["requests"]["rows"][0])


def test_the_json_says_what_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    assert main([*SHORT, "--policy", "jlora", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert f"trace {record['digest']}" in capsys.readouterr().out
    flags = record["flags"]
    assert flags["workload"] == "W3" and flags["rate"] == 4 and flags["hbm_gb"] == 0 and flags["policy"] == ["jlora"]
    assert record["version"] == __version__ and record["commit"] == machine.commit()


def test_a_users_own_trace_and_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.csv"
    rows = [f"{i * 0.5},{40 + 30 * (i % 3)},8,sql,s{i // 3}" for i in range(9)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,adapter,session", *rows]))
    assert main(["sim", "--trace", str(path), "--policy", "jlora", "--users", "2"]) == 0
    assert "mine, 2 users: 9 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--policy", "jlra"], "nearest is 'jlora'"),
        (["--set", "serve.port=1"], "must be cache.KEY=VALUE or engine.KEY=VALUE"),
        (["--set", "cache.polcy=lru"], "nearest valid key is 'cache.policy'"),
        (["--hbm-gb", "-1"], "--hbm-gb -1: must be at least 0"),
        (["--hbm-gb", "1", "--hbm-share", "0.5"], "hbm_share"),
        (["--model", "llama-34b"], "use more --chips"),
        (["--popularity", "zpf"], "popularity 'zpf'"),
        (["--steps", "none.json"], "none.json"),
        (["--users", "-1"], "--users -1: must be at least 1, or 0 for an open loop"),
        (["--shrink", "0"], "--shrink 0: must be at least 1"),
        (["--speed", "0"], "--speed 0: must be above 0"),
        (["--arrivals", "gama:2"], "arrivals 'gama:2'"),
        (["--speed", "inf"], "--speed inf: must be above 0, and finite"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--link-gbps", "inf"], "--link-gbps inf: must be at least 0, and finite"),
        (["--host-gb", "inf"], "--host-gb inf: must be at least 0, and finite"),
        (["--host-gb", "nan"], "--host-gb nan: must be at least 0, and finite"),
        (["--users", "900"], "--users 900: must be at most "),
        (["--json", "nodir/out.json"], "--json nodir/out.json: nodir is no directory"),
        (["--json", "/"], "--json /: cannot be written"),
        (["--migrate"], "--migrate: needs a router: set --replicas to 2 or more"),
        (["--place", "loraserve"], "--place: needs a router"),
        (["--route", "jlora"], "--route: needs a router"),
        (["--late"], "--late: needs a router"),
        (["--kernel", "padded"], "--kernel: needs a router"),
        (["--slo-ms", "40"], "--slo-ms: needs a router"),
        (["--delay-ms", "0"], "--delay-ms: needs a router"),
        (["--fetch-gbps", "10"], "--fetch-gbps: needs a router"),
        (["--path-gbps", "10"], "--path-gbps: needs a router"),
        (["--place-s", "5"], "--place-s: needs a router"),
        (["--migrate-s", "5"], "--migrate-s: needs a router"),
        (["--users", "4", "--policy", "clairvoyant"], "--policy clairvoyant: needs the times of an open loop"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([*SHORT, *flags]) == 1
    out, error = capsys.readouterr()
    assert message in error and error.startswith("jlora sim: ") and error.count("\n") == 1
    assert "--policy" not in flags or out == ""  # known before a trace is drawn


@pytest.mark.parametrize("flag", ["--rate", "--seconds", "--gap"])
def test_a_workload_has_finite_numbers(flag: str, capsys: pytest.CaptureFixture[str]):
    for command in ("sim", "bench serve --target 127.0.0.1:1"):
        assert main([*command.split(), flag, "inf"]) == 1
        assert f"{flag} inf: must be above 0, and finite" in capsys.readouterr().err


def test_one_replica_takes_the_defaults_of_many():
    defaults = ["--kernel", "own", "--slo-ms", "0", "--delay-ms", "0.5", "--fetch-gbps", "0", "--path-gbps", "0"]
    assert main([*SHORT, "--policy", "jlora", *defaults, "--place-s", "60", "--migrate-s", "1"]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--workload", "W1"],
        ["--rate", "2"],
        ["--seconds", "300"],
        ["--gap", "1"],
        ["--adapters", "100"],
        ["--popularity", "uniform"],
        ["--arrivals", "poisson"],
        ["--data", "files"],
    ],
)
def test_what_shapes_a_workload_is_refused_beside_a_trace(flags: list[str], capsys: pytest.CaptureFixture[str]):
    """Also where the value is the default: who gives it expects that it counts."""
    assert main(["sim", "--trace", "mine.csv", *flags]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith(f"jlora sim: {' '.join(flags)}")
        and "shapes a named workload, and cannot be given with --trace mine.csv" in error
    )


def test_a_trace_that_is_missing_or_too_long_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["sim", "--trace", "none.csv"]) == 1
    assert "none.csv" in capsys.readouterr().err
    path = tmp_path / "mine.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,adapter,session\n0,8000,100,sql,s\n")
    assert main(["sim", "--trace", str(path), "--policy", "jlora"]) == 1
    error = capsys.readouterr().err
    assert "8100 tokens exceeds llama-2-7b's context of 4096: give --shrink 2" in error
    assert main(["sim", "--trace", str(path), "--policy", "jlora", "--shrink", "2"]) == 0
    assert "prompts of 4000" in capsys.readouterr().out


def test_requests_that_do_not_fit_and_users_without_one_are_told(capsys: pytest.CaptureFixture[str]):
    argv = ["sim", "--workload", "W8", "--shrink", "16", "--rate", "2", "--policy", "lru"]
    assert main([*argv, "--seconds", "30", "--users", "20"]) == 0
    out = capsys.readouterr().out
    requests = int(re.findall(r"(\d+) requests of", out)[0])
    lost, every = map(int, re.findall(r"\n(\d+) of (\d+) requests do not fit the context", out)[0])
    assert every - lost == requests and lost > 0
    assert re.search(r"\nonly 1\d of 20 users have a request", out)


def test_an_interrupt_leaves_the_rows_of_what_was_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real, played = cli.simulate, []

    def simulate(scenario: Scenario, work: Work, policy: str, observers: Sequence[Observer]) -> dict[str, Any]:
        if len(played) == 2:
            raise KeyboardInterrupt
        played.append(policy)
        return real(scenario, work, policy, observers)

    monkeypatch.setattr(cli, "simulate", simulate)
    assert main([*SHORT, "--policy", "jlora", "lru", "slora"]) == 130
    rows = capsys.readouterr().out.splitlines()[-4:-2]
    assert [row.split()[0] for row in rows] == ["jlora", "lru"]


def test_measured_steps_without_a_device_need_the_chip(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The file has no memory and no link; those of another card would give wrong results in silence."""
    path = tmp_path / "step.json"
    names = [field.name for field in dataclasses.fields(StepModel)]
    coefficients = dict.fromkeys(names, 1e-5)
    record = {"format": FORMAT, "model": "llama-2-7b", "chips": 1, "coefficients": coefficients}
    path.write_text(json.dumps(record))
    assert main([*SHORT, "--policy", "jlora", "--steps", str(path)]) == 1
    assert "names no memory and no link: give --chip, of npu, a100" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cluster", "plan", *SHORT[1:], "--slo-ms", "50", "--steps", str(path)])
    assert "names no memory and no link: give --chip" in capsys.readouterr().err
    assert main([*SHORT, "--policy", "jlora", "--steps", str(path), "--chip", "h100"]) == 0
    assert "1 x h100, llama-2-7b" in capsys.readouterr().out


@pytest.mark.parametrize("name, shrink", [("W1b", "8"), ("W8", "16")])
def test_long_workloads_run_with_shorter_lengths(name: str, shrink: str, capsys: pytest.CaptureFixture[str]):
    argv = ["sim", "--workload", name, "--rate", "2", "--seconds", "10", "--gap", "1", "--adapters", "8"]
    assert main([*argv, "--policy", "jlora"]) == 1
    assert "raise --shrink" in capsys.readouterr().err
    assert main([*argv, "--policy", "jlora", "--shrink", shrink]) == 0
    assert column(capsys.readouterr().out, "unfinished") == "0"


def test_a_closed_loop_asks_all_however_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Requests of W7 have no gaps: all of them are due at once, as far as the trace can say."""
    path = tmp_path / "out.json"
    argv = ["sim", "--workload", "W7", "--rate", "4", "--seconds", "30", "--users", "4", "--policy", "jlora"]
    assert main([*argv, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert column(out, "unsent") == column(out, "unfinished") == "0"
    record = json.loads(path.read_text())
    (run,) = record["runs"]
    assert len(run["requests"]["rows"]) == record["facts"]["requests"] > 50
    assert run["device"]["seconds"] > 60
    assert 50 < len(run["series"]["at"]) <= 400


def test_a_trace_of_ones_own_can_be_played_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.csv"
    rows = [f"{i},40,8,sql,s{i}" for i in range(9)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,adapter,session", *rows]))
    assert main(["sim", "--trace", str(path), "--policy", "jlora", "--speed", "4"]) == 0
    assert "mine: 9 requests of 9 sessions, 4.50/s" in capsys.readouterr().out


def column(out: str, name: str) -> str:
    """Of the table's one policy; names of columns are two spaces apart."""
    head, row = out.splitlines()[-4:-2]
    names = re.split(r"\s{2,}", head.strip())
    return row.split()[names.index(name)]


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--polcy", "lru"])
    assert ended.value.code == 2 and "--policy" in capsys.readouterr().err
