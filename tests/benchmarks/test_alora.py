"""`jlora bench alora` on a tiny model, for real; and its arithmetic."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import alora, alora_page, pipelines, pipelines_page
from benchmarks.__main__ import main
from benchmarks.alora import ALONE, SHARED, Step


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of one quick run."""
    folder = tmp_path_factory.mktemp("alora")
    (folder / "out").mkdir()
    (folder / "out" / alora_page.PAGE).write_text(f"# Mine\n\nWhat I read.\n\n{alora_page.MARK}\nof an earlier run\n")
    assert main(["alora", "--quick", "--out", str(folder / "out"), "--work", str(folder / "work")]) == 0
    return folder


def record(results: Path) -> dict:
    return json.loads((results / "out" / "alora-float32.json").read_text())


def test_both_sides_run_the_same_pipelines_and_only_one_shares(results: Path):
    cells = record(results)["cells"]
    assert [(cell["context"], cell["adapters"], cell["sessions"]) for cell in cells] == [(96, 2, 1), (64, 1, 2)]
    for cell in cells:
        assert len(cell["rounds"]) == 2
        for done in cell["rounds"]:
            shared, alone = done[SHARED], done[ALONE]
            assert shared["different"] == alone["different"] == shared["compiles"] == alone["compiles"] == 0
            assert shared["base_hit_tokens"] > 0 == alone["base_hit_tokens"]
            assert shared["check_hit_rate"] > 0.7 > alone["check_hit_rate"]
            assert shared["kv_bytes"] < alone["kv_bytes"]
            assert all(side[f"{who}_ttft_s"] > 0 for side in done.values() for who in ("check", "base"))


def test_ratios_are_made_inside_a_round(results: Path):
    for cell in record(results)["cells"]:
        found = sorted(r[ALONE]["check_ttft_s"] / r[SHARED]["check_ttft_s"] for r in cell["rounds"])
        ratio = cell["ratios"]["check_ttft_s"]
        assert (ratio["low"], ratio["high"]) == pytest.approx((found[0], found[-1]))


def test_the_page_keeps_what_a_person_wrote_above_the_mark_and_names_the_papers_figures(results: Path):
    page = (results / "out" / alora_page.PAGE).read_text()
    assert page.startswith("# Mine\n\nWhat I read.") and "of an earlier run" not in page
    for words in (
        "| 96, 2 | ",
        "| 64, 1, 2 pipelines at once | ",
        "up to 58",
        "over 100",
        "| activated | ",
        "| lora | ",
    ):
        assert words in page


def test_both_sides_have_the_same_weights(results: Path):
    shared, alone = (results / "work" / "quick-alora" / f"{side}-1-r4" for side in (SHARED, ALONE))
    weights = [(path / "adapter_model.safetensors").read_bytes() for path in (shared, alone)]
    assert weights[0] == weights[1]
    tokens = json.loads((shared / "adapter_config.json").read_text())["alora_invocation_tokens"]
    assert tokens == list(alora.invocation(alora.QUICK_SPEC, 1))
    assert "alora_invocation_tokens" not in json.loads((alone / "adapter_config.json").read_text())


def test_means_count_every_request_once_and_hits_by_token():
    steps = [
        Step("a", [1], prompt=100, cached=80, queue=0.1, prefill=0.2, ttft=0.3, end_to_end=1.3),
        Step("a", [1], prompt=300, cached=0, queue=0.3, prefill=0.4, ttft=0.7, end_to_end=1.7),
    ]
    found = alora.means(steps)
    assert found["hit_rate"] == 0.2 and found["decode_s"] == pytest.approx(1.0)
    assert found["queue_s"] == pytest.approx(0.2) and found["end_to_end_s"] == pytest.approx(1.5)


def test_a_full_run_varies_context_adapters_and_pipelines_at_once():
    setup = alora.full(alora.Budget(5, 13), Path("work"))
    assert {cell.context for cell in setup.cells} == {512, 1024, 2048, 4096}
    assert {cell.adapters for cell in setup.cells} == {1, 5, 10} and setup.adapters == 10
    assert max(cell.sessions for cell in setup.cells) > 1
    longest = max(alora._longest(setup, cell) for cell in setup.cells)
    assert longest < setup.spec.max_len


# -- the simulated part ---------------------------------------------------------------------------


def simulated(results: Path) -> dict:
    return json.loads((results / "out" / "pipelines-simulated.json").read_text())


def test_one_command_simulates_the_same_pipelines_too(results: Path):
    cells = simulated(results)["cells"]
    assert [(cell["sweep"], cell["context"], cell["adapters"]) for cell in cells] == [
        ("context", 512, 2),
        ("rate", 512, 2),
    ]
    for cell in cells:
        ours, theirs = cell[SHARED], cell[ALONE]
        assert ours["check_hit_rate"] > 0.9 > 0.5 > theirs["check_hit_rate"]
        assert ours["prompt_tokens"] < theirs["prompt_tokens"] and ours["kv_bytes"] < theirs["kv_bytes"]
        assert cell["ratios"]["check_ttft_s"] == pytest.approx(theirs["check_ttft_s"] / ours["check_ttft_s"], rel=1e-4)
        assert cell["ratios"]["check_ttft_s"] > 2 and cell["ratios"]["pipeline_s"] > 1


def test_the_simulated_part_is_the_same_every_time_and_written_apart(results: Path):
    out = results / "out"
    before, cells = (out / alora_page.PAGE).read_text(), simulated(results)["cells"]
    assert main(["pipelines", "--quick", "--out", str(out), "--work", str(results / "work")]) == 0
    after = (out / alora_page.PAGE).read_text()
    assert simulated(results)["cells"] == cells
    head, mark, _ = after.partition(alora_page.SIMULATED)
    assert mark and before.partition(alora_page.SIMULATED)[0] == head
    assert after.count("### By ") == 2 and after.count("up to 58") == 2
    assert (f"({pipelines_page.FIGURE})" in after) == (find_spec("matplotlib") is not None)
    alora_page.write(out, record(results))
    page = (out / alora_page.PAGE).read_text()
    assert page.startswith("# Mine\n\nWhat I read.") and page.count("### By ") == 2 and page.count(alora_page.MARK) == 1


def test_the_papers_sizes_are_simulated_long_large_and_crowded():
    assert {cell.sweep for cell in pipelines.CELLS} == set(pipelines_page.SWEEPS)
    assert {cell.context for cell in pipelines.CELLS} >= {512 << i for i in range(8)}  # to 64k
    assert {cell.adapters for cell in pipelines.CELLS} >= {1, 10}
    for cell in pipelines.CELLS:
        pool = pipelines.hardware(cell.model, cell.chips).pool_bytes
        spec = pipelines.make_replica(cell).spec
        assert (spec.sizes.device + 1) * pipelines.hardware(cell.model, cell.chips).layout.block_bytes > pool
        assert (cell.context + 1024) // spec.sizes.block_tokens + sum(spec.adapters) < spec.sizes.device


def test_random_starts_have_the_rate_that_is_asked_for():
    cell = pipelines.Cell("rate", *pipelines.SMALL, 512, pipelines=400, rate=2.0)
    starts = cell.starts()
    assert starts == cell.starts() == sorted(starts) and starts[0] == 0.0
    assert len(starts) == 400 and starts[-1] == pytest.approx(200, rel=0.15)
