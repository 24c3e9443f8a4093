"""What adapters cost a step here, measured on launches of padding: the most that merging can gain."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from jlora.engine.batch import BatchBuilder, Launch, Lists
from jlora.engine.built import Between
from jlora.engine.merging import AdapterCost
from jlora.engine.runner import Runner
from jlora.layout import PoolLayout
from jlora.model.spec import PROJECTIONS

log = logging.getLogger(__name__)

RANKS, MODULES = (16, 64), ("q", "k", "v", "o")  # of the adapters that are measured
CONTEXT = 128  # tokens of each row's context
ROUNDS = 7  # at least, interleaved; the medians count
LEAST_S = 0.5  # of measuring: short steps need more rounds


def adapter_cost(runner: Runner, layout: PoolLayout, max_rank: int, between: Between) -> AdapterCost:
    """What one adapter of all rows costs a decode step of the largest size, from adapters of two ranks.

    Call it when every program is compiled. Each launch runs between two steps and touches no live block: it reads
    whatever the blocks hold.
    """

    def seconds_of(launch: Launch) -> float:
        jax.block_until_ready(runner.pool.array)  # what was dispatched before is not measured
        began = time.perf_counter()
        jax.block_until_ready(runner.forward(launch))
        return time.perf_counter() - began

    ranks = sorted({min(rank, max_rank) for rank in RANKS})
    ranks = [rank for rank in ranks if sum(block_counts(layout, rank)) <= layout.blocks]
    if not ranks:
        log.warning("engine.merge: the pool has no room to measure what an adapter costs; nothing is merged by auto")
        return AdapterCost()
    builder = runner.builder  # the engine's thread has it
    launches = between(lambda: [without(builder), *(with_adapter(builder, layout, rank) for rank in ranks)])
    seconds: list[list[float]] = [[] for _ in launches]
    while len(seconds[0]) <= ROUNDS or sum(map(sum, seconds)) < LEAST_S:  # in turns; the first is warm-up
        for launch, found in zip(launches, seconds, strict=True):
            found.append(between(partial(seconds_of, launch)))
    base_s, *adapted_s = (statistics.median(found[1:]) for found in seconds)
    sizes = [sum(block_counts(layout, rank)) for rank in ranks]
    timed = list(zip(sizes, adapted_s, strict=True))
    cost = AdapterCost.measured(base_s, timed[0], timed[-1])
    told = ", ".join(f"{100 * cost.share_of(n):.1f} % (rank {r})" for r, n in zip(ranks, sizes, strict=True))
    log.info("one adapter costs so much of a step, the most that merging it can gain: %s", told)
    return cost


def without(builder: BatchBuilder) -> Launch:
    """The largest decode launch, of rows that read a context and write nothing."""
    rows = builder.compiled.decode[-1]
    bare = bool(builder.compiled.bare) and builder.compiled.bare[-1] == rows
    launch = builder.blank(rows, 1, bare)
    launch.record.fields()["starts"][:] = min(CONTEXT, builder.max_len - 1)
    return launch


def block_counts(layout: PoolLayout, rank: int) -> list[int]:
    """The blocks of each projection of an adapter that is measured."""
    return [-(-rank // layout.units[name].per_block) if name in MODULES else 0 for name in PROJECTIONS]


def with_adapter(builder: BatchBuilder, layout: PoolLayout, rank: int) -> Launch:
    """The same with one adapter on every row."""
    launch = without(builder)
    ends = np.cumsum([0, *block_counts(layout, rank)], dtype=np.int32)
    lists = np.zeros((2, layout.blocks), np.int32)
    lists[0, : ends[-1]] = np.arange(1, ends[-1] + 1) % layout.blocks
    fields = launch.record.fields()
    fields["offsets"][:], fields["adapters"][:] = ends, 0
    return replace(launch, lists=Lists(lists, ends))
