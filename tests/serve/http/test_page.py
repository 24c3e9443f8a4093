"""The dashboard's page in a real Chromium: its numbers are `GetCacheState`'s, and it outlives a restart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jlora.config import ServeConfig
from jlora.serve.access import keys
from jlora.serve.access.access import Access
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from tests.serve import _server
from tests.serve._server import Served, request, wait_until

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")

WAIT_MS = 60_000
FIELDS = [f"{tier}.{kind}" for tier in ("hbm", "host") for kind in ("total", "free", "adapters", "history_kv")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that must not complain."""
    made = browser.new_page(viewport={"width": 1280, "height": 900})
    made.complaints = []
    made.on("console", lambda message: message.type in ("error", "warning") and made.complaints.append(message.text))
    made.on("pageerror", lambda error: made.complaints.append(str(error)))
    yield made
    made.close()


def shown(page: Any, field: str) -> str:
    return page.inner_text(f'[data-field="cache.{field}"] >> nth=0')


def agrees(page: Any, served: Served) -> bool:
    """Whether the page shows the server's blocks; it may be a second behind."""
    state = served.control.GetCacheState(pb.GetCacheStateRequest(), timeout=20)
    want = {field: str(getattr(getattr(state, field.split(".")[0]), field.split(".")[1])) for field in FIELDS}
    return {field: shown(page, field) for field in FIELDS} == want


def busy(served: Served) -> None:
    """Some requests of every adapter, ended."""
    for i in range(6):
        for model in ("", "upper", "lower", "wide"):
            served.generate(request([20 + i, *range(30, 60)], 6 + 7 * i, model=model))


def test_the_page_shows_what_the_server_says(served: Served, page: Any):
    busy(served)
    page.goto(served.http)
    page.wait_for_selector("#state.live", timeout=WAIT_MS)
    wait_until(lambda: agrees(page, served), timeout_s=60)
    assert page.inner_text('[data-field="cache.invalid_kv"]') == "0"
    rows = {row.get_attribute("data-name"): row.inner_text() for row in page.query_selector_all("#tree tr")}
    assert set(rows) == {"base", "upper", "lower", "wide"} and "8" in rows["wide"].split()
    assert page.locator("#gantt rect").count() >= 20 and page.locator("#ttft-bars rect").count() > 0
    assert page.locator("#tpot-bars rect").count() > 0 and page.locator("#area polygon").count() == 4
    page.click("#pause")
    before = shown(page, "hbm.free")
    served.generate(request(range(100, 260), 4))
    page.wait_for_timeout(1500)
    assert shown(page, "hbm.free") == before
    page.click("#pause")
    wait_until(lambda: agrees(page, served), timeout_s=60)
    assert page.complaints == []


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits(served: Served, page: Any, width: int, theme: str):
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(served.http)
    page.wait_for_selector("#state.live", timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.complaints == []
    if (out := os.environ.get("JLORA_SCREENSHOTS")) is not None:
        streams = [served.inference.GenerateStream(request("Hello", 2500, model=m)) for m in ("upper", "wide", "lower")]
        for _ in range(6):
            busy(served)
            page.wait_for_timeout(2000)
        page.screenshot(path=Path(out) / f"{theme}-{width}.png", full_page=True)
        for stream in streams:
            stream.cancel()
        served.check_idle()


def test_with_keys_the_page_asks_for_one(served: Served, page: Any, tmp_path: Path):
    key, entry = keys.new("acme", "viewer", ["*"])
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    config = ServeConfig(heartbeat_s=60.0, keys=str(file))
    backend = Backend(served.replica, served.backend.tokenizer, access=Access(config))
    with _server.serving(backend, config) as guarded:
        page.goto(guarded.http)
        page.wait_for_selector("#login:visible", timeout=WAIT_MS)
        page.fill("#key", key)
        page.click("#login button")
        page.wait_for_selector("#state.live", timeout=WAIT_MS)
        assert page.is_hidden("#login")
    assert [said for said in page.complaints if "401" not in said and "ERR_" not in said] == []


def test_the_page_survives_a_restart(served: Served, page: Any, text_model: Path):
    """The same port, another process: the page finds it, and begins its strip of requests anew."""
    config = ServeConfig(heartbeat_s=60.0)
    with _server.serving(served.backend, config) as first:
        port = int(first.http.rpartition(":")[2])
        page.goto(first.http)
        page.wait_for_selector("#state.live", timeout=WAIT_MS)
    page.wait_for_selector("#state.lost", timeout=WAIT_MS)
    with _server.serving(served.backend, config, http_port=port):
        page.wait_for_selector("#state.live", timeout=WAIT_MS)
        wait_until(lambda: agrees(page, served), timeout_s=60)
    lost = [said for said in page.complaints if "ERR_" not in said]  # the browser's own words about a closed port
    assert lost == []
