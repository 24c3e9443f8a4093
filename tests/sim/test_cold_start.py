"""Ways to start with a missing adapter, in the simulator: the product's engine over a modelled host."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.studies.caraserve import A10, CASES, H200, LINKS, PROMPTS, Case, best, play, reading_s
from jlora.cache.transfer import Copy
from jlora.cache.tree import AdapterNode
from jlora.engine.cold_start import Cold, Costs, Line, predict
from jlora.sim.clock import VirtualClock
from jlora.sim.hardware import HOST
from jlora.sim.link import Blocking, Link, LinkSpec
from jlora.sim.replica import Replica
from jlora.types import Request, TokenEvent
from tests.sim._sim import SPEC, replica_of, request


def answered(replica: Replica, asked: Request) -> list[TokenEvent]:
    """All that the replica answers."""
    replica.submit(asked, replica.clock.now)
    events: list[TokenEvent] = []
    while not (events and events[-1].finish_reason):
        events += replica.step(replica.clock.now + 10)
    return events


COSTS = Costs(Line(0.0, 0.001), Line(0.001, 0.0), Line(0.0, 0.0001))


def test_predictions_by_hand():
    """20 tokens: 20 ms on the device, and 1 + 4 blocks x 2 ms on the host."""
    slow = predict(Cold(20, 4, 1, 0.4, 0.4, 4), COSTS)
    assert slow == pytest.approx({"wait": 0.42, "stream": 0.405, "cpu": 0.029})
    fast = predict(Cold(20, 4, 1, 0.004, 0.004, 4), COSTS)
    assert fast == pytest.approx({"wait": 0.024, "stream": 0.021, "cpu": 0.02 + 0.009 / 4})


@pytest.mark.parametrize(("start", "first"), [("wait", 0.18), ("cpu", 0.039)])
def test_the_first_token_comes_when_the_model_says(start: str, first: float):
    """A prefetch of 50 ms is on the link first, then an adapter's copy of 100 ms.

    A step takes 10 ms, and 1 ms per token; the host adds 9 ms.
    """
    link = LinkSpec(0.025, 0.0, groups=4)
    engine = replace(SPEC.engine, cold_start=start)
    replica = replica_of(replace(SPEC, link=link, engine=engine, costs=COSTS if start == "cpu" else None))
    began = replica.clock.now
    replica.submit(request("r", 20, 1, adapter=1), began)
    events = []
    while not events:
        events = replica.step(began + 10)
    assert first - 1e-9 < replica.clock.now - began < first + 0.02
    assert events[-1].timing is not None and events[-1].timing.cold_start == start
    counted = replica.manager.counters
    found = {"wait": counted.cold_waited, "stream": counted.cold_streamed, "cpu": counted.cold_helped}
    assert found == {kind: int(kind == start) for kind in found}


@pytest.mark.parametrize("way", ["wait", "stream", "cpu"])
def test_a_predicted_first_token_is_compared_with_the_one_that_comes(way: str, monkeypatch: pytest.MonkeyPatch):
    """The copy takes 100 ms, or 40 ms and a step follows it. A second request finds its adapter."""
    link = LinkSpec(0.01 if way == "stream" else 0.025, 0.0, groups=4)
    replica = replica_of(replace(SPEC, link=link, engine=replace(SPEC.engine, cold_start="auto"), costs=COSTS))
    gate, asked = replica.manager.leases.gate, list[int]()

    def predicts(adapter: AdapterNode, left_s: float, tokens: int) -> dict[str, float]:
        asked.append(tokens)
        return {"wait": 0.3, "stream": 0.2, "cpu": 0.004}

    monkeypatch.setattr(gate, "predicts", predicts)
    monkeypatch.setattr(gate, "helps", lambda *_: way == "cpu")
    if way == "stream":
        monkeypatch.setattr(replica.manager.forecast, "fits_in_step", lambda nodes, tokens: True)
    (timing,) = [event.timing for event in answered(replica, request("r", 20, 30, adapter=1)) if event.timing]
    assert timing.cold_start == way and asked == [20]
    counted = replica.manager.counters
    found = (counted.cold_predicted, counted.cold_predicted_s, counted.cold_measured_s, counted.cold_error_s)
    predicted_s, took_s = predicts(replica.manager.base, 0.0, 0)[way], timing.ttft - timing.queue
    assert found == pytest.approx((1, predicted_s, took_s, abs(predicted_s - took_s)))
    answered(replica, request("warm", 20, 2, seed=2, adapter=1))
    assert counted.cold_predicted == 1 and asked == [20, 0]


@pytest.mark.parametrize(
    ("start", "fields"),
    [
        ("cpu", {"length": 20}),  # decides nothing
        ("auto", {"length": 100}),  # of two steps
        ("auto", {"length": 20, "activation": 10}),  # of two parts
    ],
)
def test_what_is_not_predicted_is_not_counted(start: str, fields: dict[str, int]):
    link = LinkSpec(0.025, 0.0, groups=4)
    replica = replica_of(replace(SPEC, link=link, engine=replace(SPEC.engine, cold_start=start), costs=COSTS))
    answered(replica, request("r", output=2, adapter=1, **fields))
    counted = replica.manager.counters
    assert counted.cold_waited + counted.cold_streamed + counted.cold_helped == 1 and not counted.cold_predicted
    answered(replica, request("again", 20, 2, seed=2, adapter=2))
    assert counted.cold_predicted == (start == "auto"), "but this one is"


def test_a_prediction_is_that_of_the_decision():
    link = LinkSpec(0.025, 0.0, groups=4)
    replica = replica_of(replace(SPEC, link=link, engine=replace(SPEC.engine, cold_start="auto"), costs=COSTS))
    answered(replica, request("r", 20, 2, adapter=1))
    counted = replica.manager.counters
    assert counted.cold_predicted == counted.cold_helped == 1
    assert counted.cold_predicted_s == pytest.approx(0.029), "20 ms on the device, and 1 + 4 blocks x 2 ms on the host"
    assert counted.cold_measured_s == pytest.approx(0.039) and counted.cold_error_s == pytest.approx(0.01)


def test_a_blocking_link_stops_the_clock_until_the_copy_has_landed():
    for kind, passed in ((Link, 0.0), (Blocking, 0.2)):
        clock = VirtualClock()
        began = clock.now
        manager = replica_of().manager
        copy = Copy("in", manager.adapters[1], (manager.adapters[1],), (1, 2), (1, 2))
        kind(LinkSpec(0.1, 0.0), clock, lambda: 0.0).start([copy])
        assert clock.now - began == pytest.approx(passed)


def test_the_host_helps_best_with_short_prompts_and_slow_links():
    def way(hardware, *cell):
        found = best(hardware, *cell)
        return min(found, key=lambda name: found[name])

    assert way(A10, 0.5, 64, 32) == "cpu"
    assert way(A10, 50, 8, 2048) == way(H200, 50, 8, 2048) == "stream"


def test_the_host_never_helps_best_where_exchanges_move_more_than_the_copy():
    """q, k and v of Llama-2-7B: a token moves four widths of a layer in 16 bits, a block is 16 MiB."""
    moved = 32 * 4 * 4096 * 2
    for gbps, prompt in itertools.product(LINKS, PROMPTS):
        found = best(A10, gbps, 64, prompt)
        if prompt * moved > A10.adapter_blocks(64) * 16 * 2**20:
            assert min(found, key=lambda name: found[name]) != "cpu"


def test_a_disk_reads_a_whole_adapter_before_any_way_starts():
    """A rank-64 adapter on q, k and v of Llama-2-7B has 3 · 64 · (4096 + 4096) · 32 values of 2 bytes."""
    assert reading_s(A10, 50, 64) == pytest.approx(3 * 64 * 8192 * 32 * 2 / 50e6, rel=0.05)
    assert reading_s(A10, 500, 64) == pytest.approx(reading_s(A10, 50, 64) / 10)


@pytest.mark.parametrize("projections, places, widths", [("qkv", 1, 4), ("qkvo", 2, 6), ("qv", 1, 4), ("o", 1, 2)])
def test_exchanges_are_of_the_places_at_which_adapters_act(projections: str, places: int, widths: int):
    """A place's input, and the products of all its projections, over 1 GB/s; the host's latency is 30 us a place."""
    hardware = replace(A10, projections=tuple(projections))
    place = hardware.costs(HOST, 1e9).place
    assert hardware.places == places
    assert places * place.each == pytest.approx(32 * widths * 4096 * 2 / 1e9)
    assert place.fixed == pytest.approx(32 * 30e-6)


def test_the_host_helps_at_each_place_of_a_layer():
    """1 ms a place, and 20 ms on the device, both for as long as the copy is on its way."""

    def first(places: int) -> float:
        link, engine = LinkSpec(0.1, 0.0, groups=4), replace(SPEC.engine, cold_start="cpu")
        costs = Costs(Line(0.0, 0.001), Line(0.001, 0.0), Line(0.0, 0.0))
        replica = replica_of(replace(SPEC, link=link, engine=engine, costs=costs, places=places))
        began = replica.clock.now
        replica.submit(request("r", 20, 1, adapter=1), began)
        while not replica.step(began + 10):
            pass
        return replica.clock.now - began

    assert first(3) - first(1) == pytest.approx(0.002)


def test_auto_starts_sooner_than_a_link_that_blocks():
    case: Case = CASES[0]
    found = play(case, 16.0)
    ttft = {side: summary["ttft_s"] for side, summary in found.items()}
    assert max(ttft["auto"], ttft["stream"]) < ttft["wait"] < ttft["blocking"]
    assert all(summary["unfinished"] == 0 for summary in found.values())
