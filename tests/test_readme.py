"""The README and the guides: their examples run, their commands have the flags shown, their links lead somewhere."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest

import jlora
from jlora import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "notes").glob("*.md"))]

# A user's default batch of 64 sequences would compile for a minute.
SMALL = {"cache.hbm_blocks": 128, "engine.max_seqs": 4, "engine.max_step_tokens": 32, "engine.warmup": False}


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def _commands() -> list[tuple[str, list[str]]]:
    """(command, its words) of every `jlora COMMAND ...` in a shell block of any page."""
    found = []
    for page in PAGES:
        for line in "\n".join(_blocks(page, "sh")).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            starts = [i for i, word in enumerate(words) if word in ("jlora", ".venv/bin/jlora")]
            if starts and len(words) > starts[0] + 1:
                found.append((words[starts[0] + 1], words[starts[0] + 2 :]))
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jlora, "LLM", functools.partial(jlora.LLM, config=SMALL, progress=False))


EXAMPLE = re.compile(r"```python\n((?:(?!```).)*)```\s*```text\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(page.name, code, shown, id=f"{page.name}-{i}")
    for page in PAGES
    for i, (code, shown) in enumerate(EXAMPLE.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("page", "code", "shown"), EXAMPLES)
def test_an_example_prints_what_the_page_shows(
    small, page: str, code: str, shown: str, capsys: pytest.CaptureFixture[str]
):
    exec(compile(code, page, "exec"), {})
    assert capsys.readouterr().out == shown


def test_the_pages_have_examples():
    assert {param.values[0] for param in EXAMPLES} >= {"README.md", "adapters.md", "getting-started.md"}


def test_commands_have_the_flags_that_pages_show(capsys: pytest.CaptureFixture[str]):
    commands = _commands()
    assert {name for name, _ in commands} >= {"serve", "generate", "chat", "top", "sim", "convert"}
    shown = [[name, *words] for name, words in commands if name not in ("bench", "doctor")]  # they have their own
    for words in shown:
        if words[:2] == ["sim", "faults"]:  # needs an extra
            continue
        called = words[: 2 if words[:2] == ["cluster", "plan"] else 1]
        with pytest.raises(SystemExit) as ended:
            cli.main([*called, "--help"])
        assert ended.value.code == 0
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= known, f"jlora {' '.join(words)}"


def test_the_first_page_and_the_page_for_contributors_stay_short():
    readme, architecture = (page.read_text(encoding="utf-8") for page in (PAGES[0], ROOT / "docs" / "architecture.md"))
    assert len(re.sub(r"```.*?```", "", readme, flags=re.DOTALL).split()) <= 800
    assert len(architecture.splitlines()) <= 200


def test_a_page_of_results_answers_one_question():
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 120, f"{page.name} has more than 120 lines"


def test_links_lead_to_files_and_headings():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            if heading and target.suffix == ".md":
                assert heading in _anchors(target), f"{page.name}: {link}"


def _anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
