"""Activated LoRA on the real engine: exact whatever is shared, and no suffix ever read by another.

Answers are compared with those of the same engine without any caching, one request at a time;
that these are PEFT's is shown in `tests/oracle`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jlora.adapters.invocation import last_occurrence
from jlora.cache.lease import Lease
from jlora.cache.readiness import Readiness
from jlora.errors import InvalidArgument
from jlora.types import Invocation, Request, TokenEvent
from tests import _make
from tests.cache._books import evict_all
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, SEEDED, TABLES, running, serve, tokens
from tests.engine.test_exactness import poisoned

CHECK, REWRITE = (90, 91, 92), (93, 94)  # invocations
TALK = tuple(3 + i * 7 % 80 for i in range(43))  # five blocks and three tokens
TIGHT: dict[str, Any] = {"blocks": 64, "cache__monitor_s": 0.001}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_spec) -> dict[str, Path]:
    """Two activated LoRAs and a plain one."""
    root = tmp_path_factory.mktemp("alora")
    make = _make.make_adapter
    return {
        "check": make(root / "check", tiny_spec, 1, 4, ("q", "v", "o"), alora_invocation_tokens=[*CHECK]),
        "rewrite": make(root / "rewrite", tiny_spec, 2, 6, tuple(_make.MODULES), alora_invocation_tokens=[*REWRITE]),
        "plain": make(root / "plain", tiny_spec, 3, 4, ("q", "down")),
    }


def requests() -> list[Request]:
    """Base, plain and activated requests over one conversation, invoked at every kind of place."""
    prompts = {
        "end": (*TALK, *CHECK),
        "middle": (*TALK, *CHECK, *range(50, 60)),
        "border": (*TALK[:40], *CHECK, 7, 8),  # the suffix begins with a block
        "over a border": (*TALK[:38], *CHECK, *range(20, 30)),
        "start": (*CHECK, *TALK),
        "twice": (*TALK[:10], *CHECK, *TALK[10:], *CHECK, 5),
        "twice in a block": (*TALK[:33], *CHECK, *CHECK, *range(60, 70)),
        "long": (*TALK, *TALK, *CHECK),
    }
    asked = [Request(f"check, {name}", prompt, adapter="check") for name, prompt in prompts.items()]
    asked += [Request(f"rewrite {i}", (*TALK, *REWRITE, *range(3, 3 + i)), adapter="rewrite") for i in (0, 5, 12)]
    asked += [Request("rewrite after check", (*TALK, *CHECK, 7, 8, *REWRITE), adapter="rewrite")]
    asked += [Request(f"base {i}", (*TALK, *CHECK, *range(50, 50 + i))) for i in (0, 6, 14)]
    asked += [Request("plain", (*TALK, *CHECK), adapter="plain"), Request("talk", TALK)]
    return [replace(r, sampling=(GREEDY, SEEDED, TABLES)[i % 3]) for i, r in enumerate(asked)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, adapters: dict[str, Path]) -> dict[str, list[int]]:
    with running(tiny_model, adapters, cache__prefix_reuse=False) as service:
        return {r.id: tokens(serve(service, [r])[r.id]) for r in requests()}


def answers(service: Running, asked: list[Request]) -> dict[str, list[int]]:
    return {name: tokens(events) for name, events in serve(service, asked).items()}


def cached(service: Running, asked: Request) -> int:
    """Serves one request; how many of its tokens were known."""
    usage = serve(service, [asked])[asked.id][-1].usage
    assert usage is not None
    return usage.cached_tokens


def test_every_adapter_answers_in_its_own_way_and_where_it_is_invoked_matters(expected: dict[str, list[int]]):
    greedy = [r for r in requests() if r.sampling is GREEDY]
    assert len({tuple(expected[r.id]) for r in greedy}) == len(greedy)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache__policy": "fastlibra-wom"},
        {"cache__policy": "vllm", "blocks": 110},
        {"cache__link_gbps": 0.01},
        {"blocks": 42},  # preemption too
        pytest.param({"model__tp": 2, "engine__overlap": False}, marks=pytest.mark.slow),
        pytest.param(  # chunks end inside the invocations
            {"engine__max_step_tokens": 5, "engine__layers": "unroll"}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "jlora",
)
def test_answers_do_not_depend_on_what_is_shared(
    settings: dict[str, Any], tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]]
):
    with poisoned(tiny_model, adapters, **{**TIGHT, **settings}) as service:
        for _ in range(3):
            assert answers(service, requests()) == expected
        assert service.cache_state().kv_hit_tokens > 0


def test_full_blocks_before_the_invocation_are_shared_by_all_and_no_other(tiny_model: Path, adapters: dict[str, Path]):
    with running(tiny_model, adapters) as service:
        invoked = Request("r", (*TALK, *CHECK), GREEDY, adapter="check")
        assert cached(service, replace(invoked, prompt=TALK, adapter=None)) == 0
        assert cached(service, invoked) == 40  # base -> check
        assert cached(service, replace(invoked, prompt=(*TALK, *REWRITE), adapter="rewrite")) == 40  # -> rewrite
        assert cached(service, replace(invoked, adapter="plain")) == 0
        assert cached(service, replace(invoked, tenant="other")) == 0
        assert cached(service, replace(invoked, tenant="other", adapter=None)) == 40
        longer = (*TALK, *range(60, 70))
        assert cached(service, replace(invoked, prompt=(*longer, *CHECK))) == 40
        assert cached(service, replace(invoked, prompt=(*longer, 3), adapter=None)) == 48  # check -> base


def test_in_a_pipeline_history_is_never_computed_again_and_an_answer_once(tiny_model: Path, adapters: dict[str, Path]):
    steps = [(None, ()), ("check", CHECK), (None, ()), ("rewrite", REWRITE), ("check", CHECK)]
    with running(tiny_model, adapters) as service:
        talk, history = list(TALK), 0
        for adapter, invocation in steps * 2:
            talk += invocation
            events = serve(service, [Request("r", tuple(talk), GREEDY, adapter=adapter)])["r"]
            usage = events[-1].usage
            assert usage is not None
            # All but the block that the last invocation began in, which has no base KV yet.
            assert usage.cached_tokens >= max(0, history // 8 * 8 - 8)
            history = len(talk)
            talk += tokens(events)[:4]  # the answer enters the conversation as text
        known = (history - len(CHECK)) // 8 * 8
        before = service.stats().prompt_tokens
        assert cached(service, Request("again", tuple(talk), GREEDY)) == known
        assert service.stats().prompt_tokens - before == len(talk) - known
        assert cached(service, Request("again", tuple(talk), GREEDY)) == (len(talk) - 1) // 8 * 8 > known


@pytest.fixture
def caught(tiny_model: Path, adapters: dict[str, Path]) -> Iterator[Running]:
    """A service with room for everything, whose monitor moves nothing."""
    with running(tiny_model, adapters, cache__monitor_s=60) as service:
        yield service


def poison_suffixes(service: Running) -> int:
    """Fills all activated KV, wherever it is, with NaN; how many blocks that were."""
    while service.cache_state().in_flight:  # copies under way would bring the right data back
        pass
    with service.paused():
        manager, pool = service.manager, service.parts.runner.pool
        found = [n for a in manager.adapters.values() for n in manager.tree.owned(a) if a.suffixes]
        device, host = ([b for n in found for b in getattr(n, tier)] for tier in ("device", "host"))
        pool.place(pool.stage(device, np.full((len(device), *service.layout.block_shape), np.nan, np.float32)))
        service.parts.swapper.host.array[host] = np.nan
    return len(device)


def test_no_suffix_kv_is_used_by_another_adapter_or_the_base(caught: Running, expected: dict[str, list[int]]):
    """A canary in every activated block: whoever reads one answers with NaN."""
    invoked = [r for r in requests() if r.adapter == "check"]
    others = [r for r in requests() if r.adapter != "check"]
    assert answers(caught, invoked) == {r.id: expected[r.id] for r in invoked}
    assert poison_suffixes(caught) >= len(invoked)
    for _ in range(2):
        assert answers(caught, others) == {r.id: expected[r.id] for r in others}
    events = serve(caught, [replace(invoked[1], sampling=GREEDY)])[invoked[1].id]  # its own: the canary sings
    assert any(_is_nan(event) for event in events)


def test_a_prompt_is_computed_up_to_its_invocation_while_its_adapter_is_on_its_way(
    tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    """The adapter's blocks hold NaN meanwhile: whoever read them would answer with it."""
    (long,) = (r for r in requests() if r.id == "check, long")
    settings = {"blocks": 100, "cache__monitor_s": 60, "cache__link_gbps": 5e-4}  # 4 ms a block
    with poisoned(tiny_model, adapters, **settings, engine__max_step_tokens=32) as service:
        while service.cache_state().in_flight:
            pass
        manager, ahead = service.manager, []
        with service.paused():
            evict_all(manager)
        readiness = manager.leases.gate.readiness

        def watched(lease: Lease, tokens: int, unadapted: int) -> Readiness:
            found = readiness(lease, tokens, unadapted)
            ahead.append(found is Readiness.AHEAD and lease.adapter.coming)
            return found

        monkeypatch.setattr(manager.leases.gate, "readiness", watched)
        assert answers(service, [long]) == {long.id: expected[long.id]}
        assert any(ahead)


def test_a_prompt_is_searched_once_and_not_on_the_engines_thread(caught: Running, monkeypatch: pytest.MonkeyPatch):
    searched = []

    def search(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
        searched.append(threading.current_thread())
        return last_occurrence(prompt, invocation)

    for module in ("jlora.engine.local", "jlora.adapters.registry"):
        monkeypatch.setattr(f"{module}.last_occurrence", search)
    claimed = replace(requests()[0], id="r", invocation=Invocation(CHECK, 0))  # what a client claims is not believed
    want = tokens(serve(caught, [replace(claimed, invocation=None)])["r"])
    searched.clear()
    assert tokens(serve(caught, [claimed])["r"]) == want
    assert searched == [threading.current_thread()]


def _is_nan(event: TokenEvent) -> bool:
    return event.logprob is not None and math.isnan(event.logprob.logprob)


def test_a_reloaded_adapter_finds_no_suffix_of_the_version_before(
    caught: Running, expected: dict[str, list[int]], adapters: dict[str, Path]
):
    invoked = [r for r in requests() if r.adapter == "check"]
    answers(caught, invoked)
    assert poison_suffixes(caught)
    caught.load_adapter("check", str(adapters["check"]), replace=True)
    assert answers(caught, invoked) == {r.id: expected[r.id] for r in invoked}


def test_unloading_frees_an_adapter_and_its_suffixes_and_keeps_the_bases_kv(caught: Running):
    invoked = Request("r", (*TALK, *CHECK, *range(3, 40)), GREEDY, adapter="check")
    assert cached(caught, invoked) == 0
    held = caught.cache_state()
    caught.unload_adapter("check")
    state = caught.cache_state()
    assert state.hbm.adapters < held.hbm.adapters
    assert state.hbm.history_kv == state.host.history_kv == 5  # the conversation's full blocks
    assert cached(caught, replace(invoked, adapter=None)) == 40


def test_prefetch_brings_an_activated_prompt_back(caught: Running):
    invoked = Request("r", (*TALK, *CHECK, *range(3, 20)), GREEDY, adapter="check")
    cached(caught, invoked)
    while caught.cache_state().in_flight:
        pass
    with caught.paused():
        evict_all(caught.manager)
    found = caught.prefetch(invoked)
    assert not found.resident_adapter and found.cached_tokens == 0 and found.coming_bytes > 0
    while caught.cache_state().in_flight:
        pass
    assert caught.prefetch(invoked) == type(found)(True, 56, 0)
    timing = serve(caught, [invoked])["r"][-1].timing
    assert timing is not None and timing.adapter_cold_start == timing.kv_cold_start == 0


def test_a_prompt_that_does_not_invoke_is_refused_or_answered_by_the_base(
    caught: Running, tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]]
):
    talk = Request("talk", TALK, GREEDY, adapter="check")
    for refused in (caught.check, lambda r: caught.submit(r, lambda events: None), caught.prefetch):
        with pytest.raises(InvalidArgument, match=r"'check'.*\[90, 91, 92\].*adapters.alora_missing"):
            refused(talk)
    with running(tiny_model, adapters, adapters__alora_missing="base") as service:
        alone = replace(talk, adapter=None)
        assert tokens(serve(service, [alone])["talk"]) == tokens(serve(service, [talk])["talk"])
        assert cached(service, talk) == 40  # the base's KV
        invoked = next(r for r in requests() if r.adapter == "check")
        assert answers(service, [invoked]) == {invoked.id: expected[invoked.id]}
