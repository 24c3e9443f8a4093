"""A bfloat16 model through the whole engine on the CPU: weights, pool and activations in eight bits of precision.

Rounding depends on the shapes of a launch, so answers agree here within a tolerance, and greedy tokens
where the most likely one is clearly ahead. In float32 they are equal (`test_engine`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jlora.types import Request, TokenEvent, TokenLogprob
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, mixed, running, serve

# Log-probabilities here reach -10, where neighbours in bfloat16 are 2^-4 apart, and the loudest adapter
# multiplies what two layers round: a single one may move by a few of these, their mean hardly moves.
TOLERANCE, MEAN = 0.3, 0.05
SHOWN = replace(GREEDY, logprobs=2)
Answers = Mapping[str, Sequence[TokenEvent]]


def greedy(**changes: Any) -> list[Request]:
    """`mixed`, base and three adapters, all of it greedy and with the two most likely tokens."""
    return [replace(request, sampling=replace(SHOWN, **changes)) for request in mixed()]


def alone(model: Path, adapters: Mapping[str, Path], dtype: str) -> Answers:
    """Each request by itself and without the prefix cache, its prompt scored."""
    with running(model, adapters, model__dtype=dtype, cache__prefix_reuse=False) as service:
        return {r.id: serve(service, [r])[r.id] for r in greedy(prompt_logprobs=0)}


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tiny_adapters: dict[str, Path]) -> Answers:
    return alone(tiny_model, tiny_adapters, "bfloat16")


def report(event: TokenEvent) -> TokenLogprob:
    """The logprobs of one token; all of them are finite."""
    found = event.logprob
    assert found is not None and len(found.top) == 2
    assert all(math.isfinite(p) and p <= 0 for p in (found.logprob, *(p for _, p in found.top)))
    return found


def apart(got: Sequence[TokenEvent], want: Sequence[TokenEvent]) -> list[float]:
    """How far the logprobs are apart, up to the first token that differs: after it the contexts do.

    It may differ only where the most likely token is not clearly ahead: both logprobs may have moved.
    """
    found: list[float] = []
    for one, other in zip(map(report, got), map(report, want), strict=True):
        if one.token_id != other.token_id:
            ahead = other.top[0][1] - other.top[1][1]
            assert ahead < 2 * TOLERANCE, f"token {len(found)} differs, and the expected one was {ahead:.3f} ahead"
            break
        found.append(abs(one.logprob - other.logprob))
    return found


def check_dtypes(service: Running) -> None:
    """Weights, the pool and the host tier: nothing is held in more than 16 bits."""
    runner, swapper = service.parts.runner, service.parts.swapper
    assert service.layout.dtype == "bfloat16"
    assert runner.pool.array.dtype == swapper.host.array.dtype == jax.numpy.bfloat16
    assert {str(weight.dtype) for weight in jax.tree.leaves(runner.weights.params)} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"model__tp": 2}, {"blocks": 30}],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "default",
)
def test_answers_agree_alone_and_mixed_in_bfloat16(
    settings: dict[str, Any], tiny_model: Path, tiny_adapters: dict[str, Path], expected: Answers
):
    with running(tiny_model, tiny_adapters, model__dtype="bfloat16", **settings) as service:
        check_dtypes(service)
        for _ in range(2):  # the second time most prompts are in the prefix cache
            got = serve(service, greedy())
            differences = [d for name, events in expected.items() for d in apart(got[name], events)]
            assert len(differences) > 0.8 * sum(map(len, expected.values()))  # few answers meet a near tie
            assert max(differences) < TOLERANCE and np.mean(differences) < MEAN
        assert service.cache_state().kv_hit_tokens > 0
        if "blocks" in settings:  # KV and adapters went out and came back
            assert service.stats().preemptions > 0
            assert service.cache_state().bytes_swapped_in > service.layout.block_bytes * 30


@pytest.mark.slow
def test_bfloat16_answers_are_the_float32_ones_but_for_rounding(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: Answers
):
    """The prompts' logprobs, of the base and of every adapter."""

    def scores(events: Sequence[TokenEvent]) -> list[float]:
        (found,) = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
        return [token.logprob for token in found if token is not None]

    exact = alone(tiny_model, tiny_adapters, "float32")
    differences = [np.abs(np.subtract(scores(expected[name]), scores(exact[name]))) for name in exact]
    assert sum(map(len, differences)) > 300
    for each in filter(len, differences):
        assert each.max() < 3 * TOLERANCE and each.mean() < 3 * MEAN
    assert np.concatenate(differences).mean() < MEAN
