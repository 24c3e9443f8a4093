"""The whole engine on the CPU: the same answers whatever shares the step, and nothing left behind."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jlora import config
from jlora.engine import device
from jlora.engine.sources import read_adapter
from jlora.errors import AlreadyExists, ConfigError, NotFound, ResourceExhausted, Unavailable
from jlora.types import Request, SamplingParams, TokenEvent
from tests import _make
from tests.engine._replica import Running

BASE: Mapping[str, Any] = {
    "cache.block_tokens": 8,
    "cache.hbm_blocks": 160,
    "engine.max_seqs": 4,
    "engine.max_step_tokens": 16,
    "engine.layers": "scan",
}
UNBOUND = ("fastlibra-wom", "vllm", "vllm-fair")  # policies that let KV outstay what it depends on
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True)
TABLES = SamplingParams(
    temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4,
    logit_bias={5: 2.0, 9: -100.0}, min_tokens=3,
)  # fmt: skip


@contextmanager
def running(model: Path, adapters: Mapping[str, Path], blocks: int | None = None, **settings: Any) -> Iterator[Running]:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    paths = {f"adapters.paths.{name}": str(path) for name, path in adapters.items()}
    service = Running(config.load(None, {**BASE, "model.path": str(model), **paths, **keys}), blocks=blocks)
    try:
        yield service
        service.check_integrity()
        state = service.cache_state()
        assert state.hbm.running_kv == 0
        assert state.invalid_kv == 0 or state.policy in UNBOUND
        assert service.stats().compiles_after_warmup == 0
    finally:
        service.stop()


def serve(service: Running, requests: Sequence[Request]) -> dict[str, list[TokenEvent]]:
    """Submits all at once; every request's events, grouped by request, completions in order."""
    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    for request in requests:
        service.submit(request, inbox.put)
    events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    open_ = sum(len(request.open) for request in requests)
    while open_:
        for event in inbox.get(timeout=120):
            events[event.request_id].append(event)
            open_ -= event.finish_reason is not None
    return {name: sorted(found, key=lambda e: e.index) for name, found in events.items()}


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def mixed() -> list[Request]:
    """Base and adapters, short and long prompts, greedy, seeded and with penalties."""
    prompts = [(7,), tuple(range(3, 12)), tuple(range(40, 80)), (5, 6) * 12, tuple(range(3, 20))]
    adapters = [None, "small", "middle", "large", "large", None, "middle"]
    params = [GREEDY, SEEDED, TABLES]
    return [Request(f"r{i}", prompts[i % 5], params[i % 3], adapter=adapters[i % 7]) for i in range(21)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache__prefix_reuse": False},
        {"engine__overlap": False},
        {"engine__max_step_tokens": 5},
        {"engine__layers": "unroll"},
        pytest.param({"model__tp": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "default",
)
def test_answers_are_the_same_alone_and_mixed(
    settings: dict[str, Any], own_programs, tiny_model: Path, tiny_adapters: dict[str, Path], expected
):
    with running(tiny_model, tiny_adapters, **settings) as service:
        for _ in range(2):  # the second time most prompts are in the prefix cache
            got = serve(service, mixed())
            assert {name: tokens(events) for name, events in got.items()} == expected
        hits = service.cache_state().kv_hit_tokens
        assert (hits > 0) == settings.get("cache__prefix_reuse", True)


def test_answers_are_the_same_where_launches_without_adapters_have_their_own_programs(
    tiny_model: Path,
    tiny_adapters: dict[str, Path],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
):
    """As on a GPU; `running` checks that nothing is compiled after the start."""
    monkeypatch.setattr(device, "has_bare", lambda platform: True)
    with running(tiny_model, tiny_adapters) as service:
        base = [request for request in mixed() if request.adapter is None]
        for requests in (base, mixed()):
            got = serve(service, requests)
            assert {name: tokens(events) for name, events in got.items()} == {r.id: expected[r.id] for r in requests}


def test_answers_are_the_same_when_memory_forces_preemption_and_adapter_reloads(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]]
):
    with running(tiny_model, tiny_adapters, blocks=30) as service:
        got = serve(service, mixed())
        assert {name: tokens(events) for name, events in got.items()} == expected
        assert service.stats().preemptions > 0
        assert service.cache_state().bytes_swapped_in > service.layout.block_bytes * 30


@pytest.fixture(scope="module")
def service(tiny_model: Path, tiny_adapters: dict[str, Path]) -> Iterator[Running]:
    with running(tiny_model, tiny_adapters) as one:
        yield one


def test_n_completions_draw_apart_and_reproducibly(service: Running):
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=8, ignore_eos=True)
    first = serve(service, [Request("a", (3, 4, 5), params)])["a"]
    again = serve(service, [Request("b", (3, 4, 5), params), *mixed()[:4]])["b"]
    assert tokens(first) == tokens(again)
    each = [tuple(tokens([e for e in first if e.index == i])) for i in range(3)]
    assert len(set(each)) == 3 and all(len(t) == 8 for t in each)


def test_usage_and_timing_tell_what_happened(service: Running):
    prompt = tuple(range(20, 45))
    for cached in (0, 24):
        (last,) = [e for e in serve(service, [Request("a", prompt, GREEDY)])["a"] if e.usage]
        assert last.usage is not None and last.timing is not None
        assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (25, cached, 12)
        assert 0 <= last.timing.queue <= last.timing.ttft and last.timing.prefill > 0 and last.timing.tpot > 0


def test_an_adapter_reloaded_under_its_name_answers_anew_and_leaves_no_kv(service: Running, tmp_path: Path, tiny_spec):
    prompt = tuple(range(50, 75))
    paths = [_make.make_adapter(tmp_path / str(i), tiny_spec, seed=70 + i, r=4, targets=("q", "v")) for i in (0, 1)]

    def answer(name: str) -> list[int]:
        return tokens(serve(service, [Request("x", prompt, GREEDY, adapter=name)])["x"])

    free = service.cache_state().hbm.free
    first = service.load_adapter("again", str(paths[0]))
    one = answer("again")
    with pytest.raises(AlreadyExists, match="again"):
        service.load_adapter("again", str(paths[1]))
    second = service.load_adapter("again", str(paths[1]), replace=True)
    two = answer("again")
    assert first.uid != second.uid and first.digest != second.digest and one != two
    service.load_adapter("other", str(paths[0]))
    assert answer("other") == one
    for name in ("again", "other"):
        service.unload_adapter(name)
    assert service.cache_state().hbm.free == free
    with pytest.raises(NotFound, match="'again'"):
        answer("again")


def test_near_names_are_named(service: Running):
    with pytest.raises(NotFound, match="did you mean 'middle'"):
        service.submit(Request("x", (3,), GREEDY, adapter="midle"), lambda events: None)


def test_pinning_is_kept_under_pressure(service: Running):
    assert service.pin_adapter("large", True).pinned
    serve(service, [Request(f"p{i}", tuple(range(3 + i, 60 + i)), GREEDY) for i in range(24)])
    assert service.adapter("large").tier == "HBM"
    service.pin_adapter("large", False)


def test_prompt_logprobs_cover_the_prompt_and_come_once(service: Running):
    prompt = tuple(range(3, 90))
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    events = serve(service, [Request("a", prompt, params)])["a"]
    reports = [e.prompt_logprobs for e in events if e.prompt_logprobs is not None]
    assert len(reports) == 1 and reports[0][0] is None
    assert [r.token_id for r in reports[0][1:] if r] == list(prompt[1:])
    assert all(r and len(r.top) == 2 and r.logprob <= 0 for r in reports[0][1:])


def test_an_abort_frees_the_blocks_before_the_next_step(service: Running):
    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    handle = service.submit(Request("gone", (3, 4, 5), params), inbox.put)
    inbox.get(timeout=60)
    assert service.replica.abort(handle).result(60)
    assert service.cache_state().hbm.running_kv == 0
    while not (events := inbox.get(timeout=60))[-1].finish_reason:
        pass
    assert events[-1].finish_reason == "abort" and not service.abort("gone")


def test_an_adapter_that_overflows_leaves_nothing_behind_for_others(service: Running, tmp_path: Path, tiny_spec):
    """Its KV is NaN; the blocks it gave back are another request's next, only partly rewritten."""
    path = _make.make_adapter(tmp_path / "a", tiny_spec, seed=1, r=2, targets=("v",))
    read = read_adapter("huge", str(path), service.built.reader)
    huge = replace(read, data=read.data * np.float32(1e25))  # the reader refuses such weights in a file
    request = Request("x", tuple(range(30, 60)), GREEDY, bypass_prefix_cache=True)
    want = tokens(serve(service, [request])["x"])
    service.local.between_steps(lambda: service.built.engine.adapters.add(huge)).result(60)
    wrecked = [Request(f"h{i}", tuple(range(3, 80)), GREEDY, adapter="huge") for i in range(6)]
    got = serve(service, [*wrecked, request])
    assert tokens(got["x"]) == want
    service.unload_adapter("huge")
    service.flush_cache()
    for _ in range(3):
        assert tokens(serve(service, [request])["x"]) == want


def test_unset_max_tokens_is_what_pool_and_adapter_leave(tiny_model: Path, tiny_adapters: dict[str, Path]):
    with running(tiny_model, tiny_adapters, blocks=26) as service:
        size = service.adapter("large").blocks
        params = SamplingParams(temperature=0, ignore_eos=True)
        request = service.check(Request("x", (3, 4), params, "large"))
        assert len(tokens(serve(service, [request])["x"])) == (26 - size) * 8 - 2
        base = service.check(Request("x", (3, 4), params))
        assert len(tokens(serve(service, [base])["x"])) == 126  # the context's end


def test_unloading_waits_for_the_versions_it_replaced_too(service: Running, tmp_path: Path, tiny_spec):
    paths = [_make.make_adapter(tmp_path / str(i), tiny_spec, seed=80 + i, r=4, targets=("q", "v")) for i in (0, 1)]
    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    service.load_adapter("twice", str(paths[0]))
    service.submit(Request("old", (3, 4), replace(GREEDY, max_tokens=100), adapter="twice"), inbox.put)
    inbox.get(timeout=60)
    service.load_adapter("twice", str(paths[1]), replace=True)
    service.unload_adapter("twice")
    assert service.stats().live_requests == 0


def test_a_receiver_that_fails_ends_its_own_request_only(service: Running):
    def broken(events: list[TokenEvent]) -> None:
        raise RuntimeError("no one is here")

    service.submit(Request("broken", (3, 4), replace(GREEDY, max_tokens=100)), broken)
    assert len(tokens(serve(service, [Request("x", (3, 4), GREEDY)])["x"])) == 12
    while service.stats().live_requests:
        time.sleep(0.01)


def test_what_can_never_fit_is_refused_with_the_key_to_change(service: Running, tmp_path: Path, tiny_spec):
    path = _make.make_adapter(tmp_path / "big", tiny_spec, seed=1, r=200, targets=tuple(_make.MODULES))
    with pytest.raises(ResourceExhausted, match=r"needs \d+ blocks, .* of the pool's 160 .*; raise cache.hbm_blocks"):
        service.load_adapter("big", str(path))
    assert "big" not in [info.name for info in service.adapters()]
    never = Request("x", (3,) * 30, SamplingParams(max_tokens=2000))  # past the validator
    with pytest.raises(ResourceExhausted, match=r"2030 tokens .* 160 blocks; raise cache.hbm_blocks"):
        service.submit(never, lambda events: None)


def test_an_adapter_that_never_fits_is_refused_before_its_weights_are_read(service: Running, tmp_path: Path, tiny_spec):
    path = _make.make_adapter(tmp_path / "a", tiny_spec, r=256, targets=tuple(_make.MODULES))
    (path / "adapter_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ResourceExhausted, match=r"needs \d+ blocks, .*; raise cache.hbm_blocks"):
        read_adapter("large", str(path), service.built.reader)


def test_a_stopped_service_says_so(tiny_model: Path):
    with running(tiny_model, {}, engine__warmup=False) as service:
        pass
    with pytest.raises(Unavailable):
        service.submit(Request("x", (3,), GREEDY), lambda events: None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cache__hbm_blocks", 10**9, r"model does not fit: .* need .* GiB of the .* GiB free; lower cache.hbm_blocks"),
        ("model__tp", 3, r"model.tp = 3: must divide the model's 2 key-value heads"),
        ("model__tp", 16, r"model.tp = 16: this process sees 4 cpu devices"),
        ("cache__block_tokens", 2, r"cache.block_tokens = 2: must be at least 3 to hold one rank of"),
        ("model__path", "/nowhere/at/all", "model.path"),
    ],
)
def test_a_server_that_cannot_start_says_what_to_change(key: str, value: Any, message: str, tiny_model: Path):
    with pytest.raises((ConfigError, NotFound), match=message), running(tiny_model, {}, **{key: value}):
        raise AssertionError("it started")
