"""Every `curl` line of the guides is a call that works."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from jlora.config import ServeConfig
from jlora.serve.http.server import application
from tests.serve._server import Served, request, serve

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"
CURL = "curl --silent --show-error --fail-with-body --max-time 90"
LINES = re.findall(r"^curl .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def profiled(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with what the guide has set."""
    paths = {f"adapters.paths.{name}": str(text_model.parent / "adapters" / name) for name in ("upper", "wide")}
    with serve(text_model, {**paths, "serve.profile_dir": str(tmp_path_factory.mktemp("traces"))}) as served:
        yield served


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_lines_of_the_guide_work_in_order(profiled: Served, text_model: Path, tmp_path: Path):
    asked = set()
    for line in LINES:
        asked.add(re.sub(r"\?.*", "", re.findall(r"http://127.0.0.1:8000([^\s\"]*)", line)[0]))
        line = line.replace('"sql"', '"upper"').replace("/sql", "/upper")
        line = line.replace("/srv/adapters/fr", str(text_model.parent / "adapters/lower"))
        line = line.replace("http://127.0.0.1:8000", profiled.http).replace("curl", CURL, 1)
        stream = profiled.inference.GenerateStream(request("Hello", 3000)) if "/debug/profile" in line else None
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=100, cwd=tmp_path)
        if stream is not None:
            stream.cancel()
        assert done.returncode == 0 and done.stdout, f"{line}: {done.stdout} {done.stderr}"
        assert "| head" not in line or done.stdout.startswith("data: {")  # a pipe has head's exit code
    routes = application(profiled.backend, ServeConfig()).routes
    wanted = {route.path.replace("{name:path}", "sql") for route in routes if isinstance(route, Route)}
    assert wanted - asked == {
        "/dashboard/page.js",
        "/dashboard/page.css",
    }  # the page's own: tests of a browser ask them


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_tokenizers_calls_say_what_is_wrong(http: httpx.Client, path: str):
    answer = http.post(path, json={"prompt": "Hello", "messages": [], "tokens": [400]})
    assert answer.status_code == 400, answer.text


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client):
    made = http.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) and made["token_strs"][0] == "<s>"
    assert "".join(made["token_strs"][1:]) == "Hello there"
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "<s>Hello there"}
    plain = http.post("/tokenize", json={"prompt": "Hello there", "add_special_tokens": False}).json()
    assert plain["tokens"] == made["tokens"][1:]
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    asking, bare = (http.post("/tokenize", json={**chat, "add_generation_prompt": a}).json() for a in (True, False))
    assert asking["count"] > bare["count"] and asking["tokens"][: bare["count"]] == bare["tokens"]
