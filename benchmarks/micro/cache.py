"""R7: how the host's work grows with the tree, the adapters, the batch and the queue.

Every tree is grown in a process of its own (`grove`), so that its memory can be read off. Then
requests go on, and single operations are timed in between, Python's garbage collector on, as in the
server:

    match     a cached prompt of 8192 tokens
    admit     a lease for such a prompt that is on the device
    swap in   the same for a prompt that has left the device: room is made and the copy decided
    insert    one full block of a decode published
    release   the lease's end, with its write-through
    round     one round of the monitor (the paper: every 100 ms, monitor and decision < 5 ms)

`steps` does the same for the scheduler. Neighbours on the processor slow a machine down and nothing
makes it faster, so each case is measured in rounds and reported by its lowest median.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from benchmarks.clients import second_process
from benchmarks.micro import steps
from benchmarks.micro.grove import MONITOR_S, Grove, Shape
from benchmarks.micro.steps import StepLoad
from benchmarks.runner import Options
from jlora import machine
from jlora.cache.tree import Origin
from jlora.loadgen.rounds import Sample

T = TypeVar("T")

SIZES = (10**3, 10**4, 10**5, 10**6)
SHAPES = (
    *(Shape(n, adapters, policy) for policy in ("jlora", "fastlibra") for n in SIZES for adapters in (10, 100, 2000)),
    *(Shape(nodes, 100, block_tokens=16) for nodes in SIZES),
)  # fmt: skip
LOADS = (
    *(StepLoad(running, 0, 10) for running in (8, 16, 32, 64, 128, 256)),
    *(StepLoad(64, queued, 10) for queued in (100, 1_000, 10_000)),
    *(StepLoad(64, 0, registered) for registered in (100, 2_000)),
    StepLoad(256, 10_000, 2_000),
)
QUICK_SHAPES = (Shape(1_500, 10), Shape(3_000, 10, "fastlibra"))
QUICK_LOADS = (StepLoad(2, 0, 4), StepLoad(8, 20, 4))


def run(options: Options) -> None:
    """Every tree and every load, as many rounds as asked for (2)."""
    samples = 12 if options.quick else 500
    shapes, loads = (QUICK_SHAPES, QUICK_LOADS) if options.quick else (SHAPES, LOADS)
    records = options.records("cache-python", {"samples": samples})
    todo: list[tuple[Callable[..., Sample], Any]] = [(tree, shape) for shape in shapes]
    todo += [(step, load) for load in loads]
    for round_ in range(options.rounds or 2):
        for call, case in tqdm(todo, desc=f"cache, round {round_}", unit="case"):
            if not records.has(cell=str(case), round=round_):
                records.add(str(case), call.__name__, round_, apart(call, case, samples))


def apart(call: Callable[..., T], *args: Any) -> T:
    """The call's result, from a fresh process."""
    with second_process() as pool:
        return pool.submit(call, *args).result()


def tree(shape: Shape, samples: int) -> Sample:
    """Grows one tree and times every operation on it, in microseconds."""
    before, start = machine.resident_bytes(), time.perf_counter()
    grove = Grove(shape)
    grove.grow()
    seconds, grown, nodes = time.perf_counter() - start, machine.resident_bytes(), grove.nodes
    times = operations(grove, samples)
    start = time.perf_counter()
    gc.collect()
    return {
        **asdict(shape),
        "kv_nodes": nodes,
        "grown_s": seconds,
        "bytes_per_node": (grown - before) / nodes if grown else None,
        "full_collection_s": time.perf_counter() - start,
        **{f"{name} {key}": value for name, ns in times.taken.items() for key, value in spread(ns).items()},
    }


def step(load: StepLoad, count: int) -> Sample:
    """Times `count` steps of the scheduler under one load, in microseconds."""
    return {**asdict(load), **{f"step {key}": value for key, value in spread(steps.measure(load, count)).items()}}


def spread(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Microseconds."""
    us = np.asarray(nanoseconds) / 1e3
    return {"median": float(np.median(us)), "p99": float(np.percentile(us, 99)), "max": float(us.max())}


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
    manager, times = grove.manager, Times()
    for talk in grove.cold:
        tokens = grove.tokens(talk)
        lease = times.of("swap in", manager.leases.acquire, Origin(talk.adapter), tokens, reuse=True, headroom=0)
        grove.land()
        if lease is not None:
            grove.end(lease, talk)
    for i in range(samples):
        talk = grove.warm[i % len(grove.warm)]
        tokens = grove.tokens(talk)
        times.of("match", manager.cached_tokens, Origin(talk.adapter), tokens)
        _request(grove, times, fresh=i * grove.shape.block_tokens)
        grove.turn()
        grove.now += MONITOR_S
        times.of("round", manager.tend, grove.now, running=32)
        grove.land()
    return times


def _request(grove: Grove, times: Times, fresh: int) -> None:
    """A long prompt that is on the device, one block decoded after it, and its end."""
    manager, talk = grove.manager, grove.warm[0]
    grove.end(grove.begin(talk), talk)
    tokens = [*grove.tokens(talk), *range(fresh, fresh + grove.shape.block_tokens)]
    known = len(tokens) - grove.shape.block_tokens
    lease = times.of("admit", manager.leases.acquire, Origin(talk.adapter), tokens[:known], reuse=True, headroom=0)
    assert lease is not None
    manager.leases.grow(lease, len(tokens))
    manager.leases.publish(lease, tokens, known)
    times.of("insert", manager.leases.publish, lease, tokens, len(tokens))
    times.of("release", manager.leases.release, lease)
    grove.land()
