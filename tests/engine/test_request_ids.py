"""A request id is taken until the last event of its request is out."""

from __future__ import annotations

import threading
from pathlib import Path

from jlora import config
from jlora.errors import AlreadyExists
from jlora.types import Request, SamplingParams, TokenEvent
from tests.engine._replica import Running


class Sink:
    """Collects events; `ended` is set by the last one."""

    def __init__(self):
        self.events: list[TokenEvent] = []
        self.ended = threading.Event()

    def __call__(self, events: list[TokenEvent]) -> None:
        self.events += events
        if events[-1].finish_reason:
            self.ended.set()


def test_an_id_used_again_right_after_its_abort_disturbs_nobody(tiny_model: Path):
    settings = {
        "model.path": str(tiny_model),
        "engine.max_seqs": 2,
        "engine.max_step_tokens": 16,
        "engine.warmup": False,
    }
    service = Running(config.load(None, settings))
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
