"""The longest pause that Python's garbage collector makes between two steps, with a big dependency tree.

A tree is grown as a busy server leaves it (`grove`). Then requests begin and end, with the small
cyclic garbage that futures and exceptions leave. Each turn is timed: once with Python's own
collections, once with the server's policy (`jlora.ports.ServerGarbage`).
"""

from __future__ import annotations

import time
from dataclasses import asdict

import numpy as np

from benchmarks.micro.grove import Grove, Shape
from benchmarks.micro.load import apart
from benchmarks.runner import Options
from jlora import machine
from jlora.loadgen.rounds import Sample
from jlora.ports import Garbage, PythonGarbage, ServerGarbage

SHAPE, QUICK_SHAPE = Shape(200_000, 100), Shape(1_500, 10)
CYCLES = 32  # per turn: about one for each running request


def run(options: Options) -> None:
    """Both policies, as many rounds as asked for (5)."""
    shape, turns = (QUICK_SHAPE, 50) if options.quick else (SHAPE, 6_000)
    records = options.records("garbage-python", {"turns": turns})
    for round_ in range(options.rounds or 5):
        for policy in (PythonGarbage, ServerGarbage):
            records.add(policy.__name__, "turns", round_, apart(measure, policy, shape, turns))


def measure(policy: type[Garbage], shape: Shape, turns: int) -> Sample:
    """Milliseconds of processor time that a turn takes under one policy."""
    grove, garbage = Grove(shape), policy()
    grove.grow()
    garbage.begin()
    taken = []
    for i in range(turns):
        talk = grove.warm[i % len(grove.warm)]
        began = time.thread_time()  # the processor's: neighbours must not count
        grove.end(grove.begin(talk), talk)
        _cycles()
        garbage.after_step()
        taken.append(1e3 * (time.thread_time() - began))
        grove.land()
    return {
        **asdict(shape),
        "kv_nodes": grove.nodes,
        "median_ms": float(np.median(taken)),
        "p99_ms": float(np.percentile(taken, 99)),
        "longest_ms": max(taken),
        "resident_mib": machine.resident_bytes() / 2**20,
    }


def _cycles() -> None:
    for _ in range(CYCLES):
        ring: list[object] = []
        ring.append(ring)
