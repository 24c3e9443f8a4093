"""Figures of a run: who counts, with what."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from jlora.sim import outcome
from jlora.sim.replay import Ask
from jlora.sim.trace import Turn
from jlora.types import CacheState, Timing, Usage


def ask(sent: float, ttft: float | None = None, output: int = 5, tpot: float = 0.1) -> Ask:
    """A turn sent at `sent`; without a `ttft` it had no token."""
    made = Ask(Turn(sent, 1, 0, (3,), output, 0), sent)
    if ttft is not None:
        made.first = sent + ttft
        made.usage = Usage(100, 60, output)
        made.timing = Timing(queue=0.1, adapter_cold_start=0.2, kv_cold_start=0.3, prefill=0.4, ttft=ttft, tpot=tpot)
    return made


def test_who_waits_when_the_run_is_cut_counts_with_the_time_waited():
    told = outcome.summary([ask(0.0, ttft=1.0), ask(4.0)], end=10.0)
    assert told["ttft_s"] == pytest.approx((1.0 + 6.0) / 2)
    assert (told["requests"], told["unfinished"], told["refused"]) == (2, 1, 0)


def test_a_first_token_counts_though_the_answer_was_cut():
    begun = ask(4.0)
    begun.first = 4.5
    assert outcome.summary([begun], end=10.0)["ttft_s"] == pytest.approx(0.5)


def test_what_was_refused_counts_as_that_and_as_nothing_else():
    refused = ask(0.0)
    refused.refused = True
    told = outcome.summary([refused, ask(0.0, ttft=1.0)], end=10.0)
    assert (told["refused"], told["unfinished"], told["ttft_s"]) == (1, 0, 1.0)


def test_answers_of_one_token_have_no_time_per_token():
    told = outcome.summary([ask(0.0, 1.0, output=1, tpot=0.0), ask(0.0, 1.0, tpot=0.2)], end=9.0)
    assert told["tpot_s"] == pytest.approx(0.2)


def test_the_adapters_wait_and_the_prefixes_overlap():
    told = outcome.summary([ask(0.0, ttft=1.0)], end=9.0)
    assert (told["adapter_s"], told["kv_s"], told["swap_s"]) == (0.2, 0.3, 0.3)
    assert told["cached"] == 0.6


def test_a_row_has_every_column_and_nothing_of_what_was_not_answered():
    answered, open_ = outcome.rows([ask(0.0, ttft=1.0), ask(2.0)])
    assert None not in answered and len(answered) == len(outcome.COLUMNS)
    found = dict(zip(outcome.COLUMNS, open_, strict=True))
    assert found["sent_s"] == 2.0 and found["ttft_s"] is None and found["cached"] is None


def test_the_hits_of_several_caches_weigh_by_their_requests():
    """A replica that nothing asked neither helps nor harms the rate of all."""
    fields = dict.fromkeys((field.name for field in dataclasses.fields(CacheState)), 0)
    none = CacheState(**fields)  # pyright: ignore[reportArgumentType]
    asked = {"adapter_hits": 9, "adapter_lookups": 10, "kv_lookup_tokens": 100, "kv_hit_tokens": 60}
    busy = replace(none, **asked, kv_host_hit_tokens=20, bytes_swapped_in=7, recomputed_tokens=3)
    told = outcome.cache((none, busy), (busy, busy), (none, replace(none, adapter_lookups=2, bytes_swapped_in=1)))
    assert told["adapter_hits"] == pytest.approx(9 / 12)
    assert (told["kv_device_hits"], told["kv_host_hits"]) == pytest.approx((0.4, 0.2))
    assert (told["bytes_in"], told["recomputed_tokens"]) == (8, 3)


def test_a_run_without_requests_has_figures_too():
    told = outcome.summary([], end=1.0)
    assert told["requests"] == 0 and told["ttft_s"] == 0.0


def test_floats_are_cut_and_nothing_else_is():
    assert outcome.rounded({"a": [1.23456789, 12345678, None], "b": "1.23456789"}) == {
        "a": [1.23457, 12345678, None],
        "b": "1.23456789",
    }


def test_the_table_has_a_row_per_policy_and_lines_up():
    parts: dict[str, dict[str, float]] = {}
    for part, key, _, _ in outcome.TABLE.values():
        parts.setdefault(part, {})[key] = 0.5
    text = outcome.table([{"policy": "lru", **parts}, {"policy": "a-longer-name", **parts}])
    head, *rows = text.splitlines()
    assert len(rows) == 2 and len({len(line) for line in (head, *rows)}) == 1
    assert rows[0].split()[:2] == ["lru", "500"]
