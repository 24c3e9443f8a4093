"""An empty exchange between device and host on this machine, in the forms that a helped prefill could have.

    programs        the engine's (`jlora/engine/assist.py`): the host reads the input that a jitted program leaves,
                    and copies what the next program adds to it
    pure_callback,  one jitted program, which calls the host for each exchange
    io_callback

In every form x [T, D] leaves, as much enters, and each exchange waits for the one before, as often as in a forward of
the 125M model: four times a layer. The host computes nothing; it adds ones, so that the last x counts the exchanges.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.stages import Wrapped

from benchmarks.runner import Options
from jlora.loadgen.checkpoints import LLAMA_100M, TINY
from jlora.loadgen.rounds import Sample, Side
from jlora.model import sharding
from jlora.model.cut import SPLIT
from jlora.model.spec import SITES
from jlora.pallas.cases import LLAMA3_8B

Form = Callable[[jax.Array], jax.Array]
CALLBACKS: Mapping[str, Callable[..., Any]] = {"pure_callback": jax.pure_callback, "io_callback": io_callback}
EXCHANGES = len(SITES) * LLAMA_100M.layers
TOKENS, WIDTHS = (1, 16, 512), (LLAMA_100M.width, LLAMA3_8B.width)
SAMPLE_S = 0.2  # a measurement repeats a form for at least so long


def run(options: Options) -> None:
    """Every size, as many rounds as asked for (15). Raises RuntimeError if a form loses an exchange."""
    tokens, widths = ((1, 16), (TINY.width,)) if options.quick else (TOKENS, WIDTHS)
    settings = {"exchanges": EXCHANGES, "sample_s": SAMPLE_S, "tokens": list(tokens), "widths": list(widths)}
    records = options.records(f"exchange-{options.dtype}", settings)
    for width, count in product(widths, tokens):
        x = jnp.zeros((count, width), options.dtype)
        sides = [Side(name, partial(_time, form, x)) for name, form in forms(np.ones(x.shape, x.dtype)).items()]
        records.measure(f"{count} x {width}", sides, options.budget(15), alternate=True)


def forms(added: np.ndarray) -> dict[str, Form]:
    """The sides. The host's part of every exchange is `added`."""
    return {"programs": programs(added), **{name: callbacks(call, added) for name, call in CALLBACKS.items()}}


def programs(added: np.ndarray) -> Form:
    """Programs with transfers between them."""
    add, placed = jax.jit(operator.add), NamedSharding(sharding.make_mesh(1), SPLIT)

    def exchange(x: jax.Array) -> jax.Array:
        for _ in range(EXCHANGES):
            np.asarray(x)  # waits for the program before
            x = add(x, jax.device_put(added, placed))
        return x

    return exchange


def callbacks(call: Callable[..., Any], added: np.ndarray) -> Wrapped:
    """One program with a callback for each exchange."""
    result = jax.ShapeDtypeStruct(added.shape, added.dtype)

    def host(x: jax.Array) -> np.ndarray:
        np.asarray(x)
        return added

    def exchange(x: jax.Array) -> jax.Array:
        for _ in range(EXCHANGES):
            x = x + call(host, result, x)
        return x

    return jax.jit(exchange)


def _time(form: Form, x: jax.Array) -> Sample:
    """Seconds of an exchange: the mean of as many as fill a sample."""
    if not (np.asarray(form(x)) == EXCHANGES).all():
        raise RuntimeError("exchange: an exchange was lost")
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < SAMPLE_S:
        jax.block_until_ready(form(x))
        count += 1
    return {"seconds": (time.perf_counter() - began) / count / EXCHANGES, "forwards": count}
