"""Every study runs in miniature and leaves records that say what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import services, tables
from benchmarks.__main__ import GROUPS, STUDIES
from benchmarks.micro import arrivals, catalogue_tiers, exchange, host
from benchmarks.records import Cell, Records, control, ratios, read
from benchmarks.report import PAGES, render
from benchmarks.studies import cluster_migration, cluster_placement
from benchmarks.studies.cluster_routing import SIDES
from jlora.cli import BENCH, main
from jlora.engine.built import Built
from jlora.engine.engine import Engine
from jlora.sim.workloads.kinds import KINDS
from jlora.types import Timing, TokenEvent


def study(tmp_path: Path, name: str, *argv: str) -> list[dict[str, Any]]:
    """The records of one quick run."""
    words = ["bench", name, "--quick", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *argv]
    assert main(words) == 0
    (path,) = (tmp_path / "out").glob("*.jsonl")
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["environment"]["machine"]["cores"] >= 1 and head["environment"]["date"]
    assert all({"cell", "side", "round"} <= line.keys() for line in lines)
    return lines


def test_without_a_name_it_says_which_studies_there_are(capsys: pytest.CaptureFixture[str]):
    assert main(["bench"]) == 2
    said = capsys.readouterr().out
    assert all(name in said for name in (*GROUPS, *STUDIES))


@pytest.mark.slow
def test_the_cache_is_timed_at_every_size(tmp_path: Path):
    lines = study(tmp_path, "cache", "--rounds", "1")
    trees = [line for line in lines if line["side"] == "tree"]
    assert {line["policy"] for line in trees} == {"jlora", "fastlibra"} and len(trees) == 2
    for name in ("match", "admit", "swap in", "insert", "release", "round"):
        assert all(0 < line[f"{name} median"] <= line[f"{name} max"] for line in trees)
    assert all(line["step median"] > 0 for line in lines if line["side"] == "step")


@pytest.mark.slow
def test_adapters_by_blocks_and_dense_slots_are_timed_side_by_side(tmp_path: Path):
    lines = study(tmp_path, "lora")
    assert {line["side"] for line in lines} == {"blocks", "dense", "base"}
    assert len({line["cell"] for line in lines}) == 4 and all(line["seconds"] > 0 for line in lines)


@pytest.mark.slow
def test_whole_steps_are_timed_with_adapters_and_without(tmp_path: Path):
    lines = study(tmp_path, "price", "--rounds", "1")
    assert {line["side"] for line in lines} == {"base", "1 adapter", "8 adapters"}
    assert all(line["seconds"] > 0 for line in lines)
    assert render("price", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_an_empty_exchange_is_timed_in_every_form(tmp_path: Path):
    lines = study(tmp_path, "exchange")
    sides = ("programs", *exchange.CALLBACKS)
    assert {(line["cell"], line["side"]) for line in lines} == set(product(("1 x 64", "16 x 64"), sides))
    assert all(line["seconds"] > 0 for line in lines)
    assert render("exchange", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_both_fronts_send_the_same_deltas(tmp_path: Path):
    lines = study(tmp_path, "fronts", "--rounds", "1")
    sides = {line["side"]: line for line in lines}
    assert set(sides) == {"grpc", "http", "control"} and all(line["cpu_s_per_token"] > 0 for line in sides.values())
    assert all(0 < line["deltas_per_token"] <= 1 for line in sides.values())


@pytest.mark.slow
def test_refusals_are_counted_and_timed(tmp_path: Path):
    lines = study(tmp_path, "refusals", "--rounds", "1")
    assert [line["callers"] for line in lines] == [10, 100]
    assert all(line["refused"] > 0 and line["otherwise"] == 0 and 0 < line["p50_s"] <= line["p99_s"] for line in lines)


@pytest.mark.slow
def test_hostile_connections_are_counted_and_a_good_client_is_served(tmp_path: Path):
    (line,) = study(tmp_path, "abuse")
    assert line["side"] == "resets" and line["attack"]["resets"] > 100
    assert line["calls"]["OK"] > 0 < line["others"]["OK"] and line["calm_p50_s"] > 0


@pytest.mark.slow
def test_an_attacker_times_prompts_of_its_own_tenant_and_of_another(tmp_path: Path):
    own, other = study(tmp_path, "prefix-timing")
    assert (own["side"], other["side"]) == ("the same tenant", "another tenant")
    assert (own["auc_cached"], other["auc_cached"]) == (1.0, 0.5)
    assert own["asked_p50_s"] < own["unasked_p50_s"] and 0 <= other["auc_ttft"] <= 1
    assert render("prefix-timing", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_gaps_are_measured_under_attacks(tmp_path: Path):
    only = ["idle", "odd shapes", "FIFOs for files", "one id for all", "ListAdapters"]
    lines = study(tmp_path, "gaps", "--only", *only, "large adapters")
    assert [line["side"] for line in lines] == [*only, "idle", "large adapters"]
    assert all(line["messages"] > 0 and not line["failed"] and line["tokens_s"] > 0 for line in lines)
    assert set(lines[1]["answers"]) <= {"INVALID_ARGUMENT", "DATA_LOSS"} and lines[2]["answers"]["NOT_FOUND"] >= 8
    assert lines[3]["answers"]["ALREADY_EXISTS"] > lines[3]["answers"]["OK"] > 0 < lines[-1]["answers"]["OK"]
    assert render("gaps", tmp_path / "out", draw=False)
    (path,) = (tmp_path / "out").glob("*.jsonl")
    found = read(path)
    assert list(tables.gaps(found, "attacks")[""]) == only and "of 4 attacks" in tables.gaps_verdict(found)
    assert list(tables.gaps(found, "loads")[""]) == ["idle", "large adapters"]


@pytest.mark.slow
def test_gaps_are_measured_while_programs_compile_and_after(tmp_path: Path):
    during, after = study(tmp_path, "compiling")
    assert (during["side"], after["side"]) == ("while programs compile", "after")
    assert during["programs"] > 0 == after["programs"] and after["seconds"] >= during["seconds"]
    assert all(line["messages"] > 0 and not line["failed"] and line["tokens_s"] > 0 for line in (during, after))
    assert render("compiling", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_no_token_is_lost_or_doubled_while_replicas_are_killed(tmp_path: Path):
    lines = study(tmp_path, "failures")
    totals = [line for line in lines if line["side"] in ("clean in all", "killed in all")]
    assert len(totals) == 2 and all(line["answers"] > 0 for line in totals)
    assert [(line["wrong_tokens"], line["errors"]) for line in totals] == [(0, 0)] * 2
    clean, killed = totals
    assert killed["goodput"] > 0.2 * clean["goodput"], "the goal is 0.47 over ten minutes; these are a few seconds"
    assert any(line["side"] == "kill" for line in lines)


@pytest.mark.slow
def test_answers_pause_while_their_replica_is_away_and_lose_nothing(tmp_path: Path):
    lines = study(tmp_path, "pauses")
    sides = {line["side"]: line for line in lines}
    assert {"SIGKILL", "SIGSTOP"} <= sides.keys()
    assert sides["SIGKILL"]["back_s"] > 0.5 and sides["SIGSTOP"]["pause_max_s"] > 0.4, "silence is noticed after 0.5 s"
    pauses = [line["pause_max_s"] for line in lines if line["side"] in ("SIGKILL", "SIGSTOP")]
    assert max(pauses) < 5.0, "the goal of docs/results/pauses.md"
    total = sides["disturbed in all"]
    assert total["answers"] > 0 and (total["wrong_tokens"], total["errors"]) == (0, 0)
    assert render("pauses", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_host_time_is_counted_per_step(tmp_path: Path):
    lines = study(tmp_path, "host")
    loads = {(line["running"], line["queued"], line["adapters"]) for line in lines}
    assert loads == {(1, 0, 4), (4, 0, 4), (4, 32, 4), (4, 32, 12)} and len({line["side"] for line in lines}) == 5
    assert all(0 < line["step_s"] < 1 and line["steps"] == 8 for line in lines)
    assert ["device" in line["side"] for line in lines] == ["idle_s" in line for line in lines]
    assert render("host", tmp_path / "out", draw=False)


def test_a_device_waits_from_the_end_of_a_step_until_the_next_one_is_dispatched(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now))
    runner: Any = SimpleNamespace(run=lambda plan, swapper: SimpleNamespace(plan=plan, dispatched=0.0, stalled_s=0.0))
    plan: Any = None
    device = host.Device(runner)
    device.step_s = 2.0
    device.run(plan, plan)
    before = device.idle_s
    device.run(plan, plan)
    assert device.idle_s == before, "the first step still runs"
    now += 5.0  # both have ended after 4 s
    device.run(plan, plan)
    assert device.idle_s - before == 1.0


@pytest.mark.slow
def test_cold_starts_are_measured_by_their_way(tmp_path: Path):
    lines = study(tmp_path, "cold", "--rounds", "1")
    assert {line["side"] for line in lines} == {"wait", "stream", "cpu", "auto", "auto, file"}
    assert all(line["rehearsed_s"] > 0 for line in lines if line["side"] == "wait" and "at once" not in line["cell"])
    assert {kind for line in lines if line["side"] == "cpu" for kind in line["kinds"]} == {"cpu"}
    assert all(line["ttft_s"] > 0 for line in lines)


@pytest.mark.slow
def test_traffic_to_missing_adapters_is_compared_with_traffic_to_cached_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stepped: dict[bool, list[bool]] = {True: [], False: []}  # blocking -> whether copies were under way, step by step
    step, serve = Engine.step, arrivals.serve

    def watched(built: Built, requests: Any, blocks: bool = False) -> list[Timing]:
        def looked(engine: Engine) -> list[TokenEvent]:
            stepped[blocks].append(engine.copying)
            return step(engine)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", looked)
            return serve(built, requests, blocks)

    monkeypatch.setattr(arrivals, "serve", watched)
    lines = study(tmp_path, "arrivals", "--rounds", "1")
    assert stepped[True] and not any(stepped[True]) and any(stepped[False])
    each, skewed = arrivals.QUICK
    kinds = {(line["cell"], line["side"]): line["kinds"] for line in lines}
    assert kinds.keys() == {(case.name, side) for case in (each, skewed) for side in arrivals.SIDES}
    assert kinds[each.name, "cached"] == kinds[skewed.name, "cached"] == {"none": 6}
    assert kinds[each.name, "blocking"] == kinds[each.name, "wait"] == {"wait": 6}, "every adapter is missing"
    assert "cpu" in kinds[each.name, "cpu"] and "none" in kinds[skewed.name, "wait"]
    took = {line["side"]: line["ttft_s"] for line in lines if line["cell"] == each.name}
    assert 0 < took["cached"] < min(took["wait"], took["blocking"])
    assert all(line["tpot_s"] > 0 for line in lines)
    assert render("arrivals", tmp_path / "out", draw=False)


def test_traffic_is_the_same_every_time_and_comes_at_the_rate():
    case = replace(arrivals.CASES[0], requests=2000)
    one, other = (arrivals.traffic(case, 100) for _ in range(2))
    assert one == other and len({request.adapter for _, request in one}) == 2000
    gaps = np.diff([at for at, _ in one])
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(1 / case.rate, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "as of a Poisson process"
    skewed = arrivals.traffic(replace(case, skewed=True, requests=200), 100)
    assert len({request.adapter for _, request in skewed}) < 150


@pytest.mark.slow
def test_jlora_alone_is_measured_without_a_peer(tmp_path: Path):
    lines = study(tmp_path, "throughput", "--no-grpc")
    rounds = [line for line in lines if line["cell"] == "rounds"]
    assert [line["side"] for line in rounds] == ["jlora", "jlora"] and all(line["seconds"] > 0 for line in rounds)
    assert lines[-1]["compiles"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name, sides", [("latency", 4), ("alora", 2)])
def test_studies_on_the_engine_run(tmp_path: Path, name: str, sides: int):
    lines = study(tmp_path, name, "--minutes", "2")
    assert len({line["side"] for line in lines}) == sides
    assert not any(line.get("different") for line in lines)  # equal answers, whatever the side


@pytest.mark.slow
def test_the_simulated_study_runs_and_goes_on_where_it_stopped(tmp_path: Path):
    lines = study(tmp_path, "beyond", "--minutes", "1")
    assert {"jlora", "fastlibra", "clairvoyant", "vllm-fair:0.2"} <= {line["side"] for line in lines}
    assert [line["kind"] for line in lines if line["side"] == "anchors"] == ["cell", "hint"]
    assert study(tmp_path, "beyond", "--minutes", "0") == lines


@pytest.mark.slow
def test_two_checkouts_are_compared_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    here = str(Path(__file__).parents[2])
    lines = study(tmp_path, "compare", here, here, "--studies", "throughput")
    assert [line["side"] for line in lines] == ["old", "new", "new", "old"]
    assert {line["cell"] for line in lines} == {"throughput"}
    assert all(line["jlora seconds"] > 0 for line in lines)
    assert "jlora seconds" in capsys.readouterr().out, "the table is printed"


@pytest.mark.slow
def test_a_start_is_timed_with_and_without_compiled_programs(tmp_path: Path):
    cold, cached = study(tmp_path, "startup", "--rounds", "1")
    assert (cold["side"], cached["side"]) == ("cold", "cached") and min(cold["seconds"], cached["seconds"]) > 0


@pytest.mark.parametrize(
    "argv, says",
    [
        (["compare", "HEAD"], "give two commits"),
        (["compare", ".", ".", "--studies", "paper"], "--studies paper: must be of throughput"),
        (["compare", "nosuch", "HEAD"], "nosuch"),
        (["host", "HEAD"], "only compare takes commits"),
    ],
)
def test_a_wrong_comparison_is_one_clear_line(argv: list[str], says: str, tmp_path: Path, capsys):
    assert main(["bench", *argv, "--quick", "--out", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err


def test_records_of_the_same_settings_go_on_and_others_begin_anew(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    first = Records(path, {"a": 1})
    for i, seconds in enumerate((2.0, 2.2, 2.0)):
        Cell(first, "c").add({"ours": {"seconds": seconds}, "theirs": {"seconds": 2 * seconds}})
        assert len(Cell(Records(path, {"a": 1}), "c").rounds) == i + 1
    rows = read(path).rows
    assert ratios(rows, "theirs", "ours", "seconds").tolist() == [2.0, 2.0, 2.0]
    assert control(rows, "ours", "seconds") == pytest.approx((1.1 + 1 / 1.1) / 2)
    assert Records(path, {"a": 2}).lines == []


@pytest.mark.slow
def test_answers_from_the_disk_are_compared_with_an_engine_that_holds_one_adapter(tmp_path: Path):
    (line,) = study(tmp_path, "zipf")
    assert line["equal"] == line["checked"] == 12 and line["within"] and not line["failed"]
    assert line["requests"] == 48 and line["cold"] > 0 and line["dropped"] > 0


@pytest.mark.slow
def test_adapters_are_asked_for_in_the_tier_that_the_row_names(tmp_path: Path):
    lines = study(tmp_path, "tiers", "--rounds", "1")
    waited = {(line["side"], line["cold_start_s"] > 0) for line in lines if line["cell"] != "neighbours"}
    assert waited == {("DISK", True), ("HOST", True), ("HBM", False)}
    beside = {line["side"]: line for line in lines if line["cell"] == "neighbours"}
    assert set(beside) == {"hot", "this machine's disk", "500 MB/s", "50 MB/s"}
    assert all(line["asked"] == 4 and 0 < line["tpot_s"] <= line["slowest_tpot_s"] for line in beside.values())
    assert render("tiers", tmp_path / "out", draw=False)


def test_the_slowest_request_beside_a_load_is_compared_with_the_slowest_beside_none(tmp_path: Path):
    columns = ["over hot", "the slowest over hot's slowest"]
    for kept, known in ((["tpot_s", "ttft_s"], columns[:1]), (["tpot_s", "ttft_s", "slowest_tpot_s"], columns)):
        records = Records(tmp_path / "tiers-float32.jsonl", {"ranks": [8], "adapters": 4, "running": 2, "kept": kept})
        for slowest in (2.0, 4.0, 3.0):
            sides = {side: {"tpot_s": 1.0, "ttft_s": 9.0, "slowest_tpot_s": slowest} for side in ("hot", "50 MB/s")}
            sides["50 MB/s"]["slowest_tpot_s"] *= slowest
            told = {side: {key: sample[key] for key in kept} for side, sample in sides.items()}
            Cell(records, "neighbours").add(told)
        found = tables.beside(read(tmp_path / "tiers-float32.jsonl"))
        assert [name for name in found if name in columns] == known, "older files lack the slowest"
    assert found[columns[1]].tolist() == ["1.000 (1.000–1.000)", "3.000 (2.000–4.000)"]


@pytest.mark.slow
def test_registered_adapters_are_weighed_in_processes_of_their_own(tmp_path: Path):
    lines = study(tmp_path, "catalogue", "--rounds", "2")
    assert [line["side"] for line in lines] == ["scanned", "known"] * 2
    assert all(line["seconds"] > 0 and line["bytes"] > 0 and 0 < line["table_bytes"] < 10_000 for line in lines)
    assert render("catalogue", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_a_large_catalogues_adapters_are_asked_for_in_every_tier(tmp_path: Path):
    start, *lines = study(tmp_path, "catalogue-tiers")
    phases = [start[f"{name}_s"] for name in ("adapters", "weights", "programs", "rest")]
    assert start["cell"] == "start" and start["seconds"] == pytest.approx(sum(phases), rel=1e-4)
    assert [line["side"] for line in lines] == ["DISK", "HOST", "HBM"] * catalogue_tiers.QUICK.starts
    assert {(line["side"], line["kind"] != "") for line in lines} == {("DISK", True), ("HOST", True), ("HBM", False)}
    assert all((line["cold_start_s"] > 0) == (line["side"] != "HBM") for line in lines)
    assert {line["rank"] for line in lines} <= {8, 16, 32, 64}
    assert render("catalogue-tiers", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_switches_are_timed_and_proved(tmp_path: Path):
    lines = study(tmp_path, "switches", "--rounds", "1")
    assert {line["side"] for line in lines} == {"unmerged", "merged", "switch", "serving"}
    assert all(0 < line["unmerged_step_s"] <= line["merge_longest_s"] for line in lines if line["side"] == "serving")
    assert all(line["pieces"] == 8 and line["host_bytes"] > 0 for line in lines if line["side"] == "switch")


@pytest.mark.slow
def test_merging_is_compared_by_skew(tmp_path: Path):
    lines = study(tmp_path, "skew", "--rounds", "1")
    assert {line["cell"] for line in lines} == {"rank 4, 0.5", "rank 4, 1"}
    assert {line["side"] for line in lines} == {"off", "auto", "merged"}
    assert all(0 < line["mean_s"] and 0 < line["p90_s"] for line in lines)
    assert all((line["switches"] > 0) == (line["side"] == "merged") for line in lines if line["side"] != "auto")
    assert all((line["others_queue_s"] > 0) == (line["cell"] == "rank 4, 0.5") for line in lines)
    assert render("skew", tmp_path / "out", draw=False)


@pytest.mark.slow
def test_predicted_steps_are_kept_beside_what_they_took(tmp_path: Path):
    lines = study(tmp_path, "steps", "--set", "cache.host_blocks=2048")
    assert {line["cell"] for line in lines} == {"fit", "held", "quality"}
    assert {"ours", "padded", "unpadded", "noise"} < {line["side"] for line in lines if line["cell"] == "quality"}
    assert all(line["ours_s"] > 0 and min(line["seconds"]) > 0 for line in lines if line["side"] == "step")


@pytest.mark.slow
def test_a_page_comes_from_its_records_and_is_the_same_every_time(tmp_path: Path):
    study(tmp_path, "alora", "--rounds", "2")
    out = tmp_path / "out"
    assert main(["bench", "report", "--out", str(out)]) == 0
    page = (out / "alora.md").read_text()
    assert (out / "alora.png").stat().st_size > 1000
    assert main(["bench", "report", "--out", str(out)]) == 0
    assert (out / "alora.md").read_text() == page


def test_the_pages_of_this_repository_come_from_their_records(tmp_path: Path):
    results = Path(__file__).parents[2] / "docs" / "results"
    for path in results.glob("*.jsonl"):
        (tmp_path / path.name).symlink_to(path)
    for name in PAGES:
        if not (results / f"{name}.md").exists():  # nobody has measured it yet
            continue
        assert render(name, tmp_path, draw=False), f"{name} has no records"
        assert (tmp_path / f"{name}.md").read_text() == (results / f"{name}.md").read_text(), f"{name}.md is edited"


def test_the_page_of_starts_compares_two_commits_whatever_the_older_one_tells(tmp_path: Path):
    records = Records(tmp_path / "compare-startup-float32.jsonl", {"old": "aaa", "new": "bbb", "dtype": "float32"})
    old = {f"{start} {what}": 9.0 for start in ("cold", "cached") for what in ("seconds", "all_compiled_s")}
    phases = {f"{start} {what}_s": 1.5 for start in ("cold", "cached") for what in ("process", "weights", "programs")}
    for _ in range(2):
        Cell(records, "startup").add({"old": old, "new": {**old, **phases, "cached seconds": 4.5}})
    assert render("start-up", tmp_path, draw=False)
    rows = tables.startup(read(tmp_path / "compare-startup-float32.jsonl")).set_index(["start", "commit"])
    older, newer = rows.loc[("cached", "aaa")], rows.loc[("cached", "bbb")]
    assert (older["ready"], older["weights"], older["old / new"]) == ("9.0", "", "")
    assert (newer["ready"], newer["weights"], newer["programs"]) == ("4.5", "1.5", "1.5")
    assert newer["old / new"].startswith("2.00") and rows.loc[("cold", "bbb"), "ready"] == "9.0"


def test_a_page_of_results_names_a_study_that_is_there_or_says_that_it_left():
    for page in (Path(__file__).parents[2] / "docs" / "results").glob("*.md"):
        text = page.read_text()
        for name in re.findall(r"`(?:NPROC=1 )?jlora bench ([a-z-]+)", text):
            known = name in (*STUDIES, *GROUPS, *BENCH)
            assert known or f"no longer in the tree: `jlora bench {name}" in text.replace("NPROC=1 ", ""), page.name


def test_a_wheel_says_where_the_studies_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("jlora.cli.__file__", str(tmp_path / "site-packages" / "jlora" / "cli.py"))
    assert main(["bench", "throughput"]) == 2
    said = capsys.readouterr().out
    assert "Clone the repository" in said and "serve" in said


def test_routing_is_played_with_both_kernels_under_every_policy(tmp_path: Path):
    lines = study(tmp_path, "cluster-routing")
    assert {(line["kernel"], line["side"]) for line in lines} == {
        (kernel, side) for kernel in ("padded", "unpadded") for side in SIDES
    }
    assert all(line["unfinished"] == 0 and 0 < line["attainment"] <= 1 for line in lines)
    assert render("cluster-routing", tmp_path / "out", draw=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cluster-migration", "cluster-placement"])
def test_balance_and_placement_are_played_under_every_side(tmp_path: Path, name: str):
    lines = study(tmp_path, name)
    sides = cluster_migration.SIDES if name == "cluster-migration" else cluster_placement.SIDES
    assert {line["side"] for line in lines} == set(sides) and all(line["unfinished"] == 0 for line in lines)
    assert render(name, tmp_path / "out", draw=False)


def test_sides_that_are_asked_for_are_played_alone_and_a_page_joins_two_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "cluster-migration", "--quick", "--out", str(tmp_path), "--only", "nothing"]) == 1
    assert "--only nothing: must be of rr, dispatch" in capsys.readouterr().err
    assert {line["side"] for line in study(tmp_path, "cluster-migration", "--only", "rr")} == {"rr"}
    (path,) = (tmp_path / "out").glob("*.jsonl")
    path.with_name("cluster-migration-more.jsonl").write_text(path.read_text().replace('"rr"', '"dispatch"'))
    assert render("cluster-migration", tmp_path / "out", draw=False)
    rows = tables.together([read(file) for file in sorted((tmp_path / "out").glob("*.jsonl"))])
    shown = list(dict.fromkeys(zip(rows["kernel"], rows["side"], strict=True)))
    assert shown == [(kernel, side) for kernel in ("own", "unpadded") for side in ("dispatch", "rr")]


def test_policies_are_played_by_load_on_measured_steps(tmp_path: Path):
    lines = study(tmp_path, "cluster-load")
    assert [(line["cell"], line["rate"], line["side"]) for line in lines] == [
        ("Zipf", 4, "round-robin"),
        ("Zipf", 4, "jlora"),
    ]
    assert all(line["unfinished"] == 0 and 0 < line["busy"] <= 1 for line in lines)
    (path,) = (tmp_path / "out").glob("*.jsonl")
    assert list(services.over_turns(read(path), "Zipf").columns) == ["replicas", "4/s"]


@pytest.mark.slow
def test_six_kinds_of_traffic_are_played_with_both_kernels(tmp_path: Path):
    lines = study(tmp_path, "cluster-table")
    assert all(line["unfinished"] == 0 and 0 <= line["attainment"] <= 1 for line in lines)
    killed = [line for line in lines if line["cell"].endswith(services.KILLED)]
    lines = [line for line in lines if line not in killed]
    assert {line["cell"] for line in lines} == set(KINDS) and len(KINDS) == 6
    assert {line["kernel"] for line in lines} == {"padded", "unpadded"}
    assert {line["side"] for line in lines} == {"round-robin", "loraserve", "jlora", "dlora, all"}
    assert [line["side"] for line in killed] == ["jlora", "all three"]
    assert {line["lost"] for line in killed} == {1} and {line["lost"] for line in lines} == {0}
    (path,) = (tmp_path / "out").glob("*.jsonl")
    (row,) = services.killed(read(path)).to_dict("records")
    assert row["traffic"] == "Zipf" and row.keys() >= {"replicas", "jlora", "all three"}
