"""F19: every request asks for another of a few adapters, and the device holds fewer of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from jlora.model.spec import ModelSpec
from jlora.types import Request, TokenEvent
from tests import _make
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, running, serve, tokens

RANKS = (1, 2, 3, 4, 6, 8)
COUNT = 140
WINDOW = 100  # steps in which some request must begin
ROOM = 12  # blocks beside the largest adapter: for three sequences, or other adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_spec: ModelSpec) -> dict[str, Path]:
    """One of each rank, on all projections."""
    root, targets = tmp_path_factory.mktemp("flips"), tuple(_make.MODULES)
    return {
        f"r{rank}": _make.make_adapter(root / f"r{rank}", tiny_spec, seed=rank, r=rank, targets=targets)
        for rank in RANKS
    }


def flips(names: list[str | None]) -> list[Request]:
    """Requests that go round the adapters and the base; they leave no KV, so that adapters alone are copied."""
    short = replace(GREEDY, max_tokens=5)
    like = Request("", (), short, bypass_prefix_cache=True)
    return [
        replace(like, id=f"f{i}", prompt=tuple(range(3 + i % 60, 6 + i % 60 + i % 11)), adapter=names[i % len(names)])
        for i in range(COUNT)
    ]


def begun_at(service: Running, requests: list[Request]) -> list[int]:
    """The steps at which requests have their first tokens, in order; waits for all answers."""
    engine, firsts, left = service.built.engine, dict[str, int](), threading.Semaphore(0)

    def sink(name: str) -> Callable[[list[TokenEvent]], None]:
        def hear(events: list[TokenEvent]) -> None:  # on the engine's thread
            firsts.setdefault(name, engine.stats().steps)
            for event in events:
                if event.finish_reason is not None:
                    left.release()

        return hear

    for request in requests:
        service.submit(request, sink(request.id))
    for _ in requests:
        assert left.acquire(timeout=120)
    return sorted(firsts.values())


def test_adapters_that_change_with_every_request_neither_stop_admission_nor_are_copied_for_nothing(
    tiny_model: Path, adapters: dict[str, Path]
):
    requests = flips([None, *adapters])
    with running(tiny_model, adapters) as roomy:
        wanted = {name: tokens(events) for name, events in serve(roomy, requests).items()}
        size = {info.name: info for info in roomy.adapters()}
    blocks = max(info.blocks for info in size.values()) + ROOM
    assert blocks < sum(info.blocks for info in size.values()), "they would all fit"
    asked = sum(size[request.adapter].bytes for request in requests if request.adapter)
    with running(tiny_model, adapters, blocks=blocks) as service:
        assert {name: tokens(events) for name, events in serve(service, requests).items()} == wanted
        before, began = service.cache_state(), service.stats().steps
        firsts = begun_at(service, [replace(request, id=f"again {request.id}") for request in requests])
        copied = service.cache_state().bytes_swapped_in - before.bytes_swapped_in
        assert len(firsts) == COUNT
        assert max(b - a for a, b in pairwise([began, *firsts])) <= WINDOW
        least, most = 3 * sum(info.bytes for info in size.values()), 1.05 * asked  # on a busy machine one comes twice
        assert least < copied <= most, "copies leave before they were used"
