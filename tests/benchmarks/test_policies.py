"""`jlora bench policies` on a tiny trace, for real: two policies, one device, two tiers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import policies, policy_page
from benchmarks.__main__ import main
from benchmarks.policies import PAPER_TOKEN_BYTES, PAPER_TOKEN_S
from benchmarks.replay import Ask, requests
from jlora.config import POLICIES
from jlora.sim.trace import Turn
from jlora.types import Usage


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of one quick run."""
    folder = tmp_path_factory.mktemp("policies")
    (folder / "out").mkdir()
    (folder / "out" / policy_page.PAGE).write_text(f"# Mine\n\nWhat I read.\n\n{policy_page.MARK}\nold\n")
    argv = ["policies", "--quick", "--out", str(folder / "out"), "--work", str(folder / "work")]
    assert main(argv) == 0
    return folder


def test_every_policy_answers_the_whole_trace_alike(results: Path):
    record = json.loads((results / "out" / "policies-float32.json").read_text())
    (cell,) = record["cells"]
    (done,) = cell["rounds"]
    assert set(done) == {"jlora", "vllm", policy_page.AGAIN}
    for sample in done.values():
        assert sample["requests"] == record["workloads"]["W1"]["facts"]["requests"]
        assert sample["unfinished"] == 0 and sample["different"] == 0
        assert sample["ttft_s"] > 0 and sample["cached_tokens"] > 0
    assert done["jlora"]["invalid_kv"] == 0


def test_the_scale_is_the_papers(results: Path):
    facts = json.loads((results / "out" / "policies-float32.json").read_text())["workloads"]["W1"]
    assert facts["adapter_blocks"] == [4, 8]  # blocks of 32 tokens, ranks 32 and 64: 64 and 128 MiB of 16
    for gbps, here in facts["links"].items():
        transfer_over_recompute = facts["token_bytes"] / (here * 1e9) / (facts["token_us"] * 1e-6)
        assert transfer_over_recompute == pytest.approx(PAPER_TOKEN_BYTES / (float(gbps) * 1e9) / PAPER_TOKEN_S)


def test_the_page_keeps_what_a_person_wrote_above_the_mark(results: Path):
    page = (results / "out" / policy_page.PAGE).read_text()
    assert page.startswith("# Mine\n\nWhat I read.") and "old" not in page
    assert "| jlora | " in page and "W1, 100%, 10 GB/s" in page
    assert "| cell | vllm | jlora | control |" in page  # in the order of the round; the control apart


def test_a_full_run_has_every_policy_and_cell():
    setup = policies.full(policies.Budget(3, 1), Path("work"), None)
    assert setup.policies == POLICIES
    assert {(cell.workload, cell.share, cell.gbps) for cell in setup.cells} == {
        (name, share, gbps) for name in ("W1", "W3") for share in (0.25, 0.5, 0.75) for gbps in (2.0, 10.0)
    }


def test_a_turn_that_was_never_answered_counts_with_its_wait():
    turn = Turn(0.0, 0, 0, (3,), 2, None)
    cold = {"queue": 0.25, "adapter": 0.0, "kv": 0.5}
    done = Ask(turn, due=1.0, sent=1.5, first=2.0, last=2.5, tokens=[1, 2], usage=Usage(1, 0, 2), cold=cold)
    hung = Ask(turn, due=2.0, sent=2.0)
    sample = requests([done, hung], seconds=10.0)
    assert sample["ttft_s"] == pytest.approx((1.0 + 8.0) / 2)
    assert sample["unfinished"] == 1 and sample["swap_s"] == 0.5
    assert sample["queue_s"] == pytest.approx(0.75) and sample["tpot_s"] == pytest.approx(0.5)
