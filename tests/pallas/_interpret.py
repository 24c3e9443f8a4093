"""Runs TPU kernels on a CPU: interprets every Pallas call made inside, also jax's attention kernel.

jax's `ragged_paged_attention` has no argument for it, and does three things that not every
interpreter of jax 0.10 to 0.12 supports. This module replaces them by equivalents. Copies,
semaphores, prefetches, loops and arithmetic of the kernel stay unchanged.

- The kernel views fetched pages as rows of 32-bit words. Here it reads them whole, and the view is
  one of values: the interpreter with TPU semantics has no reshaped references.
- The kernel stores under a mask. Here it reads the old value and stores a merged one: the plain
  interpreter has no masked store at a fixed row.
- The kernel passes the next sequence and buffer between grid steps in a prefetched scalar. Here it
  uses scratch memory: the plain interpreter gives each step the scalar's first value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as attention


@contextmanager
def interpreted(mode: Any = True) -> Iterator[None]:
    """Runs the kernels that are traced inside in an interpreter. Not thread-safe.

    Args:
        mode: True for the plain interpreter, `pltpu.InterpretParams` for the one with TPU semantics.
            A call with an `interpret` argument of its own keeps it.
    """
    call, wait = pl.pallas_call, attention.MultiPageAsyncCopyDescriptor.wait

    def interpreting(kernel: Any, *args: Any, **options: Any) -> Any:
        if getattr(kernel, "func", None) is attention.ragged_paged_attention_kernel:
            kernel, options = _handing_over(kernel, options)
        return call(kernel, *args, **{**options, "interpret": options.get("interpret") or mode})

    patches = (
        mock.patch.object(pl, "pallas_call", interpreting),
        mock.patch.object(attention.MultiPageAsyncCopyDescriptor, "wait", lambda self: _Rows(wait(self))),
        mock.patch.object(pltpu, "store", _store),
    )
    jitted: Any = attention.ragged_paged_attention
    jitted.clear_cache()  # it may hold programs that were traced in another mode
    with ExitStack() as stack:
        stack.callback(jitted.clear_cache)
        for patch in patches:
            stack.enter_context(patch)
        yield


HANDED = 3  # place of the next sequence and buffer among the attention kernel's scalars


def _handing_over(kernel: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The attention kernel with the scalar of `HANDED` in scratch memory, and its options with that memory."""
    spec = copy.copy(options["grid_spec"])
    spec.scratch_shapes = (*spec.scratch_shapes, pltpu.SMEM((2,), jnp.int32))

    def handing(*refs: Any) -> None:
        handed = refs[-1]

        @pl.when(pl.program_id(0) + pl.program_id(1) == 0)
        def begin() -> None:
            for i in range(2):
                handed[i] = refs[HANDED][i]

        kernel(*refs[:HANDED], handed, *refs[HANDED + 1 : -1])

    return handing, {**options, "grid_spec": spec}


def _same(values: jax.Array) -> jax.Array:
    return values


@dataclass(frozen=True, slots=True)
class _Rows:
    """A view of a reference, with the part of its interface that the attention kernel uses."""

    ref: Any
    view: Callable[[jax.Array], jax.Array] = _same

    @property
    def dtype(self) -> Any:
        return self.ref.dtype

    def reshape(self, *shape: int) -> _Rows:
        return _Rows(self.ref, lambda values: self.view(values).reshape(shape))

    def bitcast(self, dtype: Any) -> _Rows:
        """Packs neighbouring rows [n * r, c] into words [n, c], the first in the lowest bits, as in a sublane."""
        packed = jnp.dtype(dtype).itemsize // self.dtype.itemsize

        def words(values: jax.Array) -> jax.Array:
            rows = self.view(values)
            pairs = rows.reshape(rows.shape[0] // packed, packed, rows.shape[1]).swapaxes(1, 2)
            return lax.bitcast_convert_type(pairs, dtype)

        return _Rows(self.ref, words)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.view(self.ref[...])[index]


def _store(ref: Any, value: jax.Array, *, mask: jax.Array) -> None:
    ref[...] = jnp.where(mask, value, ref[...])
