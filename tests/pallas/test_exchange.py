"""The form of a helped prefill that the engine does not have, ahead of time: one program that calls the host back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Wrapped

from benchmarks.micro import exchange
from tests.pallas import _aot, _gpu

X = jax.ShapeDtypeStruct((512, 4096), jnp.float32)


@pytest.fixture(params=exchange.CALLBACKS.values(), ids=list(exchange.CALLBACKS))
def form(request: pytest.FixtureRequest) -> Wrapped:
    return exchange.callbacks(request.param, np.ones(X.shape, X.dtype))


@pytest.mark.aot_tpu
def test_a_program_with_callbacks_compiles_for_a_tpu(form: Wrapped):
    mesh = _aot.tpu_mesh("v6e", 1)
    text = _aot.compiled(form, (_aot.placed(X, mesh),), mesh).text
    assert text.count(" send(") == text.count(" recv(") == exchange.EXCHANGES


@pytest.mark.aot_cuda
def test_a_program_with_callbacks_is_lowered_only_for_a_gpu_that_is_there(form: Wrapped):
    with pytest.raises(RuntimeError, match="Unknown backend: 'gpu'"):
        _gpu.compiled(form, X)
