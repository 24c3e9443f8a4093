"""Runs TPU kernels on a CPU: every Pallas call made inside is interpreted.

jax's own kernels have no argument for it, and the TPU-semantics interpreter, which is entered by a
context of jax, cannot view a reference in another shape, as they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from jax.experimental import pallas as pl


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels traced inside run in the plain interpreter. For tests and miniatures, on one thread."""
    real = pl.pallas_call

    def call(*args: Any, **options: Any) -> Any:
        return real(*args, **{**options, "interpret": options.get("interpret") or True})

    with mock.patch.object(pl, "pallas_call", call):
        yield
