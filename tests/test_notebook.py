"""The quickstart notebook runs from top to bottom, and its adapters really do what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jlora.demo.tasks import TASKS

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

pytestmark = pytest.mark.slow  # the notebook runs as a whole, once

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
TEXT = "the quick brown fox"


def printed(notebook) -> dict[str, str]:
    """What each code cell printed, by its first line of code."""
    return {
        cell.source.splitlines()[0]: "".join(o.text for o in cell.outputs if o.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def cell(outputs: dict[str, str], start: str) -> str:
    return next(text for first, text in outputs.items() if first.startswith(start))


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}})
    return printed(client.execute())


def test_every_adapter_of_the_batch_answers_with_its_own_transform(executed: dict[str, str]):
    answers = dict(line.strip().split(": ", 1) for line in cell(executed, "question").splitlines())
    expected = {name: TASKS[name](TEXT) for name in ("upper", "rot13", "leet")}
    assert answers == {"base": TEXT, **expected}
    assert answers["upper"] == "THE QUICK BROWN FOX"


def test_an_answer_says_why_it_ended(executed: dict[str, str]):
    assert cell(executed, "answer = ").startswith("stop Usage(prompt_tokens=")


def test_the_stream_prints_the_answer(executed: dict[str, str]):
    assert cell(executed, "messages = ") == "uryyb jbeyq"


def test_a_stop_string_cuts_the_samples_and_logprobs_name_the_tokens(executed: dict[str, str]):
    free, stopped, *tops = cell(executed, "for stop in").splitlines()
    assert free == f"() {[TEXT] * 2}"
    assert stopped == f"('o',) {[TEXT.split('o')[0]] * 2}"
    assert [ast.literal_eval(line)[0][0] for line in tops] == list("THE")


def test_an_adapter_loaded_at_run_time_works_and_its_blocks_are_freed(executed: dict[str, str]):
    answer, *adapters = cell(executed, "llm.load_adapter").splitlines()
    assert answer == TEXT[::-1]
    assert [a.split(":")[0].strip() for a in adapters] == ["leet", "reverse", "rot13", "upper"]
    before, after = cell(executed, "print(llm.cache_stats").splitlines()
    blocks = {line.split("adapters=")[1].split(",")[0] for line in (before, after)}
    assert before.startswith("TierState(total=") and len(blocks) == 2
