"""Runs TPU kernels on a CPU: every Pallas call made inside is interpreted, jax's attention kernel too.

jax's kernels have no argument for it, and jax's `ragged_paged_attention` does two things that no
interpreter of jax 0.10 to 0.12 can do. Both are said here in other words, on the same values, while a
kernel is interpreted; its copies, semaphores, loops, prefetches and arithmetic stay its own:

- it views the pages that it has fetched as rows of 32-bit words: here they are read whole, and the
  view is one of values (the interpreter with TPU semantics knows no reshaped reference);
- it stores under a mask: here what is there is read, and stored again where the mask is off (the plain
  interpreter takes no masked store at a fixed row).
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Kernels traced inside run in an interpreter. For tests and miniatures, on one thread.

    Args:
        mode: True for the plain interpreter, `pltpu.InterpretParams` for the one with TPU semantics;
            a call that names one itself keeps it.
    """
    call, wait = pl.pallas_call, attention.MultiPageAsyncCopyDescriptor.wait

    def interpreting(*args: Any, **options: Any) -> Any:
        return call(*args, **{**options, "interpret": options.get("interpret") or mode})

    patches = (
        mock.patch.object(pl, "pallas_call", interpreting),
        mock.patch.object(attention.MultiPageAsyncCopyDescriptor, "wait", lambda self: _Rows(wait(self)[...])),
        mock.patch.object(pltpu, "store", _store),
    )
    jitted: Any = attention.ragged_paged_attention
    jitted.clear_cache()  # what was traced in another mode must not be found again
    with ExitStack() as stack:
        stack.callback(jitted.clear_cache)
        for patch in patches:
            stack.enter_context(patch)
        yield


@dataclass(frozen=True, slots=True)
class _Rows:
    """Values with as much of a reference's face as the attention kernel looks at."""

    values: jax.Array

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def reshape(self, *shape: int) -> _Rows:
        return _Rows(self.values.reshape(shape))

    def bitcast(self, dtype: Any) -> _Rows:
        """Neighbouring rows [n * r, c] packed into words [n, c], the first in the lowest bits, as in a sublane."""
        packed = jnp.dtype(dtype).itemsize // self.dtype.itemsize
        rows, columns = self.values.shape
        pairs = self.values.reshape(rows // packed, packed, columns).swapaxes(1, 2)
        return _Rows(lax.bitcast_convert_type(pairs, dtype))

    def __getitem__(self, index: Any) -> jax.Array:
        return self.values[index]


def _store(ref: Any, value: jax.Array, *, mask: jax.Array) -> None:
    ref[...] = jnp.where(mask, value, ref[...])
