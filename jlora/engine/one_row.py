"""Measures whether a decode launch of one row is faster than one of two.

A product of one row reads the weights once, but XLA's form of it differs by platform, type and
version: on a CPU, float32 takes half the time of two rows, bfloat16 up to eight times as long
(docs/notes/platforms.md). What was measured is kept beside the compiled programs. Replicas that start
together measure once: the answers of a service must not depend on which of them computes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec

from jlora import machine

log = logging.getLogger(__name__)

FILE = "one-row.json"
COUNT, WIDTH, MLP = 12, 768, 2048  # weights of a measurement: more than a cache of the processor holds
ROUNDS = 5  # interleaved; the fastest counts, and the first compiles
WAIT_S = 60.0  # for another process that measures: it takes a second or two


class Measured(msgspec.Struct, frozen=True):
    """Milliseconds of the products with one row and with two."""

    one_row_ms: float
    two_rows_ms: float


@cache
def measure(dtype: str) -> tuple[float, float]:
    """Milliseconds of products with one and with two rows; the fastest of interleaved rounds."""
    weights = [jnp.full((WIDTH, MLP), i, dtype) for i in range(COUNT)]
    products = jax.jit(lambda x, weights: [x @ w for w in weights])
    inputs = [jnp.ones((rows, WIDTH), dtype) for rows in (1, 2)]
    times: list[list[float]] = [[], []]
    for _ in range(1 + ROUNDS):
        for x, taken in zip(inputs, times, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(products(x, weights))
            taken.append(1e3 * (time.perf_counter() - began))
    one, two = (min(taken[1:]) for taken in times)  # the first round compiles
    return one, two


def is_faster(dtype: str, kept: Path | None, measure: Callable[[str], tuple[float, float]] = measure) -> bool:
    """Looks up what was measured on this machine for weights of a type, or measures and keeps it in `kept`."""
    key = f"{dtype}, jax {jax.__version__}, {machine.processor()}, {machine.threads()} cores"
    file = None if kept is None else kept / FILE
    with _alone(kept):
        known = _read(file)
        if key not in known:
            one, two = measure(dtype)
            log.info("%d products of %s weights take %.2f ms with one row, %.2f with two", COUNT, dtype, one, two)
            known[key] = Measured(one, two)
            _write(file, known)
    return known[key].one_row_ms < known[key].two_rows_ms


@contextmanager
def _alone(directory: Path | None) -> Iterator[None]:
    """No other process is in here with the same directory."""
    held = None
    if directory is not None:
        with suppress(OSError):  # a cache that cannot be written still serves
            directory.mkdir(parents=True, exist_ok=True)
            held = os.open(directory, os.O_RDONLY)
            _lock(held)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(held: int) -> None:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return log.warning("another process measures one row for over %g s: this one does, too", WAIT_S)
            time.sleep(0.05)


def _read(file: Path | None) -> dict[str, Measured]:
    try:
        return {} if file is None else msgspec.json.decode(file.read_bytes(), type=dict[str, Measured])
    except (OSError, msgspec.MsgspecError):  # none yet, or no such record: it is measured again
        return {}


def _write(file: Path | None, known: dict[str, Measured]) -> None:
    if file is None:
        return
    try:
        new = file.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
        new.replace(file)
    except OSError as e:  # a cache that cannot be written still serves
        log.info("the measurement of one row is not kept in %s: %s", file, e.strerror or e)
