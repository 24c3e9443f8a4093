"""Cold starts with the host's help: the same answers as with every adapter on the device.

The link of these tests stands still until it is told to bring the next group of layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jlora.cache.transfer import Copy
from jlora.types import Request, TokenEvent
from tests.cache._books import evict_all
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, mixed, serve, tokens
from tests.engine.test_exactness import TIGHT, poisoned

HELP: dict[str, Any] = {**TIGHT, "engine__cold_start": "cpu"}
PROMPT = tuple(3 + i * 7 % 80 for i in range(40))
COLD = Request("cold", PROMPT, GREEDY, adapter="large")


class HeldLink:
    """Copies to the device end, or bring their next group of layers, one for each `release`."""

    def __init__(self, service: Running):
        self.swapper = service.parts.swapper
        self.questions = 0  # how often a launch asked whether a group has come
        self.release_at = -1  # the question before which everything comes
        self._permits = threading.Semaphore(0)
        self.swapper._lanes["in"].slow_down = self._stand_still
        self._arrived = self.swapper.arrived
        self.swapper.arrived = self._asked

    def release(self, count: int = 1000) -> None:
        self._permits.release(count)

    def _stand_still(self, seconds: float) -> None:
        assert self._permits.acquire(timeout=60)

    def _asked(self, copy: Copy, group: int) -> bool:
        if self.questions == self.release_at:
            self.release()
            while not (copy.seconds or self._arrived(copy, group)):
                threading.Event().wait(0.001)
        self.questions += 1
        return self._arrived(copy, group)


@contextmanager
def cold(service: Running) -> Iterator[HeldLink]:
    """Nothing is on the device, and nothing comes until it is released."""
    while service.cache_state().in_flight:
        pass
    slow_down = service.parts.swapper._lanes["in"].slow_down
    with service.paused():
        evict_all(service.manager)
        link = HeldLink(service)
    try:
        yield link
    finally:
        link.release()
        with service.paused():
            link.swapper._lanes["in"].slow_down, link.swapper.arrived = slow_down, link._arrived


def start_of(events: list[TokenEvent]) -> str:
    timing = events[-1].timing
    assert timing is not None
    return timing.cold_start


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine__layers": "unroll", "engine__max_step_tokens": 5},
        {"model__tp": 2, "engine__overlap": False},
        {"cache__hbm_blocks": 30},  # preemption too
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "default",
)
def test_answers_do_not_depend_on_where_an_adapter_is_computed(
    settings: dict[str, Any], tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    kinds = set()
    with poisoned(tiny_model, tiny_adapters, **{**HELP, **settings}, cache__link_gbps=1e-3) as service:
        for _ in range(3):
            got = serve(service, mixed())
            assert {name: tokens(events) for name, events in got.items()} == expected
            kinds |= {start_of(events) for events in got.values()}
            while service.cache_state().in_flight:
                pass
            with service.paused():
                evict_all(service.manager)
        assert "cpu" in kinds


def test_a_request_needs_no_copy_of_its_adapter_to_end(tiny_model: Path, tiny_adapters: dict[str, Path]):
    with poisoned(tiny_model, tiny_adapters, **HELP, engine__layers="unroll") as service:
        wanted = tokens(serve(service, [COLD])["cold"])
        with cold(service):
            events = serve(service, [replace(COLD, bypass_prefix_cache=True)])["cold"]
            assert tokens(events) == wanted and start_of(events) == "cpu"
            timing = events[-1].timing
            assert timing is not None and timing.adapter_cold_start < timing.ttft
            assert service.cache_state().in_flight  # still


def test_the_device_takes_over_at_any_group_of_layers_of_any_step(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    request = replace(COLD, bypass_prefix_cache=True, sampling=replace(GREEDY, max_tokens=3))
    with poisoned(tiny_model, tiny_adapters, **HELP) as service:
        wanted = tokens(serve(service, [request])["cold"])
        with cold(service) as link:
            serve(service, [request])
            questions = link.questions
        assert questions == 2 * 5  # two groups of layers; three chunks of the prompt and two more tokens
        for at in range(questions):
            with cold(service) as link:
                link.release_at = at
                events = serve(service, [request])["cold"]
                assert tokens(events) == wanted and start_of(events) == "cpu"
                assert at < link.questions <= questions
