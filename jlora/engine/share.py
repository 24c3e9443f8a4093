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
from jlora.engine.runner import Runner
from jlora.layout import PoolLayout
from jlora.model.spec import PROJECTIONS

log = logging.getLogger(__name__)

RANK, MODULES = 16, ("q", "k", "v", "o")  # of the adapter that is measured
CONTEXT = 128  # tokens of each row's context
ROUNDS = 7  # interleaved; the medians count


def adapter_share(runner: Runner, layout: PoolLayout, between: Between) -> float:
    """The share of a decode step of the largest size that one adapter of all its rows costs, at least 0.

    Call it when every program is compiled. Each launch runs between two steps and touches no live block: it reads
    whatever the blocks hold.
    """

    def seconds_of(launch: Launch) -> float:
        jax.block_until_ready(runner.pool.array)  # what was dispatched before is not measured
        began = time.perf_counter()
        jax.block_until_ready(runner.forward(launch))
        return time.perf_counter() - began

    builder = runner.builder  # the engine's thread has it
    adapted, bare = between(lambda: (with_adapter(builder, layout, RANK), without(builder)))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS + 1):  # in turns; the first is warm-up
        for launch, kind in ((adapted, True), (bare, False)):
            seconds[kind].append(between(partial(seconds_of, launch)))
    one, other = (statistics.median(seconds[kind][1:]) for kind in (True, False))
    share = max(0.0, 1 - other / one)
    log.info("one adapter costs %.1f %% of a step: the most that merging can gain", 100 * share)
    return share


def without(builder: BatchBuilder) -> Launch:
    """The largest decode launch, of rows that read a context and write nothing."""
    rows = builder.compiled.decode[-1]
    bare = bool(builder.compiled.bare) and builder.compiled.bare[-1] == rows
    launch = builder.blank(rows, 1, bare)
    launch.record.fields()["starts"][:] = min(CONTEXT, builder.max_len - 1)
    return launch


def with_adapter(builder: BatchBuilder, layout: PoolLayout, ranks: int) -> Launch:
    """The same with one adapter on every row."""
    launch = without(builder)
    counts = [-(-ranks // layout.units[name].per_block) if name in MODULES else 0 for name in PROJECTIONS]
    ends = np.cumsum([0, *counts], dtype=np.int32)
    lists = np.zeros((2, layout.blocks), np.int32)
    lists[0, : ends[-1]] = np.arange(1, ends[-1] + 1) % layout.blocks
    fields = launch.record.fields()
    fields["offsets"][:], fields["adapters"][:] = ends, 0
    return replace(launch, lists=Lists(lists, ends))
