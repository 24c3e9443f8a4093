"""`jlora bench serve` for real: servers in processes of their own, configurations in turn."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jlora import machine
from jlora.cli import main as jlora
from jlora.loadgen import cli, report, sides
from jlora.loadgen.player import Call
from jlora.loadgen.rounds import Budget, Sample, Side, Unfinished, measure
from jlora.loadgen.sample import Slo
from jlora.loadgen.sample import sample as sampled
from jlora.loadgen.server import ServerProcess, flags_of
from jlora.serve.access import keys
from jlora.sim.trace import COLUMNS, Turn
from tests import _make

FEW_SHAPES = {"engine.max_seqs": 2, "engine.max_step_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a model with the adapters "de" and "sql"."""
    root = tmp_path_factory.mktemp("served")
    spec = _make.make_model(root / "base")
    for seed, name in enumerate(("sql", "de"), 1):
        _make.make_adapter(root / name, spec, seed=seed, r=4, targets=("q", "v"))
    return ["--model", str(root / "base"), *flags_of({name: str(root / name) for name in ("sql", "de")}, FEW_SHAPES)]


@pytest.fixture(scope="module")
def server(model: list[str]) -> Iterator[str]:
    """HOST:PORT of a server."""
    with ServerProcess([*model, *flags_of({}, {"engine.max_queue": 6})]) as process:
        yield process.address


def run(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """The JSON of one run."""
    assert jlora(["bench", "serve", *argv, "--out", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("*.json")
    return json.loads(path.read_text())


def trace(tmp_path: Path, *rows: str) -> str:
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    return str(path)


@pytest.mark.slow
def test_a_running_server_and_one_started_here_play_one_trace_in_turn(model: list[str], server: str, tmp_path: Path):
    paths = dict(pair.split("=") for flag, pair in pairwise(model) if flag == "--adapter")
    settings = {**FEW_SHAPES, **{f"adapters.paths.{name}": path for name, path in paths.items()}}
    argv = ["--target", f"ours={server}", "--config", "lru=cache.policy=lru", "--model", model[1]]
    argv += ["--set", *(f"{key}={value}" for key, value in settings.items()), "--work", str(tmp_path)]
    argv += ["--workload", "W3", "--shrink", "32", "--gap", "0.2", "--rate", "10", "--seconds", "3", "--speed", "2"]
    found = run(tmp_path, *argv, "--rounds", "2")
    assert [list(r) for r in found["rounds"]] == [["ours", "lru"]] * 2
    sides = found["settings"]["sides"]
    assert sides["ours"]["config"]["cache.policy"] == "jlora" and sides["lru"]["config"]["cache.policy"] == "lru"
    for r in found["rounds"]:
        for sample in r.values():
            assert sample["status"] == {"OK": found["facts"]["requests"]} and not sample["errors"]
            assert sample["different"] == 0  # the same greedy answers under every policy
            assert sample["cached_tokens"] > 0 and sample["ttft_s"] > 0 and len(sample["latency"]["cdf"]) == 101
    assert found["summary"]["ours"]["ratio"]["ttft_s"]["median"] == 1
    assert found["summary"]["lru"]["control"] > 0
    assert found["machine"]["cores"] >= 1 and found["versions"]["jax"] and found["settings"]["trace"]["digest"]
    assert list((tmp_path / "out").glob("serve-W3-synthetic-*.png"))
    assert not list(tmp_path.glob("serve-*.jsonl"))  # nothing is left to continue


@pytest.mark.slow
def test_a_random_model_and_its_adapters_are_written_and_served(tmp_path: Path):
    file = tmp_path / "few.toml"
    file.write_text("[engine]\nmax_seqs = 2\n")
    argv = ["--config", f"few={file}", "--model", "random-tiny", "--random-adapters", "3", "--ranks", "2,4"]
    argv += ["--set", "engine.max_step_tokens=8", "--work", str(tmp_path / "work")]
    found = run(tmp_path, *argv, "--trace", trace(tmp_path, "0,20,4,a0,s", "0.1,10,6,a2,t", "0.2,10,3,,"))
    side = found["settings"]["sides"]["few"]
    assert side["model"] == "random-tiny" and side["config"]["engine.max_seqs"] == "2"
    assert found["rounds"][0]["few"]["status"] == {"OK": 3} and found["settings"]["adapters"] == ["a0", "a2"]


def test_the_command_of_the_results_page_is_understood():
    page = Path(__file__).parents[2] / "docs" / "results" / "serve-W1.md"
    found = re.search(r"`jlora bench serve ([^`]*)`", page.read_text())
    assert found
    args = cli.parser().parse(shlex.split(found[1]))
    assert len(args.config) == 5 and "model.dtype=float32" in args.set and args.random_adapters == 50


def test_an_interrupt_that_reaches_the_servers_too_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    class Killed(ServerProcess):
        def __init__(self, flags: list[str]):
            assert flags == ["--model", "DIR", "--set", "cache.policy=lru"]
            self.address = "127.0.0.1:1"

        def stop(self) -> None:
            raise RuntimeError("the server's exit code after SIGTERM was -15")

    async def look(address: str, login: object) -> str:
        return address

    monkeypatch.setattr(sides, "ServerProcess", Killed)
    monkeypatch.setattr(sides, "look", look)
    args = cli.parser().parse(["--config", "a=cache.policy=lru", "--model", "DIR"])
    with pytest.raises(KeyboardInterrupt), sides.servers(args) as found:
        assert found == {"a": "127.0.0.1:1"}
        raise KeyboardInterrupt


def test_an_interrupted_run_continues_after_its_finished_rounds(tmp_path: Path):
    path, calls = tmp_path / "unfinished.jsonl", itertools.count(1)

    def side() -> Sample:
        if (number := next(calls)) == 4:
            raise KeyboardInterrupt
        return {"run": number}

    both = [Side("a", side), Side("b", side)]
    with pytest.raises(KeyboardInterrupt):
        measure(Unfinished(path, {"x": 1}), "", both, Budget(3, 60))
    path.write_text(path.read_text() + '{"a": {"ru')  # a process that died while it wrote
    journal = Unfinished(path, {"x": 1})
    measure(journal, "", both, Budget(3, 60))
    assert journal.rounds == [{"a": {"run": n}, "b": {"run": n + 1}} for n in (1, 5, 7)]
    assert Unfinished(path, {"x": 1}).rounds == journal.rounds and not Unfinished(path, {"x": 2}).rounds


@pytest.mark.slow
def test_a_running_server_is_asked_for_its_own_adapters(server: str, tmp_path: Path):
    path = trace(tmp_path, "0,20,4,de,s", "0.1,40,4,de,s", "0.1,10,6,sql,t", "0.2,10,3,,")
    found = run(tmp_path, "--target", f"here={server}", "--trace", path)
    (sample,) = (r["here"] for r in found["rounds"])
    assert {row["adapter"]: row["requests"] for row in sample["adapters"]} == {"de": 2, "sql": 1, "": 1}
    assert sample["prompt_tokens"] == 20 + 40 + 10 + 10 and sample["cached_tokens"] > 0
    assert list((tmp_path / "out").glob("serve-mine-*.json"))


@pytest.mark.slow
def test_a_server_with_keys_is_measured_with_one_of_them(model: list[str], tmp_path: Path):
    key, entry = keys.new("ops", "admin", ["*"])
    (tmp_path / "keys.toml").write_text(entry)
    with ServerProcess([*model, "--keys", str(tmp_path / "keys.toml")]) as process:
        argv = ["--target", f"here={process.address}", "--trace", trace(tmp_path, "0,20,4,de,s", "0.1,10,3,,")]
        assert run(tmp_path, *argv, "--key", key)["rounds"][0]["here"]["status"] == {"OK": 2}
        assert jlora(["bench", "serve", *argv]) == 1, "it says UNAUTHENTICATED"


@pytest.mark.slow
def test_a_refused_request_is_counted_and_shown(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    burst = [f"0,30,60,sql,s{i}" for i in range(40)]  # the queue holds 6, and 2 run
    found = run(tmp_path, "--target", f"here={server}", "--trace", trace(tmp_path, *burst))
    sample = found["rounds"][0]["here"]
    assert sample["status"]["RESOURCE_EXHAUSTED"] > 0 and sample["status"]["OK"] >= 4
    assert sum(sample["status"].values()) == 40
    assert sample["attained"] <= sample["status"]["OK"] / 40
    told = capsys.readouterr().out
    assert "x RESOURCE_EXHAUSTED: " in told and "queue" in told


def test_users_in_a_closed_loop_do_not_overrun_it(server: str, tmp_path: Path):
    argv = ["--workload", "W7", "--shrink", "16", "--rate", "10", "--seconds", "3", "--users", "4"]
    found = run(tmp_path, "--target", server, *argv)
    (sample,) = found["rounds"][0].values()
    assert sample["status"] == {"OK": found["facts"]["requests"]}
    assert found["settings"]["trace"]["users"] == 4


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--target", "127.0.0.1"], "must be HOST:PORT"),
        (["--target", "127.0.0.1:1"], "no jlora server at 127.0.0.1:1"),
        (["--target", "a=127.0.0.1:1", "--config", "a="], "two sides have one name"),
        (["--config", "a"], "--config a: must be NAME=FILE.toml or NAME=section.key=value,..."),
        (["--config", "a=max_seqs=4"], "setting 'max_seqs=4' must be section.key=value"),
        ([], "nothing to measure"),
    ],
)
def test_a_wrong_side_is_one_clear_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert jlora(["bench", "serve", *argv]) == 1
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_what_does_not_fit_the_server_is_refused(server: str, capsys: pytest.CaptureFixture[str]):
    assert jlora(["bench", "serve", "--target", server, "--workload", "W4", "--rate=20"]) == 1
    assert "context of 128 tokens: give --shrink" in capsys.readouterr().err
    assert jlora(["bench", "serve", "--target", server, "--adapters", "fr"]) == 1
    assert "--adapters fr: is not on every server; they have de, sql" in capsys.readouterr().err


def test_a_side_that_answers_nothing_is_not_the_fastest(tmp_path: Path):
    """Its times are no numbers: null in the JSON, "-" on the page, and no ratio."""
    good = [Call(Turn(i, i, 0, (3,), 1, 0), "a", i, i, i + 0.1, i + 0.1, i + 0.1, [7]) for i in range(3)]
    bad = [Call(Turn(i, i, 0, (3,), 1, 0), "a", i, i, ended=i + 0.2, status="UNAVAILABLE") for i in range(3)]
    empty = {"cache": {"adapter_hits": 0.0}, "different": 0}
    done = [{side: {**sampled(calls, Slo(), 0), **empty} for side, calls in (("up", good), ("down", bad))}]
    settings = {"trace": {"name": "t", "digest": "d"}, "slo": asdict(Slo())}
    result = {"settings": settings, "machine": machine.describe(), "versions": {}, "rounds": done}
    summary = {side: cli.summarise(done, side, "up") for side in done[0]}
    report.write(tmp_path, {**result, "summary": summary})
    (path,) = tmp_path.glob("serve-t-*.json")
    found = json.loads(path.read_text())
    assert found["summary"]["up"]["ttft_s"] == pytest.approx(0.1)
    assert found["summary"]["down"]["ttft_s"] is found["summary"]["down"]["ratio"]["ttft_s"]["median"] is None
    assert found["summary"]["down"]["goodput_per_s"] == 0


def test_a_round_without_an_answer_is_left_out_of_the_times():
    numbers = ("requests_per_s", "tokens_per_s", "goodput_per_s", "attained", "ttft_s", "tpot_s")
    rounds = [{"a": {**dict.fromkeys(numbers, 1.0), "ttft_s": value}} for value in (0.2, math.nan, 0.4)]
    found = cli.summarise(rounds, "a", "a")
    assert found["ttft_s"] == pytest.approx(0.3) and found["ratio"]["ttft_s"]["median"] == 1
    assert math.isnan(found["control"])
