"""Cold starts with the host's help: the same answers as with every adapter on the device.

The link of these tests stands still until it is told to bring the next group of layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jlora.cache.transfer import Copy
from jlora.engine.cold_start import Chooser, measure
from jlora.engine.device import name_of as device_of
from jlora.engine.host_lora import HostLora, Share, Site
from jlora.engine.runner import Runner
from jlora.engine.scheduler import SETBACKS
from jlora.step_model import Help
from jlora.types import Request, TokenEvent
from tests import port
from tests._make import make_adapter
from tests.cache._books import evict_all
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, SEEDED, mixed, serve, tokens
from tests.engine.test_exactness import TIGHT, poisoned
from tests.test_step_model import STEPS

HELP: dict[str, Any] = {"cache__monitor_s": 60, "engine__cold_start": "cpu", "cache__link_gbps": 0.01}
PROMPT = tuple(3 + i * 7 % 80 for i in range(40))
COLD = Request("cold", PROMPT, GREEDY, adapter="large", bypass_prefix_cache=True)


class HeldLink:
    """Copies to the device end, or bring their next group of layers, one for each `release`."""

    def __init__(self, service: Running):
        self.swapper = service.parts.swapper
        self.questions = 0  # how often a launch asked whether a group has come
        self.release_at = -1  # the question before which everything comes
        self._permits = threading.Semaphore(0)
        port.to_device(self.swapper).slow_down = self._stand_still
        self.arrived = self.swapper.arrived
        self.swapper.arrived = self._asked

    def release(self, count: int = 1000) -> None:
        self._permits.release(count)

    def _stand_still(self, seconds: float) -> None:
        assert self._permits.acquire(timeout=60)

    def _asked(self, copy: Copy, group: int) -> bool:
        if self.questions == self.release_at:
            self.release()
            while not (copy.seconds or self.arrived(copy, group)):
                threading.Event().wait(0.001)
        self.questions += 1
        return self.arrived(copy, group)


@contextmanager
def cold(service: Running) -> Iterator[HeldLink]:
    """No adapter is on the device, no KV is anywhere, and nothing comes until it is released."""
    while service.cache_state().in_flight:
        pass
    service.flush_cache()
    slow_down = port.to_device(service.parts.swapper).slow_down
    with service.paused():
        evict_all(service.manager)
        link = HeldLink(service)
    try:
        yield link
    finally:
        link.release()
        with service.paused():
            port.to_device(link.swapper).slow_down, link.swapper.arrived = slow_down, link.arrived


@pytest.fixture(scope="module")
def service(tiny_model: Path, tiny_adapters: dict[str, Path]) -> Iterator[Running]:
    with poisoned(tiny_model, tiny_adapters, **HELP) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(service: Running) -> list[int]:
    """The answer to `COLD` with its adapter on the device."""
    return tokens(serve(service, [COLD])["cold"])


def start_of(events: list[TokenEvent]) -> str:
    timing = events[-1].timing
    assert timing is not None
    return timing.cold_start


def check_same(got: list[TokenEvent], wanted: list[TokenEvent]) -> None:
    """The same tokens, and log-probabilities within the oracle's tolerance."""
    assert tokens(got) == tokens(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.logprob and other.logprob and abs(one.logprob.logprob - other.logprob.logprob) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"engine__layers": "unroll", "engine__max_step_tokens": 5}, marks=pytest.mark.slow),
        pytest.param(
            {"model__tp": 2, "engine__overlap": False, "blocks": 30, "cache__link_gbps": 0.01},
            marks=pytest.mark.slow,
        ),  # preemption too
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_answers_do_not_depend_on_where_an_adapter_is_computed(
    settings: dict[str, Any], tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    kinds = set()
    with poisoned(tiny_model, tiny_adapters, **{**TIGHT, **HELP, "cache__link_gbps": 1e-3, **settings}) as service:
        for _ in range(2):
            got = serve(service, mixed())
            assert {name: tokens(events) for name, events in got.items()} == expected
            kinds |= {start_of(events) for events in got.values()}
            while service.cache_state().in_flight:
                pass
            with service.paused():
                evict_all(service.manager)
        assert "cpu" in kinds
        assert (service.stats().preemptions > 0) == ("blocks" in settings)


def test_a_request_needs_no_copy_of_its_adapter_to_end(service: Running):
    warm, helped = serve(service, [COLD])["cold"], service.cache_state().cold_helped
    compiled_at = service.parts.runner.compiled_at
    with cold(service):
        events = serve(service, [COLD])["cold"]
        assert start_of(events) == "cpu"
        assert service.cache_state().cold_helped == helped + 1
        check_same(events, warm)
        timing = events[-1].timing
        assert timing is not None and timing.adapter_cold_start < timing.ttft
        assert service.cache_state().in_flight  # still
    assert service.parts.runner.compiled_at == compiled_at, "all its programs were there"


def test_the_device_takes_over_at_any_group_of_layers_of_any_step(service: Running):
    request = replace(COLD, sampling=replace(GREEDY, max_tokens=3))
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


def test_requests_with_the_hosts_help_and_warm_ones_share_steps(service: Running, expected: dict[str, list[int]]):
    """All adapters are on their way, each of its own ranks, and requests for the base run beside them."""
    with cold(service):
        got = serve(service, mixed())
        assert {name: tokens(events) for name, events in got.items()} == expected
        assert {start_of(events) for events in got.values()} == {"", "cpu"}
    before = service.cache_state().kv_hit_tokens
    again = serve(service, mixed())  # prefix hits on what was computed with the host's help
    assert {name: tokens(events) for name, events in again.items()} == expected
    assert service.cache_state().kv_hit_tokens > before


def test_an_activated_adapter_on_its_way_acts_from_its_invocation_on(tmp_path: Path, service: Running, tiny_spec):
    invocation = (90, 91, 92)
    make_adapter(tmp_path / "a", tiny_spec, 1, 4, ("q", "v", "o"), alora_invocation_tokens=[*invocation])
    service.load_adapter("a", str(tmp_path / "a"))
    prompts = {"end": (*PROMPT, *invocation), "middle": (*PROMPT[:19], *invocation, *PROMPT[19:]), "start": invocation}
    sampling = replace(SEEDED, logprobs=0)
    requests = [Request(name, prompt, sampling, adapter="a") for name, prompt in prompts.items()]
    warm = {r.id: serve(service, [r])[r.id] for r in requests}
    with cold(service):
        got = serve(service, requests)
        for name, events in got.items():
            check_same(events, warm[name])
            assert start_of(events) == "cpu"
    service.unload_adapter("a")


def test_a_copy_that_keeps_failing_while_the_host_helps_ends_its_request_and_no_other(
    service: Running, wanted: list[int]
):
    base = Request("base", PROMPT, GREEDY)
    answer = tokens(serve(service, [base])["base"])
    failures = []

    def fail(seconds: float) -> None:
        failures.append(seconds)
        raise OSError("the link is gone")

    with cold(service) as link:
        port.to_device(link.swapper).slow_down = fail
        long = replace(COLD, sampling=replace(GREEDY, max_tokens=80))
        got = serve(service, [long, replace(base, bypass_prefix_cache=True)])
    assert isinstance(got["cold"][-1].error, OSError) and tokens(got["base"]) == answer
    assert len(failures) == 1 + SETBACKS
    assert tokens(serve(service, [COLD])["cold"]) == wanted


@pytest.mark.parametrize("error", [MemoryError("staging"), OSError("the link is gone")], ids=["memory", "link"])
@pytest.mark.parametrize("question", [1, 11, 14])  # in the prompt; of a step that decodes; of a later one
def test_a_copy_that_fails_while_the_host_helps_costs_a_new_start(
    service: Running, wanted: list[int], question: int, error: Exception
):
    """Also with tokens of its adapter's sequences on their way: none is lost or drawn twice."""
    failing = iter([error])
    with cold(service) as link:
        stand_still = port.to_device(link.swapper).slow_down

        def fail_once(seconds: float) -> None:
            if (once := next(failing, None)) is not None:
                while link.questions < question:
                    threading.Event().wait(0.001)
                raise once
            stand_still(seconds)

        port.to_device(link.swapper).slow_down = fail_once
        events = serve(service, [COLD])["cold"]
    assert events[-1].error is None and tokens(events) == wanted and start_of(events) == "cpu"


def _wrong_layer(service: Running, host: HostLora) -> None:
    prepare = host.prepare
    host.prepare = lambda shares, names, layer: prepare(shares, names, max(0, layer - 1))


def _twice(service: Running, host: HostLora) -> None:
    added = host.added
    host.added = lambda x, site: 2 * added(x, site)


def _stale_blocks(service: Running, host: HostLora) -> None:
    """Some of the host tier's blocks have come to another adapter."""
    record, blocks, prepare = service.parts.registry.get("middle"), dict[str, tuple[int, ...]](), host.prepare
    for name, block in zip(record.projections, record.node.host, strict=True):
        blocks[name] = (*blocks.get(name, ()), block)

    def stale(shares: list[Share], names: tuple[str, ...], layer: int) -> Site:
        return prepare([replace(share, blocks={**share.blocks, **blocks}) for share in shares], names, layer)

    host.prepare = stale


@pytest.mark.parametrize("bug", [_wrong_layer, _twice, _stale_blocks])
def test_a_planted_bug_changes_the_answer(bug: Callable, service: Running, wanted: list[int]):
    host = port.helper(service.parts.runner)
    with cold(service):
        bug(service, host)
        try:
            assert tokens(serve(service, [COLD])["cold"]) != wanted
        finally:
            for name in ("prepare", "added"):
                host.__dict__.pop(name, None)


def test_auto_helps_where_the_link_stands_still_and_never_on_a_fast_one(
    service: Running, wanted: list[int], monkeypatch: pytest.MonkeyPatch
):
    parts, gate = service.parts, service.manager.leases.gate
    with service.paused():
        costs = measure(parts.runner.rehearse, parts.runner.largest)
        assert min(map(min, costs)) >= 0
        monkeypatch.setattr(gate, "helps", Chooser(costs, service.manager.policy.meter, 2, lambda uid: 4))
    for seconds in (10.0, 0.0):
        with cold(service) as link:
            monkeypatch.setattr(service.manager.forecast, "arrival_s", lambda adapter, seconds=seconds: seconds)
            if not seconds:
                link.release()
            events = serve(service, [COLD])["cold"]
            assert tokens(events) == wanted and (start_of(events) == "cpu") == bool(seconds)


def test_auto_measures_its_costs_at_the_start(tiny_model: Path, tiny_adapters: dict[str, Path]):
    with poisoned(tiny_model, tiny_adapters, **{**HELP, "engine__cold_start": "auto"}) as running:
        gate = running.manager.leases.gate
        assert isinstance(gate.helps, Chooser) and gate.predicts == gate.helps.predict
        assert len(tokens(serve(running, [COLD])["cold"])) == GREEDY.max_tokens


def test_with_a_fitted_file_auto_asks_its_costs_and_rehearses_nothing(
    tmp_path: Path, service: Running, tiny_model: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """The file says that the host takes half a second for each token and place: less than the copy for three tokens."""
    reader, path = service.built.reader, tmp_path / "steps.json"
    device, block_tokens = device_of(jax.devices()[0]), reader.layout.block_tokens
    told = replace(STEPS, spec=reader.spec, device=device, block_tokens=block_tokens, help=Help((0.0, 0.5), (0.0, 0.0)))
    told = replace(told, link_gbps=HELP["cache__link_gbps"])
    told.write(path)
    monkeypatch.setattr(Runner, "rehearse", None)
    keys = {"engine__cold_start": "auto", "engine__step_model": str(path)}
    with poisoned(tiny_model, tiny_adapters, **{**HELP, **keys}) as running:
        monkeypatch.setattr(running.manager.forecast, "arrival_s", lambda adapter: 10.0)
        for prompt, helped in ((PROMPT[:3], True), (PROMPT, False)):
            with cold(running) as link:
                if not helped:
                    link.release()
                events = serve(running, [replace(COLD, prompt=prompt)])["cold"]
                assert len(tokens(events)) == GREEDY.max_tokens and (start_of(events) == "cpu") == helped
        state = running.cache_state()
        assert state.cold_predicted == 1, "the first fits into one step"
        assert 0 < state.cold_predicted_s < 10 and 0 < state.cold_measured_s
        assert state.cold_error_s == pytest.approx(abs(state.cold_measured_s - state.cold_predicted_s))


def test_a_token_with_the_hosts_help_does_not_wait_for_the_next_step(service: Running, monkeypatch: pytest.MonkeyPatch):
    """The engine reads such a step before it computes another: each has ended when it is dispatched."""
    runner, drawn = service.parts.runner, list[int]()
    run = runner.run

    def watched(plan: Any, swapper: Any) -> Any:
        drawn.append(sum(work.sequence.in_flight for work in plan.work))
        return run(plan, swapper)

    with cold(service):
        monkeypatch.setattr(runner, "run", watched)
        assert start_of(serve(service, [COLD])["cold"]) == "cpu"
    assert len(drawn) > GREEDY.max_tokens and max(drawn) == 1  # its own, and none that is not read
