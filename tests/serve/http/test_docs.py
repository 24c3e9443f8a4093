"""Every `curl` line of the guides is a call that works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"
LINES = re.findall(r"^curl (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_lines_of_the_guide_work_in_order(http: httpx.Client, text_model: Path):
    adapters = text_model.parent / "adapters"
    asked = set()
    for line in LINES:
        line = line.replace('"sql"', '"upper"').replace("/srv/adapters/fr", str(adapters / "lower"))
        url, *flags = shlex.split(line)
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        path = url.removeprefix("http://127.0.0.1:8000")
        asked.add(path)
        if "-d" not in given:
            assert http.get(path).status_code == 200, line
            continue
        assert given["-H"] == "Content-Type: application/json" and json.loads(given["-d"])
        answer = http.post(path, content=given["-d"], headers={"content-type": "application/json"})
        assert answer.status_code == 200, f"{line}: {answer.text}"
    assert asked >= {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/v1/load_lora_adapter"}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_tokenizers_calls_say_what_is_wrong(http: httpx.Client, path: str):
    answer = http.post(path, json={"prompt": "Hello", "messages": [], "tokens": [400]})
    assert answer.status_code == 400, answer.text


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client):
    made = http.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) and made["token_strs"][0] == "<s>"
    assert "".join(made["token_strs"][1:]) == "Hello there"
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "<s>Hello there"}
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    asking, bare = (http.post("/tokenize", json={**chat, "add_generation_prompt": a}).json() for a in (True, False))
    assert asking["count"] > bare["count"] and asking["tokens"][: bare["count"]] == bare["tokens"]
