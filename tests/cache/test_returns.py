"""The life table: what conversations did is what it expects of the next ones."""

from __future__ import annotations

import math
import random

import pytest

from jlora.cache.returns import EDGES, Returns
from tests.cache._cache import A, B, Cache

AGES = (0.0, 0.5, 1.0, 3.0, 10.0, 100.0, 3000.0, 4096.0, 1e5)


def taught(draw: random.Random, turns: int, share: float, gap_s: float) -> Returns:
    """Conversations of which `share` go on, after a time without memory."""
    table = Returns()
    for _ in range(turns):
        table.add(draw.expovariate(1 / gap_s) if draw.random() < share else None)
    return table


@pytest.mark.parametrize(("share", "gap_s"), [(0.9, 8.0), (0.5, 60.0)])
def test_it_learns_the_hazard_of_gaps_without_memory(share: float, gap_s: float):
    table = taught(random.Random(1), 3000, share, gap_s)
    for age in (0.5 * gap_s, 1.5 * gap_s):
        low = max(edge for edge in EDGES if edge <= age)
        begin, end = (share * math.exp(-edge / gap_s) + 1 - share for edge in (low, 2 * low))
        hazard = (begin - end) / (low * (begin + end) / 2)  # of the interval: returns over time spent silent
        assert table.rate(age) == pytest.approx(hazard, rel=0.3)


def test_the_older_a_silence_the_likelier_it_is_the_last():
    table = taught(random.Random(2), 3000, 0.9, 8.0)
    assert table.rate(2.0) > 2 * table.rate(30.0) > 20 * table.rate(300.0)


def test_where_nobody_comes_back_nobody_is_expected():
    table, new = taught(random.Random(3), 2000, 0.0, 1.0), Returns()
    assert all(table.rate(age) < 0.01 * new.rate(age) for age in AGES)


def test_of_an_age_that_nobody_reaches_something_is_expected_still():
    table, new = taught(random.Random(6), 20_000, 1.0, 8.0), Returns()
    assert all(table.rate(age) > 1e-3 * new.rate(age) for age in AGES)


def test_it_follows_when_people_become_slower():
    table, draw = taught(random.Random(4), 1000, 0.9, 2.0), random.Random(5)
    quick = table.rate(1.0)
    for _ in range(1000):
        table.add(draw.uniform(60.0, 120.0))
    assert table.rate(1.0) < 0.1 * quick and table.rate(80.0) > 10 * table.rate(20.0)


def test_before_anything_was_seen_a_conversation_is_worth_less_with_age():
    rates = [Returns().rate(age) for age in AGES]
    assert rates == sorted(rates, reverse=True) and 0.04 < rates[0] < 0.05 and rates[-1] > 0


def test_everybody_may_come_back_and_at_any_age():
    table = Returns()
    for age in AGES * 500:
        table.add(age)
    assert all(0 < table.rate(age) < math.inf for age in AGES[:-2])
    assert table.rate(8192.0) == pytest.approx(table.rate(4095.0) / 2, rel=0.01)


def test_the_cache_teaches_it_the_silence_of_every_conversation_once():
    cache, seen = Cache(policy="jlora"), list[float | None]()
    cache.manager.policy.returns.add = seen.append  # type: ignore[attr-defined]
    cache.run(A)
    cache.now += 30.0
    cache.run(A)  # begins a second after the call
    cache.run(B, reuse=False)  # neither reads nor leaves anything
    assert seen == [None, 31.0]


def test_two_who_ask_at_once_are_no_silence_that_ended():
    cache, seen = Cache(policy="jlora"), list[float | None]()
    cache.manager.policy.returns.add = seen.append  # type: ignore[attr-defined]
    cache.run(A)
    cache.now += 30.0
    first = cache.leased(A)
    cache.leased(A)
    assert seen == [None, 31.0]
    cache.manager.leases.release(first)


def test_a_refused_request_and_one_that_was_preempted_teach_nothing():
    cache, seen = Cache(device=4, policy="jlora"), list[float | None]()
    cache.manager.policy.returns.add = seen.append  # type: ignore[attr-defined]
    first = cache.leased(A)
    assert cache.lease(B) is None and seen == [None]
    cache.manager.leases.release(first)
    again = cache.manager.leases.acquire(cache.origin(None), A, True, headroom=0, again=True)
    assert again is not None and seen == [None]
