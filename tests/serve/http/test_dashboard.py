"""The dashboard's events are the server's own numbers, and nothing is computed when nobody looks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from jlora.cache.owners import owners
from jlora.serve.backend import Backend
from jlora.serve.gate import MOST_CALLS
from jlora.serve.http import dashboard
from jlora.serve.observed import Ended
from jlora.serve.strip import KEPT, Strip
from jlora.types import Request, Timing, Usage
from tests.cache._cache import Cache
from tests.serve._server import Served, request, serving, wait_until


@contextmanager
def viewing(url: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The snapshots of a viewer."""
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))


def test_a_snapshot_is_what_the_server_says(served: Served):
    served.generate(request("Hello", 20, model="wide"))
    served.check_idle()
    with viewing(served.http) as snapshots:
        for seen in snapshots:  # until no backup is under way meanwhile
            state = served.replica.state().result(20)
            if seen["cache"] == dataclasses.asdict(state.cache):
                break
    cells, hbm = seen["cells"], state.cache.hbm
    assert seen["per_cell"] == 1 and len(cells) == hbm.total and seen["whole"]
    assert sum(code == 0 for code in cells) == hbm.free
    assert sum(code % 2 == 1 for code in cells) == hbm.adapters
    tree = {entry["name"]: entry for entry in seen["tree"]}
    assert set(tree) == {"base", "upper", "lower", "wide"}
    assert sum(entry["kv"] for entry in tree.values()) == hbm.history_kv + hbm.running_kv
    wide = served.replica.adapter("wide").result(20)
    assert (tree["wide"]["rank"], tree["wide"]["blocks"], tree["wide"]["hits"]) == (8, wide.blocks, wide.hits)
    bar = seen["requests"][-1]
    assert (bar["model"], bar["tokens"]) == ("wide", 20)
    parts = bar["queue"] + max(bar["adapter_cold_start"], bar["kv_cold_start"]) + bar["prefill"]
    assert parts == pytest.approx(bar["ttft"], abs=1e-3) and bar["whole"] >= bar["ttft"]
    assert "Hello" not in json.dumps(seen)


def test_viewers_share_one_watch_and_without_one_there_is_none(served: Served, monkeypatch: pytest.MonkeyPatch):
    taken: list[float] = []
    take = dashboard.snapshot

    async def counted(backend: Backend) -> dict[str, Any]:
        made = await take(backend)
        taken.append(made["at"])
        return made

    monkeypatch.setattr(dashboard, "snapshot", counted)
    monkeypatch.setattr(dashboard, "PERIOD_S", 0.05)
    with viewing(served.http) as one, viewing(served.http) as two:
        firsts = next(one)["at"], next(two)["at"]
        seen = [{next(viewer)["at"] for _ in range(5)} for viewer in (one, two)]
        assert len(set(firsts)) == 2 and seen[0] & seen[1]
    looks = -1
    while looks != len(taken):  # the watch ends with the last viewer, once the server sees that it has gone
        looks = len(taken)
        time.sleep(0.3)


def test_too_many_viewers_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dashboard, "VIEWERS", 1)
    with viewing(served.http) as snapshots:
        next(snapshots)
        assert httpx.get(f"{served.http}/dashboard/events", timeout=20).status_code == 429


def test_a_viewer_counts_before_its_first_snapshot(served: Served, monkeypatch: pytest.MonkeyPatch):
    entered, go, take = threading.Event(), threading.Event(), dashboard.snapshot

    async def held(backend: Backend) -> dict[str, Any]:
        entered.set()
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await take(backend)

    monkeypatch.setattr(dashboard, "VIEWERS", 1)
    monkeypatch.setattr(dashboard, "snapshot", held)
    url = urlsplit(served.http)
    with socket.create_connection((url.hostname, url.port), timeout=20) as first:
        first.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert entered.wait(20)
        assert httpx.get(f"{served.http}/dashboard/events", timeout=20).status_code == 429
        go.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200")


def test_health_is_told_however_many_calls_there_are(served: Served):
    gate = served.backend.gate
    wait_until(lambda: not gate.held.calls)  # earlier viewers have left
    with ExitStack() as others:
        for _ in range(MOST_CALLS):
            others.enter_context(gate.call(0, counts=True))
        paths = ("/health", "/ready", "/v1/models")
        got = {path: httpx.get(served.http + path, timeout=20).status_code for path in paths}
    assert got == {"/health": 200, "/ready": 200, "/v1/models": 429}


def test_live_requests_are_bars_too(served: Served):
    stream = served.inference.GenerateStream(request("Hello", 3000, model="upper"))
    next(stream)
    with viewing(served.http) as snapshots:
        live = next(bar for bar in next(snapshots)["requests"] if not bar["whole"])
    assert live["model"] == "upper" and live["first"] >= live["began"] > 1e9
    stream.cancel()
    served.check_idle()
    wait_until(lambda: all(bar.whole for bar in served.backend.strip.bars()))
    left = served.backend.strip.bars()[-1]  # a client that leaves
    assert (left.number, left.aborted) == (live["number"], True) and left.whole >= left.ttft > 0 and left.tokens
    assert served.generate(request()).usage.completion_tokens == 8
    wait_until(lambda: not served.backend.strip.bars()[-1].aborted)


def test_the_page_is_ours_alone(http: httpx.Client):
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css")):
        assert f"/dashboard/{name}" in page.text
        file = http.get(f"/dashboard/{name}")
        assert file.status_code == 200 and file.headers["content-type"].startswith(kind)
        assert "//" not in file.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")


def test_while_the_model_loads_there_is_nothing_to_see():
    with serving(Backend()) as loading:
        assert httpx.get(f"{loading.http}/", timeout=20).status_code == 200
        assert httpx.get(f"{loading.http}/dashboard/events", timeout=20).status_code == 503


def test_a_large_pool_is_drawn_in_cells():
    cache = Cache(device=5000)
    cache.run([1] * 40)
    lease = cache.leased([2] * 20, cache.adapter(7, 12))
    seen = owners(cache.manager)
    assert seen.per_cell == 5 and len(seen.cells) == 1000 and seen.whole
    assert seen.kv == {0: 10, 7: 5} and {2, 2 * 7 + 1, 2 * 7 + 2} <= set(seen.cells)
    cache.manager.leases.release(lease)


def test_a_large_tree_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jlora.cache.owners.VISITS", 6)
    cache = Cache(device=100)
    cache.run([1] * 40)
    seen = owners(cache.manager)
    assert not seen.whole and seen.kv == {0: 6}


def test_a_strip_keeps_the_last_bars():
    strip, asked = Strip(), Request("r", (1,))
    for number in range(KEPT + 10):
        ended = Ended(asked, "base", Usage(1, 0, 1), Timing(), 1, 100.0, 2.0, error="broken" if number % 2 else "")
        strip.leave(strip.begin("base"), ended)
    bars = strip.bars()
    assert [bar.number for bar in bars] == list(range(11, KEPT + 11)) and all(bar.whole == 2.0 for bar in bars)
    assert [bar.failed for bar in bars[:2]] == [False, True]
