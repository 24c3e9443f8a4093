"""The meter learns what a copy costs, its fixed part included."""

from __future__ import annotations

import random

import pytest

from jlora.cache.transfer import Copy, Direction, Meter
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node


def copied(kind: int, blocks: int, seconds: float, direction: Direction = "in") -> Copy:
    adapter = AdapterNode(1, blocks)
    node = adapter if kind == ADAPTER else Node(adapter, b"")
    ids = tuple(range(1, blocks + 1))
    return Copy(direction, adapter, (node,), ids, ids, seconds=seconds)


def test_the_fixed_part_and_the_slope_are_found_per_kind():
    meter, draw = Meter(block_s=1.0), random.Random(0)
    for _ in range(100):
        blocks = draw.randint(1, 20)
        meter.observe(copied(KV, blocks, 0.002 + 0.0005 * blocks))
        meter.observe(copied(ADAPTER, blocks, 0.050 + 0.0001 * blocks))
    for blocks in (1, 7, 40):
        assert meter.load_s(KV, blocks) == pytest.approx(0.002 + 0.0005 * blocks, rel=0.01)
        assert meter.load_s(ADAPTER, blocks) == pytest.approx(0.050 + 0.0001 * blocks, rel=0.01)


def test_copies_of_one_size_are_explained_without_a_negative_part():
    meter = Meter(block_s=0.001)
    for _ in range(50):
        meter.observe(copied(ADAPTER, 4, 0.060))
    assert meter.load_s(ADAPTER, 4) == pytest.approx(0.060)
    assert 0 < meter.load_s(ADAPTER, 1) <= meter.load_s(ADAPTER, 4) <= meter.load_s(ADAPTER, 8)


def test_it_follows_a_link_that_gets_slower():
    meter = Meter(block_s=0.001)
    for speed in (0.001, 0.004):
        for blocks in [1, 2, 4, 8] * 40:
            meter.observe(copied(KV, blocks, speed * blocks))
        assert meter.load_s(KV, 10) == pytest.approx(10 * speed, rel=0.05)


def test_noise_never_makes_a_load_free_or_larger_loads_cheaper():
    meter, draw = Meter(block_s=0.001), random.Random(1)
    for _ in range(500):
        meter.observe(copied(KV, draw.randint(1, 4), draw.expovariate(1000)))
        assert 0 < meter.load_s(KV, 1) <= meter.load_s(KV, 2) <= meter.load_s(KV, 100)


def test_copies_to_the_host_and_unmeasured_ones_teach_nothing():
    meter = Meter(block_s=0.001)
    before = meter.load_s(KV, 4)
    meter.observe(copied(KV, 4, 9.0, "out"))
    meter.observe(copied(KV, 4, 0.0))
    assert meter.load_s(KV, 4) == before


def test_the_time_of_a_token_follows_the_steps():
    meter = Meter(block_s=0.001, token_s=1.0)
    for _ in range(200):
        meter.observe_prefill(100, 0.05)
    meter.observe_prefill(0, 5.0)
    assert meter.token_s == pytest.approx(0.0005, rel=0.01)


def test_the_meter_says_once_when_loads_have_come_to_cost_something_else():
    meter = Meter(1e-3)
    assert not meter.moved()
    for blocks in (1, 4, 16, 2, 8) * 8:
        meter.observe(copied(KV, blocks, 0.05 + 1e-3 * blocks))
    assert meter.moved() and not meter.moved()


def test_kv_is_worth_no_more_than_computing_it_again_and_adapters_their_load():
    meter = Meter(block_s=0.01, token_s=1e-4, block_tokens=32)
    assert meter.density(KV, 1) == pytest.approx(0.0032)
    assert meter.density(ADAPTER, 4) > 0.01
    meter.token_s = 1.0  # computing is slow: then it is what copying takes
    assert meter.density(KV, 1) == pytest.approx(meter.load_s(KV, 16) / 16)


def test_a_token_that_has_come_to_cost_something_else_is_said_once_too():
    meter = Meter(block_s=0.01, token_s=1e-4, block_tokens=32)
    for _ in range(50):
        meter.observe_prefill(100, 0.02)
    assert meter.moved() and not meter.moved()
