"""R7: how the host's work grows with the tree, the adapters, the batch and the queue.

Every tree is grown in a process of its own (`grove`), so that its memory can be read off and no
measurement inherits another one's heap. Then a mix of requests goes on and single operations are
timed in between, Python's garbage collector on, as in the server:

    match     a cached prompt of 8192 tokens, another one every time
    admit     a lease for such a prompt that is on the device
    swap in   the same, on the host: room is made for every block and the copy decided
    insert    one full block of a decode published
    release   the lease's end, with its write-through
    decide    the least valuable candidate; evict: that node
    round     one round of the monitor (the paper: every 100 ms, monitor and decision < 5 ms)
    drop      room for one block on a full host

`steps` does the same for the scheduler. No jax and no device anywhere.

Neighbours on the same processor slow a machine down, some seconds or some minutes at a time, and
nothing makes it faster. So everything is measured in rounds, one after the other, and each operation
is taken from the round with its lowest median; the record has all of them.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from benchmarks import steps
from benchmarks.grove import Grove, Shape
from benchmarks.rounds import Journal
from benchmarks.steps import StepLoad
from jlora import machine
from jlora.cache.tree import KV, Origin

T = TypeVar("T")

# What R7 asks for: microseconds; bytes; microseconds of a step, fixed and per running request.
MATCH_US, DECIDE_US, NODE_BYTES, STEP_US, SEQUENCE_US = 500.0, 5000.0, 600.0, 200.0, 3.0


@dataclass(frozen=True, slots=True)
class Growth:
    """What is measured: the trees, samples of each, the scheduler's loads with their steps, and how often."""

    shapes: tuple[Shape, ...]
    samples: int
    loads: tuple[StepLoad, ...]
    steps: int
    rounds: int


FULL = Growth(
    shapes=tuple(
        Shape(nodes, adapters, policy)
        for policy in ("jlora", "fastlibra")
        for nodes in (10**3, 10**4, 10**5, 10**6)
        for adapters in (10, 100, 2000)
    )
    + tuple(Shape(nodes, 100, block_tokens=16) for nodes in (10**3, 10**4, 10**5, 10**6)),
    samples=500,
    loads=tuple(StepLoad(running, 0, 10) for running in (8, 16, 32, 64, 128, 256))
    + tuple(StepLoad(64, queued, 10) for queued in (100, 1_000, 10_000))
    + tuple(StepLoad(64, 0, registered) for registered in (100, 2_000))
    + (StepLoad(256, 10_000, 2_000),),
    steps=500,
    rounds=2,
)
QUICK = Growth(
    shapes=(Shape(1_500, 10), Shape(1_500, 10, "fastlibra"), Shape(3_000, 10), Shape(3_000, 10, "fastlibra")),
    samples=12,
    loads=(StepLoad(2, 0, 4), StepLoad(8, 0, 4), StepLoad(8, 20, 4)),
    steps=20,
    rounds=2,
)


def run(growth: Growth, work: Path) -> dict[str, Any]:
    """Medians, 99th percentiles and maxima of everything, the scheduler's fit, and the targets.

    Args:
        work: where finished measurements are kept, so that an interrupted run goes on.
    """
    journal = Journal(work / "cache.jsonl", asdict(growth))
    todo = [(tree, shape, growth.samples) for shape in growth.shapes]
    todo += [(step, load, growth.steps) for load in growth.loads]
    done = Counter(finished["case"] for finished in journal.rounds)
    left = [case for round_ in range(growth.rounds) for case in range(len(todo)) if done[case] <= round_]
    for case in tqdm(left, desc="cache", unit="case"):
        journal.add({"case": case, "row": _apart(*todo[case])})
    rows = [_fastest([r["row"] for r in journal.rounds if r["case"] == case]) for case in range(len(todo))]
    trees, loads = rows[: len(growth.shapes)], rows[len(growth.shapes) :]
    plain = [row for row in loads if not row["queued"] and row["registered"] == loads[0]["registered"]]
    slope, fixed = np.polyfit([r["running"] for r in plain], [r["step"]["median_us"] for r in plain], 1)
    return {
        "settings": {"samples": growth.samples, "steps": growth.steps, "rounds": growth.rounds},
        "trees": trees,
        "loads": loads,
        "rounds": journal.rounds,
        "summary": {"fixed_us": fixed, "per_sequence_us": slope, "targets": targets(trees, loads)},
    }


def _fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of a case's rounds: each operation from the round where its median is lowest."""
    best = dict(rows[0])
    if "step" in best:
        return best | {"step": min((row["step"] for row in rows), key=_median)}
    names = best["operations"]
    best["full_collection_s"] = min(row["full_collection_s"] for row in rows)
    return best | {"operations": {n: min((row["operations"][n] for row in rows), key=_median) for n in names}}


def _median(spread: dict[str, float]) -> float:
    return spread["median_us"]


def tree(shape: Shape, samples: int) -> dict[str, Any]:
    """Grows one tree and times every operation on it."""
    before, start = machine.resident_bytes(), time.perf_counter()
    grove = Grove(shape)
    grove.grow()
    seconds, grown = time.perf_counter() - start, machine.resident_bytes()
    nodes = grove.nodes
    times = operations(grove, samples)
    start = time.perf_counter()
    gc.collect()
    return {
        **asdict(shape),
        "kv_nodes": nodes,
        "device_blocks": shape.device_blocks,
        "grown_s": seconds,
        "bytes_per_node": (grown - before) / nodes if grown else None,
        "full_collection_s": time.perf_counter() - start,
        "operations": {name: spread(ns) for name, ns in times.taken.items()},
    }


def step(load: StepLoad, count: int) -> dict[str, Any]:
    """Times `count` steps of the scheduler under one load."""
    return {**asdict(load), "step": spread(steps.measure(load, count))}


def spread(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Microseconds."""
    us = np.asarray(nanoseconds) / 1e3
    return {
        "median_us": float(np.median(us)),
        "p99_us": float(np.percentile(us, 99)),
        "max_us": float(us.max()),
        "samples": len(us),
    }


def targets(trees: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target of R7: the worst case, and whether it is met; growth is the largest tree over the smallest."""
    largest = max(row["nodes"] for row in trees)
    big = [row for row in trees if row["nodes"] == largest]
    memory = [row["bytes_per_node"] for row in big if row["bytes_per_node"] is not None]
    rows = [
        (f"match of 8k tokens, {size} tokens per block, µs", _worst(trees, "match", "median_us", size), MATCH_US)
        for size in sorted({row["block_tokens"] for row in trees})
    ]
    rows += [
        ("decide at the largest tree, µs (p99)", _worst(big, "decide", "p99_us"), DECIDE_US),
        ("round of the monitor at the largest tree, µs (p99)", _worst(big, "round", "p99_us"), DECIDE_US),
        ("bytes per node at the largest tree", max(memory, default=math.nan), NODE_BYTES),
        (
            "scheduler's step over 200 µs + 3 µs per running request",
            max(row["step"]["median_us"] / (STEP_US + SEQUENCE_US * row["running"]) for row in loads),
            1.0,
        ),
    ]
    return [{"what": what, "worst": worst, "limit": limit, "met": worst <= limit} for what, worst, limit in rows]


class Times:
    """Nanoseconds of calls, by name."""

    def __init__(self) -> None:
        self.taken: dict[str, list[int]] = {}

    def of(self, name: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Times one call and returns what it returns."""
        start = time.thread_time_ns()
        result = call(*args, **kwargs)
        self.taken.setdefault(name, []).append(time.thread_time_ns() - start)
        return result


def operations(grove: Grove, samples: int) -> Times:
    """Times single operations while requests go on."""
    manager, cells, times = grove.manager, grove.manager.cells, Times()
    for i in range(samples):
        talk = grove.long[i % len(grove.long)]
        tokens = grove.tokens(talk)
        times.of("match", manager.tree.match, Origin(talk.adapter), tokens, len(tokens))
        _request(grove, times, fresh=i * grove.shape.block_tokens)
        if i % 10 == 0:
            _swap_in(grove, times)
        grove.turn()
        node = times.of("decide", cells.worst)
        if node is not None:
            times.of("evict", cells.evict, node)
        grove.now += 0.1  # a round is due
        times.of("round", manager.tend, grove.now, running=32)
        grove.land()
    for _ in range(samples):
        cells.host.take(KV, cells.host.free)  # a full host
        times.of("drop", cells.make_host_room, 1)
    return times


def _request(grove: Grove, times: Times, fresh: int) -> None:
    """A long prompt that is on the device, one block decoded after it, and its end."""
    manager, talk = grove.manager, grove.long[0]
    grove.end(grove.begin(talk), talk)
    tokens = [*grove.tokens(talk), *range(fresh, fresh + grove.shape.block_tokens)]
    known = len(tokens) - grove.shape.block_tokens
    lease = times.of("admit", manager.acquire, Origin(talk.adapter), tokens[:known], reuse=True, headroom=0)
    assert lease is not None
    manager.grow(lease, len(tokens))
    manager.publish(lease, tokens, known)
    times.of("insert", manager.publish, lease, tokens, len(tokens))
    times.of("release", manager.release, lease)
    grove.land()


def _swap_in(grove: Grove, times: Times) -> None:
    """A long prompt that has left the device is asked for again."""
    manager, talk = grove.manager, grove.long[-1]
    tokens = grove.tokens(talk)
    for node in reversed(manager.tree.match(Origin(talk.adapter), tokens, len(tokens))):
        if node.host and manager.cells.evictable(node):
            manager.cells.evict(node)
    held = manager.cells.device.take(KV, manager.free)  # a full device
    lease = times.of("swap in", manager.acquire, Origin(talk.adapter), tokens, reuse=True, headroom=0)
    manager.cells.device.give(KV, held)
    grove.land()
    if lease is not None:
        grove.end(lease, talk)


def _worst(rows: Sequence[dict[str, Any]], operation: str, figure: str, block_tokens: int = 0) -> float:
    chosen = [row for row in rows if block_tokens in (0, row["block_tokens"])]
    return max(row["operations"][operation][figure] for row in chosen)


def _apart(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The call's result, from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args).result()
