"""The README's first example: it runs as it stands there, and prints what the README says it prints."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import jlora

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")

# Its own settings serve 64 sequences, and compile for it.
SMALL = {"cache.hbm_blocks": 128, "engine.max_seqs": 4, "engine.max_step_tokens": 32, "engine.warmup": False}


def test_the_first_example_prints_what_is_said_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(jlora, "LLM", functools.partial(jlora.LLM, config=SMALL, progress=False))
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    said = re.search(r"The example prints (.*?)\. ", README)
    assert code and said
    exec(compile(code[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == re.findall("`(.*?)`", said[1])
    assert len(printed) == 3
