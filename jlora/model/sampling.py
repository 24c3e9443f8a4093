"""Samples the next tokens on the device.

Each costly part (penalties, truncation, log-probabilities) is a branch of `lax.cond`, so a greedy
batch computes an argmax only, and no option of a request recompiles.

A token's random key is `fold_in(fold_in(seed, completion), position)`. So a request draws the same
tokens whatever else is in the batch, after a preemption, and on any replica.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlora.model.packed import Packed

TOP = 20  # most likely tokens that a report holds
IN_PROMPT = 1 << 30  # bit of `SlotState.seen` for a prompt token
NOTHING = np.iinfo(np.int32).max  # no token's id


class SlotState(NamedTuple):
    """State of each running sequence on the device, by slot.

    Attributes:
        last: [slots] int32, the token sampled last, which is the next step's input.
        seen: [slots, V] int32, how often each token was sampled, plus IN_PROMPT if the prompt has it.
        bias: [slots, V] float32, logit_bias. `reset_slot` initialises `seen` and `bias`.
    """

    last: jax.Array
    seen: jax.Array
    bias: jax.Array


# A field of a batch: numpy where the host makes it, jax.Array inside the program.
Array = Any


@functools.cache
def row_type(banned: int) -> np.dtype:
    """What the host writes for each row of a launch: a `SampleBatch` whose `banned` hold before position `until`."""
    one = {"int32": "slot position until completion top_k tables logprobs"}
    one["float32"] = "temperature top_p min_p repetition presence frequency"
    fields: list[tuple] = [(name, kind) for kind, names in one.items() for name in names.split()]
    return np.dtype([*fields, ("seed", "uint32", (2,)), ("banned", "int32", (banned,))])


class SampleBatch(NamedTuple):
    """Per row [S] of a launch. Padding rows have slot = number of slots, which is dropped.

    Attributes:
        slot: int32 slot.
        seed: [S, 2] uint32 key data; completion, position: int32, folded into the key.
        temperature, top_p, min_p, repetition, presence, frequency: float32; top_k: int32, 0 = all.
        tables: bool, whether the row uses its `seen` and `bias` tables.
        banned: [S, M] int32, tokens not allowed now (min_tokens), padded with ids of V and more.
        logprobs: scalar bool, whether a row reports log-probabilities.
    """

    slot: Array
    seed: Array
    completion: Array
    position: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition: Array
    presence: Array
    frequency: Array
    tables: Array
    banned: Array
    logprobs: Array

    @classmethod
    def of(cls, rows: Packed) -> SampleBatch:
        """From rows of `row_type`."""
        fields = rows.fields()
        held = fields["position"] < fields.pop("until")
        fields["banned"] = jnp.where(held[:, None], fields["banned"], NOTHING)
        fields |= {"tables": fields["tables"] > 0, "logprobs": jnp.any(fields["logprobs"] > 0)}
        return cls(**fields)


class Sampled(NamedTuple):
    """Tokens [S] with their log-probabilities under the model's own distribution.

    `logprob` [S], `top_ids` and `top_logprobs` [S, TOP] are zeros unless `SampleBatch.logprobs`.
    """

    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def empty_slots(slots: int, vocab: int) -> SlotState:
    """State for `slots` sequences."""
    return SlotState(
        jnp.zeros((slots,), jnp.int32), jnp.zeros((slots, vocab), jnp.int32), jnp.zeros((slots, vocab), jnp.float32)
    )


def reset_slot(
    state: SlotState, slot: jax.Array, prompt: jax.Array, output: jax.Array, bias: tuple[jax.Array, jax.Array]
) -> SlotState:
    """Fills one slot's tables for a sequence that starts, or restarts after preemption.

    Args:
        prompt, output: token ids, padded with V (dropped).
        bias: (ids, values), ids padded with V.
    """
    vocab = state.seen.shape[1]
    seen = jnp.zeros((vocab,), jnp.int32).at[prompt].set(IN_PROMPT, mode="drop").at[output].add(1, mode="drop")
    row = jnp.zeros((vocab,), jnp.float32).at[bias[0]].add(bias[1], mode="drop")
    return state._replace(seen=state.seen.at[slot].set(seen), bias=state.bias.at[slot].set(row))


def sample(logits: jax.Array, state: SlotState, batch: SampleBatch) -> tuple[SlotState, Sampled]:
    """[S, V] float32 logits -> the next token of every row, stored in its slot."""
    # One branch for everything that greedy rows do not need: a branch that returns logits copies them.
    busy = batch.tables | (batch.temperature > 0) | jnp.any(batch.banned < logits.shape[1], axis=1)
    token = lax.cond(jnp.any(busy), lambda: _choose(logits, state, batch), lambda: _argmax(logits))
    row = jnp.where(batch.tables, batch.slot, state.seen.shape[0])
    state = SlotState(
        state.last.at[batch.slot].set(token, mode="drop"), state.seen.at[row, token].add(1, mode="drop"), state.bias
    )
    return state, Sampled(token, *lax.cond(batch.logprobs, lambda: report(logits, token), lambda: _nothing(len(token))))


def greedy(logits: jax.Array, state: SlotState, batch: SampleBatch) -> tuple[SlotState, Sampled]:
    """`sample` of rows that take their most likely token, with nothing added, banned or reported: no branch."""
    return _plain(_argmax(logits), state, batch)


def drawn(logits: jax.Array, state: SlotState, batch: SampleBatch) -> tuple[SlotState, Sampled]:
    """The same of rows of which some draw by their temperature, with nothing cut."""
    token = _argmax(_scaled(logits, batch) + _noise(logits.shape[1], batch))
    return _plain(jnp.where(batch.temperature > 0, token, _argmax(logits)), state, batch)


def _plain(token: jax.Array, state: SlotState, batch: SampleBatch) -> tuple[SlotState, Sampled]:
    last = state.last.at[batch.slot].set(token, mode="drop")
    return state._replace(last=last), Sampled(token, *_nothing(len(token)))


def _choose(logits: jax.Array, state: SlotState, batch: SampleBatch) -> jax.Array:
    adjusted = lax.cond(jnp.any(batch.tables), lambda: _with_tables(logits, state, batch), lambda: logits)
    ban, rows = jnp.any(batch.banned < logits.shape[1]), jnp.arange(logits.shape[0])[:, None]
    adjusted = lax.cond(ban, lambda: adjusted.at[rows, batch.banned].set(-jnp.inf, mode="drop"), lambda: adjusted)
    greedy = _argmax(adjusted)
    drawing = batch.temperature > 0
    drawn = lax.cond(jnp.any(drawing), lambda: _draw(adjusted, batch), lambda: greedy)
    return jnp.where(drawing, drawn, greedy)


def _argmax(x: jax.Array) -> jax.Array:
    """[S, V] -> [S] int32, the first index of each row's largest number.

    Two plain reductions: XLA runs them in vectors on CPU, its own argmax it does not (5x slower).
    """
    vocab = x.shape[1]
    best = jnp.where(x == x.max(axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return best.min(axis=-1)


def report(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of `token` [S] and the TOP most likely (ids, log-probabilities)."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, ids = lax.top_k(logprobs, min(TOP, logits.shape[1]))
    pad = ((0, 0), (0, TOP - top.shape[1]))
    own = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
    return own, jnp.pad(ids.astype(jnp.int32), pad), jnp.pad(top, pad)


def _nothing(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.zeros((rows,)), jnp.zeros((rows, TOP), jnp.int32), jnp.zeros((rows, TOP))


def _with_tables(logits: jax.Array, state: SlotState, batch: SampleBatch) -> jax.Array:
    """logit_bias, then penalties (Keskar et al. 2019 for repetition; OpenAI's for the others)."""
    slot = jnp.minimum(batch.slot, state.seen.shape[0] - 1)
    seen = state.seen[slot]
    count = (seen & (IN_PROMPT - 1)).astype(jnp.float32)
    repetition = jnp.where(seen > 0, batch.repetition[:, None], 1.0)
    biased = logits + state.bias[slot]
    out = jnp.where(biased > 0, biased / repetition, biased * repetition)
    out = out - batch.frequency[:, None] * count - batch.presence[:, None] * (count > 0)
    return jnp.where(batch.tables[:, None], out, logits)


def _draw(logits: jax.Array, batch: SampleBatch) -> jax.Array:
    """Temperature, then top-k, top-p and min-p, then the Gumbel-max draw."""
    scaled = _scaled(logits, batch)
    cut = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    kept = lax.cond(jnp.any(cut & (batch.temperature > 0)), lambda: _truncate(scaled, batch), lambda: scaled)
    return _argmax(kept + _noise(logits.shape[1], batch))


def _scaled(logits: jax.Array, batch: SampleBatch) -> jax.Array:
    return logits / jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]


def _noise(vocab: int, batch: SampleBatch) -> jax.Array:
    """[S, V] Gumbel noise of each row's own key."""

    def noise(seed, completion, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, completion), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(noise)(batch.seed, batch.completion, batch.position)


def _truncate(logits: jax.Array, batch: SampleBatch) -> jax.Array:
    """Masks the tokens that top-k, top-p (Holtzman et al. 2020) or min-p cut, never the best one.

    Of equal tokens, top-k and min-p keep all or none, and top-p the first ones: its set is the smallest.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    vocab = logits.shape[1]
    k = jnp.where(batch.top_k > 0, jnp.minimum(batch.top_k, vocab), vocab)
    after_k = jnp.where(ordered >= jnp.take_along_axis(ordered, k[:, None] - 1, axis=1), ordered, -jnp.inf)
    probs = jax.nn.softmax(after_k, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # mass strictly above each token
    within = (before < batch.top_p[:, None]) | (batch.top_p[:, None] >= 1)  # the sum may reach 1 before the end
    others = (probs >= batch.min_p[:, None] * probs[:, :1]) & (after_k > -jnp.inf)
    kept = jnp.maximum(jnp.sum(within & others, axis=-1, keepdims=True), 1)
    floor = jnp.take_along_axis(ordered, kept - 1, axis=1)
    above, equal = logits > floor, logits == floor
    by_p = kept < jnp.sum(others, axis=-1, keepdims=True)
    room = jnp.where(by_p, kept - jnp.sum(above, axis=-1, keepdims=True), vocab)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), logits, -jnp.inf)
