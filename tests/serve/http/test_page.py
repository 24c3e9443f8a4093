"""The dashboard's page in a real Chromium: its numbers are `GetCacheState`'s, and it outlives the server's process."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jlora.config import ServeConfig
from jlora.serve.access import keys
from jlora.serve.access.access import Access
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests.serve import _server
from tests.serve._server import SMALL, Served, request, wait_until

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")

WAIT_MS = 60_000
ROOT = Path(__file__).resolve().parents[3]
# The number of cells of each colour, by way of a copy: Chromium complains about reads of the page's own canvas.
CELLS = """() => {
  const map = document.getElementById("map"), copy = document.createElement("canvas"), found = {};
  [copy.width, copy.height] = [map.width, map.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(map, 0, 0);
  for (let y = 3; y < map.height; y += 8) for (let x = 3; x < map.width; x += 8) {
    const colour = pen.getImageData(x, y, 1, 1).data.join();
    found[colour] = (found[colour] ?? 0) + 1;
  }
  return found;
}"""


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


def cache_state(control: rpc.ControlStub) -> pb.CacheState:
    return control.GetCacheState(pb.GetCacheStateRequest(with_kv=True), timeout=20)


def agrees(page: Any, control: rpc.ControlStub) -> bool:
    """Whether every field of the cache on the page is the server's; it may be a second behind."""
    places = page.query_selector_all('[data-field^="cache."]')
    seen = {place.get_attribute("data-field").removeprefix("cache."): place.inner_text() for place in places}
    assert {"hbm.running_kv", "host.history_kv", "bytes_swapped_in", "policy"} <= seen.keys()
    state = cache_state(control)
    return seen == {field: str(functools.reduce(getattr, field.split("."), state)) for field in seen}


def draws_the_blocks(page: Any, served: Served) -> bool:
    """Whether the map has as many cells of one colour as each adapter has blocks and KV on the device."""
    cells, state = page.evaluate(CELLS), cache_state(served.control)
    weights = [info.blocks for info in served.replica.adapters().result(20) if info.tier == "HBM"]
    free = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--free')").lstrip("#")
    cells.pop("0,0,0,0", None)  # behind the last block
    if cells.pop(",".join(str(part) for part in (*bytes.fromhex(free), 255)), 0) != state.hbm.free:
        return False
    return Counter(cells.values()) == Counter([*weights, *(count for count in state.kv.values() if count)])


def lists_the_kv(page: Any, served: Served) -> bool:
    """Whether the tree's rows have the blocks of each adapter and of the KV below it."""
    rows = {row.get_attribute("data-name"): row.inner_text().split("\t") for row in page.query_selector_all("#tree tr")}
    uids = {info.name: (info.uid, info.blocks) for info in served.replica.adapters().result(20)} | {"base": (0, 0)}
    kv = cache_state(served.control).kv
    want = {name: [str(blocks), str(kv.get(uid, 0))] for name, (uid, blocks) in uids.items()}
    return {name: cells[3:5] for name, cells in rows.items()} == want


def tells_the_times(page: Any, served: Served) -> bool:
    """Whether the tiles have the percentiles that `jlora top` shows."""
    info = served.control.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)

    def said(name: str, kind: str) -> str:
        seconds = getattr(info, f"recent_{name}_{kind}_s")
        return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{2 if seconds < 0.01 else 0}f} ms"

    want = {f"#{name}": said(name, "p50") for name in ("ttft", "tpot")}
    want |= {f"#{name}-tail": f"p90 {said(name, 'p90')}, p99 {said(name, 'p99')}" for name in ("ttft", "tpot")}
    return {place: page.inner_text(place) for place in want} == want


def busy(served: Served) -> None:
    """Some requests of every adapter, ended."""
    for i in range(6):
        for model in ("", "upper", "lower", "wide"):
            served.generate(request([20 + i, *range(30, 60)], 6 + 7 * i, model=model))


def test_the_page_shows_what_the_server_says(served: Served, page: Any):
    busy(served)
    page.goto(served.http)
    page.wait_for_selector("#state.live", timeout=WAIT_MS)
    for check in (draws_the_blocks, lists_the_kv, tells_the_times):
        wait_until(lambda check=check: check(page, served), timeout_s=60)
    wait_until(lambda: agrees(page, served.control), timeout_s=60)
    assert shown(page, "invalid_kv") == "0" and int(shown(page, "bytes_swapped_in")) > 0
    assert page.locator("#gantt rect").count() >= 20 and page.locator("#ttft-bars rect").count() > 0
    assert page.locator("#tpot-bars rect").count() > 0 and page.locator("#area polygon").count() == 4
    page.click("#pause")
    before = shown(page, "hbm.free")
    served.generate(request(range(100, 260), 4))
    page.wait_for_timeout(1500)
    assert shown(page, "hbm.free") == before
    page.click("#pause")
    wait_until(lambda: agrees(page, served.control), timeout_s=60)
    assert page.complaints == []


def test_the_window_cuts_every_picture(served: Served, page: Any):
    """Half an hour of snapshots, a minute apart: 20 kB/s to the device at first, 2 kB/s in the last ten minutes."""
    with httpx.stream("GET", f"{served.http}/dashboard/events", timeout=60) as live:
        real = json.loads(next(line for line in live.iter_lines() if line.startswith("data: "))[6:])
    events, bars, moved, end = [], [], 0, real["at"]
    for minute in range(31):
        at = end - 60 * (30 - minute)
        moved += 60 * (20_000 if minute <= 20 else 2_000)
        times = {"ttft": 0.1, "tpot": 0.01, "whole": 1.0, "tokens": 5, "queue": 0.02, "prefill": 0.08}
        bars.append({"number": minute, "model": "upper", "began": at - 10, "first": at - 9.9, "aborted": False,
                     "adapter_cold_start": 0, "kv_cold_start": 0, **times})  # fmt: skip
        now = copy.deepcopy({**real, "at": at, "uptime_s": 60.0 * minute, "requests": bars})
        now["cache"]["bytes_swapped_in"] = moved
        events.append(f"data: {json.dumps(now)}\n\n")
    answers = ["".join(events)]
    kind = {"content-type": "text/event-stream"}
    page.route("**/dashboard/events", lambda route: answers and route.fulfill(body=answers.pop(), headers=kind))
    page.goto(served.http)
    page.wait_for_selector("#state.lost", timeout=WAIT_MS)  # all has been read
    for window, requests, rates, height in (("60", 1, 1, 6.0), ("300", 5, 5, 6.0), ("1800", 30, 30, 108.6)):
        page.select_option("#window", window)
        counted = page.inner_text("#counted")
        assert f"{min(requests, 24)} of 30" in counted if requests > 24 else counted.startswith(f"{requests} in the")
        assert page.locator("#gantt text").count() == min(requests, 24)
        assert page.inner_text("#ttft-count").endswith(f"of {requests}")
        assert page.inner_text("#tpot-count") == f"median 10 ms, p99 10 ms, of {requests}"
        points = page.locator("#link polyline.in").get_attribute("points").split()
        assert len(points) == rates and points[-1] == f"300.0,{height}"
        assert (points[0].split(",")[1] == "6.0") and page.inner_text("#came") == "2.0 kB/s"
        assert page.inner_text("#went") == "0 B/s"
        assert len(page.locator("#area polygon >> nth=0").get_attribute("points").split()) == 2 * (rates + 1)
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
    wait_until(lambda: draws_the_blocks(page, served), timeout_s=60)
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


@contextmanager
def process(model: Path, ports: tuple[int, int]) -> Iterator[str]:
    """A server of its own process, killed at the end; its HTTP address once it is ready."""
    port, http = ports
    settings = [f"{key}={value}" for key, value in SMALL.items()] + ["engine.warmup=false"]
    adapter = f"upper={model.parent / 'adapters' / 'upper'}"
    command = [sys.executable, "-m", "jlora", "serve", "--model", str(model), "--port", str(port), "--http-port",
               str(http), "--adapter", adapter, "--set", *settings]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=env)
    try:
        assert running.stdout is not None and running.stdout.readline().startswith("jlora ready")
        yield f"http://127.0.0.1:{http}"
    finally:
        running.kill()
        running.communicate()


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@pytest.mark.slow
def test_the_page_survives_a_restart_of_the_process(page: Any, text_model: Path):
    """The same ports, another process: the page finds it, shows its numbers, and begins its strip of requests anew."""
    ports = free_ports()
    with process(text_model, ports) as url:
        page.goto(url)
        page.wait_for_selector("#state.live", timeout=WAIT_MS)
        body = {"model": "upper", "prompt": "Hello", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        page.wait_for_selector("#gantt rect", state="attached", timeout=WAIT_MS)
    page.wait_for_selector("#state.lost", timeout=WAIT_MS)
    with process(text_model, ports), grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
        page.wait_for_selector("#state.live", timeout=WAIT_MS)
        page.wait_for_selector("#gantt rect", state="detached", timeout=WAIT_MS)
        wait_until(lambda: agrees(page, rpc.ControlStub(channel)), timeout_s=60)
        for width in (1280, 390, 390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            page.click("#theme")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    # The browser's own words about a closed port, and about a server that loads its model.
    assert [said for said in page.complaints if "ERR_" not in said and "503" not in said] == []
