"""One adapter merged into the weights of a running engine: exact at every point, and never left behind."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jlora.engine import build, device
from jlora.engine.built import Between
from jlora.engine.merger import Merger
from jlora.engine.merging import PERIOD, AdapterCost
from jlora.engine.runner import Runner
from jlora.engine.share import block_counts, with_adapter, without
from jlora.engine.switching import Switching
from jlora.layout import PoolLayout
from jlora.types import Request
from tests import _make, port
from tests.engine import _planted as planted
from tests.engine import _weak
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, mixed, running, serve, tokens

MERGED: dict[str, Any] = {"engine__merge": "large", "engine__merge_starve_s": 0.05}
PROMPT = tuple(range(3, 40))


def of(service: Running) -> Switching:
    return port.switching(service.built.engine)


def merger_of(service: Running) -> Any:
    return port.merger(of(service))


def settle(service: Running, share: float) -> None:
    """Waits until so much is merged."""
    while service.stats().merge.share != share:
        pass


@pytest.fixture(scope="module")
def service(tiny_model: Path, tiny_adapters: dict[str, Path]) -> Iterator[Running]:
    with running(tiny_model, tiny_adapters, **MERGED) as found:
        yield found


def test_answers_are_exact_while_requests_of_others_force_switches(service: Running, expected: dict[str, list[int]]):
    before = service.stats().merge.switches
    for _ in range(3):
        settle(service, 1.0)  # nobody else asks
        got = serve(service, mixed())
        assert {name: tokens(events) for name, events in got.items()} == expected
    settle(service, 1.0)
    merge = service.stats().merge
    assert merge.switches >= before + 3 and not merge.reloads
    assert merge.adapter == "large" and merge.host_bytes > 0
    info = {found.name: found for found in service.adapters()}
    assert info["large"].merged and info["large"].merge_error == 1 and not info["large"].merge_refusal
    assert not info["small"].merged and info["small"].merge_error == 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"model__tp": 2}, marks=pytest.mark.slow),
        pytest.param({"engine__layers": "unroll"}, marks=pytest.mark.slow),
        {"blocks": 30, "engine__overlap": False},  # preemption too
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_switches_are_exact_in_every_setting(
    settings: dict[str, Any], tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    with running(tiny_model, tiny_adapters, **{**MERGED, **settings}) as service:
        for _ in range(3):
            settle(service, 1.0)
            got = serve(service, mixed())
            assert {name: tokens(events) for name, events in got.items()} == expected
        stats = service.stats()
        assert stats.merge.switches >= 3 and not stats.merge.reloads
        # With room for all, only those give way whose slots others, whom a merge has kept waiting, have to have.
        assert stats.preemptions or "blocks" not in settings


def test_at_every_point_of_a_switch_its_requests_are_exact_and_others_wait(
    service: Running, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    switching, merger = of(service), merger_of(service)
    large, small, base = (Request(str(name), PROMPT, GREEDY, adapter=name) for name in ("large", "small", None))
    alone = {}
    settle(service, 1.0)
    with service.paused():  # from here on the test moves the weights
        monkeypatch.setattr(switching, "decide", lambda now: None)
        monkeypatch.setattr(switching, "advance", lambda: True)
        while merger.done:
            merger.back()
        assert merger.whole()
    for request in (large, small, base):
        alone[request.id] = serve(service, [request])[request.id]
    for done in range(1, merger.pieces + 1):
        with service.paused():
            merger.forward()
        assert merger.done == done
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        service.submit(small, inbox.put)
        got = serve(service, [large])["large"]
        assert tokens(got) == tokens(alone["large"])
        for one, other in zip(got, alone["large"], strict=True):
            assert (
                one.logprob and other.logprob and one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
            )
        assert inbox.empty() and service.stats().waiting == 1
        service.abort("small")
        assert inbox.get(timeout=60)[-1].finish_reason == "abort"
    with service.paused():
        merger.audit()
        while merger.done:
            merger.back()
        assert merger.whole()
    for request in (small, base):
        assert tokens(serve(service, [request])[request.id]) == tokens(alone[request.id])


def test_its_prefix_is_shared_between_merged_and_unmerged_requests(service: Running, monkeypatch: pytest.MonkeyPatch):
    request = Request("r", tuple(range(41, 90)), GREEDY, adapter="large")
    settle(service, 1.0)
    merged = serve(service, [request])["r"]
    with service.paused():
        monkeypatch.setattr(of(service), "decide", lambda now: None)
        port.want(of(service), None)
    while merger_of(service).done:
        serve(service, [Request("small", (5, 6), GREEDY, adapter="small")])
    again = serve(service, [request])["r"]
    assert again[-1].usage is not None and again[-1].usage.cached_tokens == 48 and tokens(again) == tokens(merged)


def test_cancel_unload_and_reload_of_the_merged_adapter(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    with running(tiny_model, tiny_adapters, **MERGED) as service:
        settle(service, 1.0)
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        service.submit(Request("long", PROMPT, GREEDY, adapter="large"), inbox.put)
        service.abort("long")
        service.load_adapter("large", str(tiny_adapters["large"]), replace=True)  # another version
        settle(service, 1.0)
        got = serve(service, mixed())
        assert {name: tokens(events) for name, events in got.items()} == expected
        settle(service, 1.0)
        uid = service.adapter("large").uid
        service.unload_adapter("large")
        assert service.stats().merge.adapter == "" and uid not in service.manager.adapters
        service.check_integrity()
        rest = [request for request in mixed() if request.adapter != "large"]
        got = serve(service, rest)
        assert {name: tokens(events) for name, events in got.items()} == {r.id: expected[r.id] for r in rest}


def test_an_adapter_that_alone_was_asked_for_stays_merged_while_idle_until_another_comes_or_it_is_unloaded(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    own = [request for request in mixed() if request.adapter == "large"]
    rest = [request for request in mixed() if request.adapter != "large"]

    def alone(service: Running) -> None:
        """Asks for the one adapter for longer than it takes to decide; the engine is then at rest."""
        with service.paused():
            port.save(of(service))
        for _ in range(3 * PERIOD):
            serve(service, own[:1])
        time.sleep(0.1)
        assert service.stats().merge.share == 1 and not service.built.engine.busy

    with running(tiny_model, tiny_adapters, engine__merge="auto") as service:
        with service.paused():
            of(service).policy.times.cost = AdapterCost(0.9)
        alone(service)
        got = serve(service, rest)
        assert {name: tokens(events) for name, events in got.items()} == {r.id: expected[r.id] for r in rest}
        settle(service, 0.0)
        got = serve(service, own)
        assert {name: tokens(events) for name, events in got.items()} == {r.id: expected[r.id] for r in own}
        alone(service)
        service.unload_adapter("large")
        assert service.stats().merge.adapter == ""
        service.check_integrity()
        got = serve(service, rest)
        assert {name: tokens(events) for name, events in got.items()} == {r.id: expected[r.id] for r in rest}
        assert not service.stats().merge.reloads


@pytest.mark.parametrize("plant", [planted.left_behind, planted.taken_out_twice, planted.stale_copy, planted.lost_lost])
def test_planted_bugs_are_found_before_anybody_else_runs(
    plant: Any, service: Running, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    settle(service, 1.0)
    merger, before = merger_of(service), service.stats().merge.reloads
    with service.paused():
        port.collect(merger)
        unmerges = port.unmerges(merger)
        monkeypatch.setattr(*unmerges, getattr(*unmerges))
        plant(merger)
    others = [request for request in mixed() if request.adapter != "large"]
    got = serve(service, others[:4])
    assert {name: tokens(events) for name, events in got.items()} == {r.id: expected[r.id] for r in others[:4]}
    assert service.stats().merge.reloads == before + 1
    monkeypatch.undo()
    with service.paused():
        merger.audit()


@pytest.mark.slow
def test_an_adapter_that_rounding_swallows_is_never_merged(tmp_path: Path):
    _, model, adapter = _weak.make(tmp_path)
    with running(model, {"weak": adapter}, engine__merge="weak") as service:
        while not (told := service.adapter("weak")).merge_refusal:
            pass
        assert told.merge_error > 1.1 and not told.merged
        assert (
            told.merge_refusal
            == f"its error would be {told.merge_error:.3g} times the unmerged one, at most 1.1 is merged"
        )
        serve(service, [Request("r", PROMPT, GREEDY, adapter="weak")])
        assert service.stats().merge.switches == 0


def test_an_activated_lora_is_never_merged(tmp_path: Path, tiny_model: Path, tiny_spec: Any):
    path = _make.make_adapter(tmp_path / "late", tiny_spec, alora_invocation_tokens=[5, 6])
    with running(tiny_model, {"late": path}, engine__merge="late") as service:
        while not service.adapter("late").merge_refusal:
            pass
        serve(service, [Request("r", (*PROMPT, 5, 6, 7), GREEDY, adapter="late")])
        assert service.stats().merge.switches == 0


def test_auto_merges_where_adapters_are_told_to_cost_much_and_never_where_they_cost_nothing(
    tiny_model: Path, tiny_adapters: dict[str, Path]
):
    names = ["large"] * 14 + ["small", None]
    requests = [Request(str(i), PROMPT[i:], GREEDY, adapter=name) for i, name in enumerate(names)]
    with running(tiny_model, tiny_adapters, engine__merge="auto") as service:
        times, answers = of(service).policy.times, []

        def served(share: float) -> int:
            with service.paused():
                times.cost = AdapterCost(share)
                port.save(of(service))
            answers.append(serve(service, requests))
            return service.stats().merge.switches

        assert not any(served(0.0) for _ in range(3))
        assert any(served(0.9) for _ in range(20)), "its loss is measured first, which the budget pays, too"
        served(0.9)
        assert not service.stats().merge.reloads
        for got in answers[1:]:
            for name, events in got.items():
                assert tokens(events) == tokens(answers[0][name])


def test_what_merging_can_gain_is_measured_when_the_last_program_is_there(
    tiny_model: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """On a GPU the program without adapters compiles while the server serves."""
    measured, seen = build.adapter_cost, []

    def fill(runner: Runner, value: float) -> None:
        """Not `jnp.full`, which would compile."""
        pool = runner.pool.array
        runner.pool.array = jax.device_put(np.full(pool.shape, value, pool.dtype), pool.sharding)

    def acts(runner: Runner, layout: PoolLayout) -> bool:
        """Whether the launch that is measured differs from the other in a pool that is not empty."""
        fill(runner, 0.1)
        launches = with_adapter(runner.builder, layout, 16), without(runner.builder)
        one, other = (np.asarray(runner.forward(launch), np.float32) for launch in launches)
        fill(runner, 0.0)
        return float(np.abs(one - other).max()) > 0.01

    def cost(runner: Runner, layout: PoolLayout, max_rank: int, between: Between) -> AdapterCost:
        seen.append(between(lambda: (runner.programs_left, runner.builder.compiled.bare, acts(runner, layout))))
        found = measured(runner, layout, max_rank, between)
        assert found.blocks == sum(block_counts(layout, 16))
        return replace(found, share=0.125)  # what is measured may be noise, and 0

    monkeypatch.setattr(build, "adapter_cost", cost)
    monkeypatch.setattr(device, "has_bare", lambda platform: True)
    with running(tiny_model, tiny_adapters, engine__merge="auto") as service:
        [(left, bare, act)] = seen
        assert act and left == 0 and bare == service.parts.runner.builder.buckets.bare
        assert of(service).policy.times.cost.share == 0.125


@pytest.mark.parametrize("where", ["begin", "measure"])
def test_without_memory_to_merge_the_engine_goes_on_unmerged(
    service: Running, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, where: str
):
    switching, merger = of(service), merger_of(service)

    def short(*_: Any) -> None:
        raise MemoryError("planted")

    settle(service, 1.0)
    with service.paused():
        while merger.done:
            merger.back()
        assert merger.whole()
        port.forget_merged(switching)
        monkeypatch.setattr(merger, where, short)
    got = serve(service, mixed())
    assert {name: tokens(events) for name, events in got.items()} == expected
    info = {found.name: found for found in service.adapters()}["large"]
    assert not info.merged and info.merge_refusal == "memory was too short for it"
    assert not service.replica.failure.done()
    with service.paused():
        monkeypatch.undo()
        switching.policy.refused.clear()
    settle(service, 1.0)


@pytest.mark.parametrize("way", [port.merges, port.unmerges])
def test_memory_that_ends_in_the_middle_of_a_piece_costs_the_merge_and_not_the_engine(
    service: Running,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Merger], port.Seam],
):
    switching, merger = of(service), merger_of(service)
    settle(service, 1.0)
    before, change, left = merger.reloads, getattr(*way(merger)), 5

    def short(*words: Any) -> Any:  # within a piece: q, k and v are one, and o, and gate and up
        nonlocal left
        left -= 1
        if left:
            return change(*words)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

    with service.paused():
        monkeypatch.setattr(*way(merger), short)
    got = serve(service, mixed())  # others take it out, and once they have ended it is merged again
    assert {name: tokens(events) for name, events in got.items()} == expected
    while merger.reloads == before:
        pass
    with service.paused():
        merger.audit()
    got = serve(service, mixed())
    assert {name: tokens(events) for name, events in got.items()} == expected
    assert not service.replica.failure.done() and merger.reloads == before + 1
    with service.paused():
        monkeypatch.undo()
        switching.policy.refused.clear()
    settle(service, 1.0)


@pytest.mark.parametrize(
    "name,said",
    [("larg", "adapter 'larg'.*'large'.*nothing is merged until it is loaded"), ("late", "is never merged")],
)
def test_a_start_says_so_if_what_it_is_to_merge_is_not_there_or_never_merged(
    name: str, said: str, tmp_path: Path, tiny_model: Path, tiny_spec: Any, tiny_adapters: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    late = _make.make_adapter(tmp_path / "late", tiny_spec, alora_invocation_tokens=[5, 6])
    with running(tiny_model, {"large": tiny_adapters["large"], "late": late}, engine__merge=name):
        [told] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("engine.merge")]
    assert re.search(said, told)
