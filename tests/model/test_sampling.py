"""The sampler against numpy: what is cut, what is penalised, and that draws follow the seed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.model import sampling
from jlora.model.sampling import IN_PROMPT, TOP, SampleBatch
from tests import port

V, SLOTS = 40, 4


def batch(rows: int, **fields) -> SampleBatch:
    base = {
        "slot": np.arange(rows, dtype=np.int32),
        "seed": np.tile(np.array([[0, 1]], np.uint32), (rows, 1)),
        "completion": np.zeros(rows, np.int32),
        "position": np.zeros(rows, np.int32),
        "temperature": np.ones(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "repetition": np.ones(rows, np.float32),
        "presence": np.zeros(rows, np.float32),
        "frequency": np.zeros(rows, np.float32),
        "tables": np.zeros(rows, bool),
        "banned": np.full((rows, 3), V, np.int32),
        "logprobs": np.bool_(False),
    }
    for name, value in fields.items():
        base[name] = np.broadcast_to(np.asarray(value, base[name].dtype), base[name].shape)
    return SampleBatch(**base)


draw = jax.jit(sampling.sample)


def logits_of(seed: int, rows: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, V)).astype(np.float32) * 2


def frequencies(logits: np.ndarray, count: int = 3000, **fields) -> np.ndarray:
    """How often each token is drawn for one row of logits over many positions."""
    rows = np.tile(logits, (count, 1))
    drawn = draw(rows, sampling.empty_slots(SLOTS, V), batch(count, position=np.arange(count), slot=SLOTS, **fields))
    return np.bincount(np.asarray(drawn[1].token), minlength=V) / count


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_temperature_zero_takes_the_best_token_whatever_else_is_set():
    logits = logits_of(0, 3)
    _, out = draw(logits, sampling.empty_slots(SLOTS, V), batch(3, temperature=0, top_k=2, top_p=0.1))
    np.testing.assert_array_equal(out.token, logits.argmax(1))


def test_rows_without_branches_draw_what_greedy_rows_draw_with_them():
    logits, state = logits_of(7, 3), sampling.empty_slots(SLOTS, V)
    rows = batch(3, temperature=0, slot=np.array([2, SLOTS, 0]))
    got, want = jax.jit(sampling.greedy)(logits, state, rows), draw(logits, state, rows)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float):
    logits = logits_of(1, 1)[0]
    want = softmax(logits / temperature)
    assert np.abs(frequencies(logits, temperature=temperature) - want).max() < 0.03


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 3}, lambda p: np.argsort(-p)[:3]),
        ({"top_k": 1}, lambda p: np.argsort(-p)[:1]),
        ({"min_p": 0.3}, lambda p: np.flatnonzero(p >= 0.3 * p.max())),
        ({"top_p": 0.6}, lambda p: np.argsort(-p)[: np.searchsorted(np.cumsum(np.sort(p)[::-1]), 0.6) + 1]),
        ({"top_p": 1e-6}, lambda p: np.argsort(-p)[:1]),
    ],
)
def test_truncation_keeps_exactly_the_tokens_it_should(fields, kept):
    logits = logits_of(2, 1)[0]
    keep = kept(softmax(logits))
    seen = frequencies(logits, **fields)
    assert set(np.flatnonzero(seen)) <= set(keep.tolist())
    renormalised = softmax(np.where(np.isin(np.arange(V), keep), logits, -np.inf))
    assert np.abs(seen - renormalised).max() < 0.03


def test_rows_draw_the_same_alone_and_in_any_batch():
    logits = logits_of(3, 8)
    fields = {"position": np.arange(8), "seed": np.arange(16).reshape(8, 2), "completion": np.arange(8) % 3}
    state = sampling.empty_slots(8, V)
    together = np.asarray(draw(logits, state, batch(8, **fields))[1].token)
    for i in range(8):
        one = {name: value[i : i + 1] for name, value in fields.items()}
        alone = draw(logits[[i, i]], state, batch(2, **{k: np.concatenate([v, v]) for k, v in one.items()}))
        assert int(alone[1].token[0]) == together[i]


def test_seed_completion_and_position_each_change_the_draw():
    flat = np.zeros((200, V), np.float32)
    state = sampling.empty_slots(SLOTS, V)

    def tokens(**fields) -> np.ndarray:
        return np.asarray(draw(flat, state, batch(200, slot=SLOTS, **fields))[1].token)

    at = np.arange(200)
    base = tokens(position=at)
    assert (base == tokens(position=at)).all()
    for other in (tokens(position=at + 500), tokens(position=at, completion=1), tokens(position=at, seed=[0, 2])):
        assert (base == other).mean() < 0.2


def test_penalties_and_bias_follow_their_formulas_and_touch_only_their_rows():
    state = sampling.empty_slots(SLOTS, V)
    prompt, output = np.array([3, 5, V], np.int32), np.array([5, 5, 8], np.int32)
    bias = (np.array([11, 5], np.int32), np.array([2.5, 4], np.float32))
    state = sampling.reset_slot(state, np.int32(1), prompt, output, bias)
    assert int(state.seen[1, 3]) == IN_PROMPT and int(state.seen[1, 5]) == IN_PROMPT + 2
    logits = logits_of(4, 2)
    want = logits[1].copy()
    want[[11, 5]] += 2.5, 4  # before the penalties, as transformers' generate does
    for token in (3, 5, 8):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
    for token, count in ((5, 2), (8, 1)):
        want[token] -= 0.5 * count + 0.25
    fields = {"repetition": 1.5, "frequency": 0.5, "presence": 0.25, "tables": [False, True]}
    got = port.with_tables(jnp.asarray(logits), state, batch(2, **fields))
    np.testing.assert_allclose(got[1], want, atol=1e-5)
    np.testing.assert_array_equal(got[0], logits[0])


def test_a_sampled_token_is_counted_in_its_slot_and_padding_rows_leave_no_trace():
    state = sampling.empty_slots(SLOTS, V)
    logits = logits_of(5, 3)
    state, out = draw(logits, state, batch(3, slot=[2, 0, SLOTS], tables=[True, False, True], temperature=0))
    assert int(state.last[2]) == int(out.token[0]) and int(state.last[0]) == int(out.token[1])
    assert int(state.seen.sum()) == 1 and int(state.seen[2, int(out.token[0])]) == 1


def test_banned_tokens_never_come():
    logits = logits_of(6, 1)[0]
    best = np.argsort(-logits)[:2]
    banned = np.array([[best[0], best[1], V]])
    _, out = draw(logits[None].repeat(2, 0), sampling.empty_slots(SLOTS, V), batch(2, temperature=0, banned=banned))
    assert int(out.token[0]) == np.argsort(-logits)[2]


def test_logprobs_are_the_models_own_whatever_the_sampling():
    logits = logits_of(7, 2)
    fields = {"temperature": 0.3, "top_k": 2, "logprobs": True}
    _, out = draw(logits, sampling.empty_slots(SLOTS, V), batch(2, **fields))
    want = np.log(softmax(logits[0]))
    assert float(out.logprob[0]) == pytest.approx(want[int(out.token[0])], abs=1e-5)
    order = np.argsort(-want)[:TOP]
    np.testing.assert_array_equal(out.top_ids[0], order)
    np.testing.assert_allclose(out.top_logprobs[0], want[order], atol=1e-5)


def test_a_row_that_cuts_nothing_keeps_all_beside_one_that_cuts():
    """In float32 the sum of many small probabilities reaches 1 before the last of them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 128_256)) * 5, jnp.float32)
    kept = port.truncated(logits, batch(2, top_p=[1.0, 0.9])) > -jnp.inf
    assert kept[0].all() and 0 < kept[1].sum() < 128_256


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_p": 1e-6}, [2]),
        ({"top_p": 0.45}, [2, 4]),
        ({"top_p": 0.95}, [2, 4, 5, 7]),
        ({"top_p": 0.45, "top_k": 1}, [2, 4]),
        ({"top_k": 1}, [2, 4, 5, 7]),
        ({"min_p": 1.0}, [2, 4, 5, 7]),
    ],
)
def test_of_equal_tokens_top_p_keeps_the_first(fields: dict[str, float], kept: list[int]):
    """In bfloat16 equal logits are not rare, and a tiny `top_p` asks for one token."""
    logits = np.full((1, V), -9, np.float32)
    logits[0, [2, 4, 5, 7]] = 3
    left = port.truncated(jnp.asarray(logits), batch(1, **fields))
    assert np.flatnonzero(left[0] > -jnp.inf).tolist() == kept
