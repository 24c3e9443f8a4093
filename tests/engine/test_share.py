"""What adapters cost a step, from launches of known times."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jlora.engine import share
from jlora.engine.merging import AdapterCost
from jlora.engine.runner import Runner
from jlora.layout import PoolLayout
from tests import _make

LAYOUT = PoolLayout.of(_make.tiny_spec(), 256, 16)


class _Timed:
    """A runner whose launches take the seconds that they are; it computes nothing."""

    builder = None

    def __init__(self) -> None:
        self.now, self.pool = 0.0, SimpleNamespace(array=None)

    def forward(self, launch: Any) -> None:
        self.now += next(launch)


def cost_of(
    times: dict[int, list[float]], monkeypatch: pytest.MonkeyPatch, max_rank: int = 256, layout: PoolLayout = LAYOUT
) -> AdapterCost:
    """What is found where launches of each rank take these seconds, and then as long as the last; 0: no adapter."""
    runner = _Timed()
    launches = {rank: itertools.chain(found, itertools.repeat(found[-1])) for rank, found in times.items()}
    monkeypatch.setattr(share, "with_adapter", lambda builder, layout, rank: launches[rank])
    monkeypatch.setattr(share, "without", lambda builder: launches[0])
    monkeypatch.setattr(share.time, "perf_counter", lambda: runner.now)
    return share.adapter_cost(cast(Runner, runner), layout, max_rank, lambda call: call())


def blocks_of(rank: int) -> int:
    return sum(share.block_counts(LAYOUT, rank))


@pytest.mark.parametrize(
    "bare, small, large, shares",
    [
        ([1.0, 0.8], [9.0, 1.0], [9.0, 2.0], (0.2, 0.6)),  # the first is warm-up
        ([0.8, 0.8, 70.0, 0.8], [9.0, 1.0, 1.0, 50.0, 1.0], [2.0, 2.0, 2.0, 2.0, 90.0, 2.0], (0.2, 0.6)),  # others ran
        ([1.1], [1.0], [0.9], (0.0, 0.0)),  # noise
    ],
)
def test_the_cost_is_what_steps_take_longer_with_an_adapter(
    bare: list[float],
    small: list[float],
    large: list[float],
    shares: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
):
    cost = cost_of({0: bare, 16: small, 64: large}, monkeypatch)
    assert tuple(cost.share_of(blocks_of(rank)) for rank in (16, 64)) == pytest.approx(shares)
    assert cost.share == pytest.approx(shares[0]) and cost.blocks == blocks_of(16)


def test_no_larger_adapter_is_measured_than_may_be_loaded(monkeypatch: pytest.MonkeyPatch):
    cost = cost_of({0: [0.8], 8: [1.0]}, monkeypatch, max_rank=8)
    assert cost == AdapterCost(pytest.approx(0.2), blocks_of(8), 0.0)


def test_a_pool_without_room_for_such_an_adapter_has_no_cost(monkeypatch: pytest.MonkeyPatch):
    layout = PoolLayout.of(_make.tiny_spec(), blocks_of(16) - 1, 16)
    assert cost_of({}, monkeypatch, layout=layout) == AdapterCost()
    layout = PoolLayout.of(_make.tiny_spec(), blocks_of(64) - 1, 16)
    assert cost_of({0: [0.8], 16: [1.0]}, monkeypatch, layout=layout).block == 0
