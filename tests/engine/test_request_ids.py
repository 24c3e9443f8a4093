"""A request id is taken until the last event of its request is out."""

from __future__ import annotations

import threading
from pathlib import Path

from jlora import config
from jlora.errors import AlreadyExists
from jlora.types import Request, SamplingParams, TokenEvent
from tests.engine._replica import Running
from tests.engine.test_engine import BASE


class Sink:
    """Collects events; `ended` is set by the last one."""

    def __init__(self):
        self.events: list[TokenEvent] = []
        self.ended = threading.Event()

    def __call__(self, events: list[TokenEvent]) -> None:
        self.events += events
        if events[-1].finish_reason:
            self.ended.set()


def test_tenants_share_ids_and_a_request_on_its_way_can_be_aborted_by_its_own(tiny_model: Path):
    service = Running(config.load(None, {**BASE, "model.path": str(tiny_model), "engine.warmup": False}))
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    sinks = {tenant: Sink() for tenant in ("red", "blue")}
    try:
        with service.paused():  # the submissions wait for the engine's thread
            for tenant, sink in sinks.items():
                service.replica.submit(Request("same", (3, 4, 5), long, tenant=tenant), sink)
            again = service.replica.submit(Request("same", (3, 4, 5), long, tenant="red"), Sink())
            assert isinstance(again.exception(0), AlreadyExists)
            aborted = [service.replica.abort_named("same", tenant).result(0) for tenant in ("red", "green")]
            assert aborted == [True, False]
            cancelled = service.replica.submit(Request("late", (3, 4, 5), long), Sink())
            assert cancelled.cancel()
        assert all(sink.ended.wait(60) for sink in sinks.values())
        ends = {tenant: sink.events[-1].finish_reason for tenant, sink in sinks.items()}
        assert ends == {"red": "abort", "blue": "length"}
        for name in ("same", "late"):  # both ids are free again
            sink = Sink()
            service.submit(Request(name, (3, 4), long, tenant="red" if name == "same" else ""), sink)
            assert sink.ended.wait(60)
    finally:
        service.stop()


def test_an_id_used_again_right_after_its_abort_disturbs_nobody(tiny_model: Path):
    service = Running(config.load(None, {**BASE, "model.path": str(tiny_model), "engine.warmup": False}))
    try:
        neighbour = Sink()
        long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        service.submit(Request("neighbour", (3, 4, 5), long), neighbour)
        sinks = []
        for _ in range(200):  # whether the engine's thread is between abort and delivery is chance
            sink = Sink()
            try:
                service.submit(Request("again", (6, 7), long), sink)
            except AlreadyExists:
                continue
            sinks.append(sink)
            service.abort("again")
        assert neighbour.ended.wait(60) and all(sink.ended.wait(10) for sink in sinks)
        assert len([e for e in neighbour.events if e.token_id is not None]) == 100
        assert [sum(e.finish_reason == "abort" for e in sink.events) for sink in sinks] == [1] * len(sinks)
    finally:
        service.stop()
