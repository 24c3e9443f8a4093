"""`jlora bench cache` in its quick size, and that what it measures is what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cache, growth, steps
from benchmarks.__main__ import main
from benchmarks.grove import Grove, Shape
from benchmarks.steps import StepLoad
from jlora.cache import inspect
from jlora.cache.tree import Origin


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick run."""
    out = tmp_path_factory.mktemp("results")
    assert main(["cache", "--quick", "--out", str(out), "--work", str(out / "work")]) == 0
    return out


def test_every_operation_is_timed_for_every_tree_and_load(results: Path):
    record = json.loads((results / "cache-python.json").read_text())
    assert [(r["nodes"], r["policy"]) for r in record["trees"]] == [(s.nodes, s.policy) for s in cache.QUICK.shapes]
    for row in record["trees"]:
        assert set(row["operations"]) == {
            *("match", "admit", "swap in", "insert", "release"),
            *("decide", "evict", "round", "drop"),
        }
        assert all(0 < times["median_us"] <= times["p99_us"] <= times["max_us"] for times in row["operations"].values())
        assert 0.9 * row["nodes"] <= row["kv_nodes"] <= 1.1 * row["nodes"]
    assert [(r["running"], r["queued"]) for r in record["loads"]] == [(2, 0), (8, 0), (8, 20)]
    assert {"what", "worst", "limit", "met"} == set(record["summary"]["targets"][0])


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = []

    def measure(kind, what, count) -> dict:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(what)
        return kind(what, count)

    monkeypatch.setattr(cache, "_apart", measure)
    with pytest.raises(KeyboardInterrupt):
        cache.run(cache.QUICK, tmp_path)
    monkeypatch.setattr(cache, "_apart", lambda kind, what, count: done.append(what) or kind(what, count))
    result = cache.run(cache.QUICK, tmp_path)
    cases = [*cache.QUICK.shapes, *cache.QUICK.loads]
    assert done == cases * 2, "everything was measured once in each of two rounds"
    assert len(result["trees"]) == len(cache.QUICK.shapes) and len(result["loads"]) == len(cache.QUICK.loads)


def test_each_operation_is_from_its_fastest_round(results: Path):
    record = json.loads((results / "cache-python.json").read_text())
    cases = [*record["trees"], *record["loads"]]
    assert [r["case"] for r in record["rounds"]] == 2 * list(range(len(cases)))
    for case, shown in enumerate(cases):
        tried = [r["row"] for r in record["rounds"] if r["case"] == case]
        for name, times in shown.get("operations", {"step": shown.get("step")}).items():
            rounds = [row["operations"][name] if "operations" in row else row["step"] for row in tried]
            assert times in rounds and times["median_us"] == min(r["median_us"] for r in rounds)


def test_the_page_has_the_tables_and_says_where_a_target_is_missed(results: Path):
    page = (results / "cpu.md").read_text()
    assert "R7: cost growth" in page and growth.FIGURE in page
    record = json.loads((results / "cache-python.json").read_text())
    record["summary"]["targets"][0] |= {"met": False}
    assert "**no**" in growth.section(record)


def test_without_matplotlib_there_are_numbers_and_one_line(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(growth.importlib.util, "find_spec", lambda name: None)
    record = json.loads((results / "cache-python.json").read_text())
    assert not growth.draw(record, tmp_path / "x.png")
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_figure_is_drawn(results: Path):
    pytest.importorskip("matplotlib")
    assert (results / growth.FIGURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("policy", ["jlora", "fastlibra"])
def test_a_grown_tree_is_sound_and_mostly_on_the_host(policy: str):
    grove = Grove(Shape(4000, 20, policy))
    grove.grow()
    inspect.check_idle(grove.manager)
    assert 0.9 * 4000 <= grove.nodes <= 1.1 * 4000
    assert grove.manager.device.history_kv < grove.nodes / 5
    for talk in grove.long:
        tokens = grove.tokens(talk)
        path = grove.manager.tree.match(Origin(talk.adapter), tokens, len(tokens))
        assert len(path) == grove.shape.long_blocks, "a long prompt is cached to its end"


def test_measuring_leaves_a_sound_cache_and_really_swaps(monkeypatch: pytest.MonkeyPatch):
    grove = Grove(Shape(3000, 10))
    grove.grow()
    before = grove.manager.counters.blocks_in
    times = cache.operations(grove, samples=11)
    assert len(times.taken["match"]) == 11 and len(times.taken["swap in"]) == 2
    assert grove.manager.counters.blocks_in - before > grove.shape.long_blocks / 2
    assert not grove.manager.leases.live


def test_the_scheduler_is_measured_while_every_slot_decodes():
    decoding = steps.Decoding(StepLoad(4, 3, 2))
    assert len(decoding.scheduler.running) == 4
    before = [len(s.tokens) for s in decoding.scheduler.running]
    for _ in range(5):
        assert decoding.step() > 0
    assert [len(s.tokens) for s in decoding.scheduler.running] == [n + 5 for n in before]
    assert decoding.scheduler.waiting == 3
