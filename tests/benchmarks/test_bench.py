"""`jlora bench` on a tiny model, for real: engine, gRPC server, peer process where PyTorch is."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.peers import estimate
from jlora.loadgen import rounds
from jlora.loadgen.checkpoints import R1, Job, draw_jobs

ROOT = Path(__file__).parents[2]
HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))


def run(tmp_path: Path, *argv: str) -> dict[str, dict]:
    """The results files by name."""
    folders = ["--quick", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert main([*argv, *folders, "--set", "engine.max_seqs=4", "--set", "engine.max_step_tokens=16"]) == 0
    return {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}


def test_throughput_measures_jlora_in_process_and_over_grpc(tmp_path: Path):
    result = run(tmp_path, "throughput")["throughput-float32"]
    assert len(result["rounds"]) == 2
    assert result["compiles_after_warmup"] == 0
    assert result["summary"]["jlora_tokens_per_s"] > 0 and result["summary"]["grpc_tokens_per_s"] > 0
    assert result["machine"]["cores"] >= 1 and result["versions"]["jax"]
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    assert result["commit"].rstrip("+") == (head.stdout.strip() if (ROOT / ".git").exists() else "")
    assert "R1: many requests at once" in (tmp_path / "out" / "cpu.md").read_text()


def test_host_time_is_reported_for_every_load(tmp_path: Path):
    result = run(tmp_path, "host")["host-float32"]
    assert [(x["running"], x["queued"]) for x in result["summary"]["loads"]] == [(1, 0), (4, 0), (4, 32)]
    assert all(x["step_s"] > 0 for x in result["summary"]["loads"])
    last = result["rounds"][-1]
    assert [(x["steps"], x["waiting"]) for x in last.values()] == [(8, 0), (8, 0), (8, 32)]


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, transformers, peft")
def test_peers_are_compared_with_equal_outputs(tmp_path: Path):
    results = run(tmp_path, "peers", "--peer-python", sys.executable, "--no-grpc")
    throughput, latency = results["throughput-float32"], results["latency-float32"]
    assert throughput["outputs"] == {**throughput["outputs"], "requests": 8, "different": 0}
    assert throughput["summary"]["ratio"]["median"] > 0
    assert {(row["case"], row["metric"]) for row in latency["summary"]} == {
        (f"{target} {n}", metric)
        for target in ("base", "adapter")
        for n in (8, 24)
        for metric in ("prefill_s", "step_s")
    }


def test_an_unknown_setting_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["throughput", "--quick", "--work", str(tmp_path), "--set", "engine.max_seq=4"]) == 1
    assert "engine.max_seqs" in capsys.readouterr().err


def test_a_peer_that_cannot_start_is_one_clear_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["throughput", "--quick", "--work", str(tmp_path), "--peer-python", "/bin/false"]) == 1
    assert "the peer ended with code 1" in capfd.readouterr().err


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path):
    calls = []

    def measure() -> rounds.Sample:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"seconds": 1.0}

    side = rounds.Side("a", measure)
    with pytest.raises(KeyboardInterrupt):
        rounds.interleave([side], rounds.Journal(tmp_path / "j", {"x": 1}), rounds.Budget(4, 60), "t")
    assert len(rounds.Journal(tmp_path / "j", {"x": 1}).rounds) == 2
    done = rounds.interleave([side], rounds.Journal(tmp_path / "j", {"x": 1}), rounds.Budget(4, 60), "t")
    assert len(done) == 4 and len(calls) == 5
    assert rounds.Journal(tmp_path / "j", {"x": 2}).rounds == []


def test_sides_take_turns_and_the_budget_of_time_ends_the_rounds(tmp_path: Path):
    order: list[str] = []
    sides = [rounds.Side(name, lambda name=name: order.append(name) or {"seconds": 1.0}) for name in "ab"]
    done = rounds.interleave(sides, rounds.Journal(tmp_path / "j", {}), rounds.Budget(5, minutes=0), "t")
    assert order == ["a", "b", "a", "b"]
    assert len(done) == 2


def test_ratios_are_taken_inside_a_round():
    done = [{"a": {"seconds": 1.0}, "b": {"seconds": 3.0}}, {"a": {"seconds": 2.0}, "b": {"seconds": 8.0}}]
    assert rounds.speed_ratio(done, "a", "b") == rounds.Ratio(3.5, 3.0, 4.0)
    assert rounds.control(done, "a") == 2.0 and not rounds.is_steady(2.0)
    assert math.isnan(rounds.control(done[:1], "a")) and not rounds.is_steady(float("nan"))


def test_an_estimate_pays_for_padding_and_for_the_longest_output():
    jobs = [Job(i, (1,) * n, m, None) for i, (n, m) in enumerate([(10, 5), (20, 9), (10, 3), (20, 1)])]
    probe = {"prefill_s": 1.0, "step_s": 0.1, "longest": 20}
    assert estimate(probe, 2, "prompt", jobs) == pytest.approx((0.5 + 0.4) + (1.0 + 0.8))
    assert estimate(probe, 2, "output", jobs) == pytest.approx((1.0 + 0.2) + (1.0 + 0.8))


def test_the_workload_is_the_one_in_the_target():
    jobs = draw_jobs(R1)
    assert len(jobs) == 128 and jobs == draw_jobs(R1)
    assert {job.adapter for job in jobs} == {f"a{i}" for i in range(8)}
    assert min(len(j.prompt) for j in jobs) >= 16 and max(len(j.prompt) for j in jobs) <= 512
    assert min(j.max_tokens for j in jobs) >= 8 and max(j.max_tokens for j in jobs) <= 256
    assert 120e6 < R1.spec.parameters < 130e6
