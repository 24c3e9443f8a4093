"""On a GPU, rows that take their most likely token are drawn by a program of their own. Here a CPU runs it, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jlora.config import EngineConfig
from jlora.engine import device
from jlora.engine.batch import BatchBuilder
from jlora.layout import PoolLayout
from jlora.model import sampling
from jlora.types import Request, SamplingParams
from tests import port
from tests._make import tiny_spec
from tests.engine.test_batch import BASE, PROMPT, running
from tests.engine.test_engine import GREEDY, SEEDED, TABLES, serve, tokens
from tests.engine.test_engine import running as replica_of

PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BUSY = {
    "draws": replace(PLAIN, temperature=0.5),
    "reports": replace(PLAIN, logprobs=0),
    "biased": replace(PLAIN, logit_bias={3: 1.0}),
    "penalised": replace(PLAIN, frequency_penalty=0.5),
    "held back": replace(PLAIN, min_tokens=2, stop_token_ids=(5,)),
}


def greedy(*params: SamplingParams, later: int = 0) -> bool:
    """Whether a launch of sequences with these parameters is, `later` steps on."""
    spec = tiny_spec()
    builder = BatchBuilder(
        PoolLayout.of(spec, 100, 8), EngineConfig(max_seqs=4, max_step_tokens=256), spec, lambda _: ()
    )
    works = []
    for slot, each in enumerate(params):
        work = running(slot, tuple(range(10 * slot, 10 * slot + 9)), BASE)
        work.sequence.request = replace(work.sequence.request, sampling=each)
        builder.slots.set(work.sequence)
        works.append(replace(work, start=PROMPT + later))
    return builder.launch(works, 4, 1).greedy


@pytest.mark.parametrize("kind", BUSY)
def test_one_row_that_needs_more_than_the_most_likely_token_decides_for_its_launch(kind: str):
    assert greedy(PLAIN, PLAIN) and not greedy(PLAIN, BUSY[kind])


def test_a_row_is_greedy_once_no_token_is_held_back():
    assert [greedy(BUSY["held back"], later=steps) for steps in range(3)] == [False, True, True]


def test_an_engine_whose_host_waits_at_branches_takes_the_program_without_them_and_answers_alike(
    own_programs, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    kinds = (PLAIN, SEEDED, TABLES, GREEDY)
    requests = [Request(f"r{i}", (3, 4, 5 + i), p) for i, p in enumerate(kinds)]
    with replica_of(tiny_model, {}) as replica:
        assert getattr(*port.programs(replica.parts.runner)).greedy is None, "a branch costs a CPU nothing"
        want = [tokens(serve(replica, [r])[r.id]) for r in requests]
    monkeypatch.setattr(device, "has_bare", lambda platform: True)
    with replica_of(tiny_model, {}) as replica:
        seam, drawn = port.programs(replica.parts.runner), list[str]()
        programs = getattr(*seam)

        def noted(name: str) -> Any:
            program = getattr(programs, name)
            return lambda *args: drawn.append(name) or program(*args)

        monkeypatch.setattr(*seam, programs._replace(sample=noted("sample"), greedy=noted("greedy")))
        for request, expected in zip(requests, want, strict=True):
            drawn.clear()
            assert tokens(serve(replica, [request])[request.id]) == expected
            assert set(drawn) == ({"greedy"} if request.sampling is PLAIN else {"sample"})


def test_the_program_without_branches_keeps_the_state_as_the_other_one_does():
    rows = sampling.SampleBatch.of
    slots = BatchBuilder(
        PoolLayout.of(tiny_spec(), 100, 8), EngineConfig(max_seqs=4), tiny_spec(), lambda _: ()
    ).slots.rows(np.array([1, 3, 4, 4], np.int32), np.array([5, 6], np.int32))
    logits = np.random.default_rng(0).standard_normal((4, 40)).astype(np.float32)
    state = sampling.empty_slots(4, 40)
    got, want = (jax.jit(draw)(logits, state, rows(slots)) for draw in (sampling.greedy, sampling.sample))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
