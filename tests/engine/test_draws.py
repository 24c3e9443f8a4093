"""On a GPU, rows that need no branch of the sampler are drawn by programs without. Here a CPU runs them, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jlora.config import EngineConfig
from jlora.engine import device
from jlora.engine.batch import BatchBuilder, Launch
from jlora.layout import PoolLayout
from jlora.model import sampling
from jlora.types import Request, SamplingParams
from tests import port
from tests._make import tiny_spec
from tests.engine.test_batch import BASE, PROMPT, running
from tests.engine.test_engine import GREEDY, SEEDED, TABLES, serve, tokens
from tests.engine.test_engine import running as replica_of

PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HOT = replace(PLAIN, temperature=0.5, seed=4)
BUSY = {
    "cut by top_p": replace(HOT, top_p=0.9),
    "cut by top_k": replace(HOT, top_k=3),
    "cut by min_p": replace(HOT, min_p=0.1),
    "reports": replace(PLAIN, logprobs=0),
    "biased": replace(PLAIN, logit_bias={3: 1.0}),
    "penalised": replace(PLAIN, frequency_penalty=0.5),
    "held back": replace(PLAIN, min_tokens=2, stop_token_ids=(5,)),
}


def launch_of(*params: SamplingParams, later: int = 0) -> Launch:
    """Of sequences with these parameters that decode, `later` steps on."""
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
    return builder.launch(works, 4, 1)


def draws(*params: SamplingParams, later: int = 0) -> str:
    """The program that draws their tokens."""
    return launch_of(*params, later=later).draws


@pytest.mark.parametrize("kind", BUSY)
def test_one_row_that_needs_a_branch_decides_for_its_launch(kind: str):
    assert (draws(PLAIN, PLAIN), draws(PLAIN, HOT)) == ("greedy", "drawn")
    assert draws(PLAIN, BUSY[kind]) == draws(HOT, BUSY[kind]) == "sample"


def test_what_would_cut_a_draw_is_nothing_to_a_row_that_does_not_draw():
    assert draws(replace(PLAIN, top_p=0.9, top_k=3, min_p=0.1)) == "greedy"


def test_a_row_is_greedy_once_no_token_is_held_back():
    assert [draws(BUSY["held back"], later=steps) for steps in range(3)] == ["sample", "greedy", "greedy"]


@pytest.mark.slow
def test_an_engine_whose_host_waits_at_branches_takes_the_program_without_them_and_answers_alike(
    own_programs, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    kinds = (PLAIN, "greedy"), (HOT, "drawn"), (SEEDED, "sample"), (TABLES, "sample"), (GREEDY, "sample")
    requests = [Request(f"r{i}", (3, 4, 5 + i), p) for i, (p, _) in enumerate(kinds)]
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

        monkeypatch.setattr(*seam, programs._replace(**{name: noted(name) for name in ("sample", "greedy", "drawn")}))
        for request, expected, (_, program) in zip(requests, want, kinds, strict=True):
            drawn.clear()
            assert tokens(serve(replica, [request])[request.id]) == expected
            assert set(drawn) == {program}


@pytest.mark.parametrize(("kind", "draw"), [(PLAIN, sampling.greedy), (HOT, sampling.drawn)], ids=["greedy", "drawn"])
def test_a_program_without_branches_keeps_tokens_and_state_as_the_other_one_does(kind: SamplingParams, draw: Any):
    launch = launch_of(PLAIN, kind)
    assert launch.sampling is not None
    logits = np.random.default_rng(0).standard_normal((4, 40)).astype(np.float32)
    state, rows = sampling.empty_slots(4, 40), sampling.SampleBatch.of(launch.sampling)
    got, want = (jax.jit(each)(logits, state, rows) for each in (draw, sampling.sample))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
