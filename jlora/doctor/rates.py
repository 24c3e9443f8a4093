"""What the accelerator itself does: memory, matrix unit, and the link to the host, in the same job.

Every ratio of the device report is against these, never against a data sheet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlora.doctor.fit import Link, Rates

ROUNDS = 5  # the median of them counts


def seconds(call: Callable[[int], Any], repeats: int, rounds: int = ROUNDS) -> float:
    """Median seconds of one of `repeats` calls enqueued together; `call(n)` returns what to wait for."""
    jax.block_until_ready(call(1))
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(call(repeats))
        taken.append((time.perf_counter() - began) / repeats)
    return statistics.median(taken)


def measure(small: bool) -> Rates:
    """Takes some seconds on an accelerator; `small` for a CPU in miniature."""
    size, side = (2**22, 256) if small else (2**29, 8192)
    sizes = [2**12, 2**16, 2**20] if small else [2**12, 2**16, 2**20, 2**24, 2**26]
    return Rates(_memory(size), products(side), _link(sizes, _put), _link(sizes, _get))


def _memory(size: int) -> float:
    x = jnp.zeros(size // 2, jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1), donate_argnums=0)
    read = jax.jit(lambda x, y: jnp.maximum(jnp.max(x), y))

    def copies(count: int) -> jax.Array:
        nonlocal x
        for _ in range(count):
            x = copy(x)
        return x

    def reads(count: int) -> jax.Array:
        y = jnp.bfloat16(0)
        for _ in range(count):
            y = read(x, y)
        return jnp.asarray(y)

    return max(2 * size / seconds(copies, 20), size / seconds(reads, 20))


def factor(side: int) -> jax.Array:
    """A random matrix: a device multiplies zeros faster. A product with it keeps the size of values."""
    random = jax.jit(lambda: jax.random.normal(jax.random.key(0), (side, side)) / side**0.5)
    return random().astype(jnp.bfloat16)


def products(side: int) -> float:
    """Operations per second of matrix products."""
    weights = factor(side)
    product = jax.jit(jnp.matmul)

    def chain(count: int) -> jax.Array:
        x = weights
        for _ in range(count):
            x = product(x, weights)
        return x

    return 2 * side**3 / seconds(chain, 10)


def _put(size: int) -> Callable[[], Any]:
    data = np.ones(size, np.uint8)
    return lambda: jax.block_until_ready(jax.device_put(data))


def _get(size: int) -> Callable[[], Any]:
    array = jax.block_until_ready(jnp.ones(size, jnp.uint8))  # a new one: what was fetched stays on the host
    return lambda: np.asarray(array)


def _link(sizes: Sequence[int], prepare: Callable[[int], Callable[[], Any]]) -> Link:
    """Fits latency and rate to single copies, each waited for."""
    times = []
    for size in sizes:
        taken = []
        for _ in range(ROUNDS):
            copy = prepare(size)
            began = time.perf_counter()
            copy()
            taken.append(time.perf_counter() - began)
        times.append(statistics.median(taken))
    weights = 1 / np.array(times)  # relative errors count alike from the smallest copy to the largest
    design = np.stack([np.ones(len(sizes)), np.array(sizes, float)], axis=1)
    latency, per_byte = np.linalg.lstsq(design * weights[:, None], np.array(times) * weights, rcond=None)[0]
    return Link(1 / max(per_byte, 1e-15), max(latency, 0.0))
