"""The balance between two replica processes: running requests and their adapters move, and no token changes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from tests import _make
from tests.cluster import _processes
from tests.cluster._processes import Service, Stream, service
from tests.cluster._wait import until

pytestmark = pytest.mark.slow

# All requests go to one replica, which can run them at once. Its blocks are full before the answers are whole.
CROWDED = {**_processes.SMALL, "engine.max_seqs": 12, "cache.hbm_blocks": 160}
BALANCED = ("cluster.balance=dlora", "cluster.balance_s=0.05")
TOKENS = 400


def moves(running: Service) -> float:
    text = httpx.get(f"http://{running.http}/metrics", timeout=30).text
    return next(s.value for family in parse(text) for s in family.samples if s.name == "jlora_router_moves_total")


def test_running_requests_and_their_adapters_move_and_every_answer_is_that_of_one_engine(
    tmp_path: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_processes, "SMALL", CROWDED)
    model = tmp_path / "model"
    _make.make_model(model, max_len=512)
    adapters = {name: tiny_adapters[name] for name in ("small", "large")}
    asked = [one for one in _processes.requests(list(adapters), TOKENS) if one.model]  # a move takes an adapter along
    expected = _processes.undisturbed(model, adapters, asked)
    flags = ["--replicas", "2", "--routing", "first-fit", "--http-port", "0"]
    settings = ["--set", *BALANCED]
    with service(model, adapters, *flags, *settings) as running:
        until(lambda: running.up() == {"r0", "r1"}, "both replicas are up")
        for stream in [Stream(running.inference, one) for one in _processes.requests([], 8) * 3]:
            stream.result()  # what compiles looks like a queue, and would be a reason to move
        moved = 0.0
        for _ in range(4):  # they may all have moved before the last one began
            streams = [Stream(running.inference, one) for one in asked]
            until(lambda streams=streams: all(stream.has(3) for stream in streams), "all run")
            before = moves(running)
            assert [stream.result() for stream in streams] == expected
            if moved := moves(running) - before:
                break
        assert moved, "requests that had begun have moved"
