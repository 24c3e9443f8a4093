"""A model that does not fit: the message's advice is one that helps, whatever the cause."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import jax
import pytest

from jlora import config
from jlora.engine import build
from jlora.errors import ConfigError, ResourceExhausted
from jlora.layout import BYTES, PoolLayout
from tests import _make

SPEC = _make.tiny_spec()
WEIGHTS = SPEC.parameters * BYTES[SPEC.dtype]
BLOCK_TOKENS = 16
BLOCK = PoolLayout.of(SPEC, 1, BLOCK_TOKENS, 1).block_bytes
WHOLE = "model does not fit: weights .* GiB and a pool of .* blocks need .* GiB of the .* GiB free; "


def chosen(free_bytes: int, **keys: Any) -> PoolLayout:
    keys = {f"cache.{key}": value for key, value in keys.items()}
    return build.choose_layout(config.load(None, {"cache.block_tokens": BLOCK_TOKENS, **keys}), SPEC, free_bytes)


def refused(free_bytes: int, **keys: Any) -> str:
    """The advice: what the message says after the numbers."""
    with pytest.raises(ConfigError) as e:
        chosen(free_bytes, **keys)
    found = re.fullmatch(f"({WHOLE})(.*)", str(e.value))
    assert found, str(e.value)
    return found[2]


@pytest.mark.parametrize("keys", [{}, {"hbm_blocks": 50}])
@pytest.mark.parametrize("free_bytes", [WEIGHTS // 2, WEIGHTS, WEIGHTS + 2 * BLOCK - 1])
def test_weights_that_do_not_fit_call_for_smaller_ones_and_not_for_a_smaller_pool(
    free_bytes: int, keys: dict[str, int]
):
    said = refused(free_bytes, **keys)
    assert "model.path" in said and "model.dtype" in said
    assert "cache." not in said and "model.tp" not in said  # devices on a CPU share its memory


def test_on_an_accelerator_more_devices_help_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "model.tp" in refused(WEIGHTS // 2)


def test_too_many_blocks_are_told_how_many_would_do():
    free_bytes = WEIGHTS + 20 * BLOCK
    said = refused(free_bytes, hbm_blocks=21)
    assert said == "lower cache.hbm_blocks to at most 20"
    assert chosen(free_bytes, hbm_blocks=20).blocks == 21  # one is padding's


def test_a_share_that_is_too_small_can_be_set_by_hand():
    free_bytes = WEIGHTS + 7 * BLOCK  # of which a quarter is less than 2 blocks
    assert refused(free_bytes) == "set cache.hbm_blocks, to at most 7"
    assert chosen(free_bytes, hbm_blocks=7).blocks == 8
    assert chosen(WEIGHTS + 8 * BLOCK).blocks == 3


@pytest.mark.parametrize("error", [MemoryError("of host"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: of device")])
def test_a_start_without_memory_is_one_clear_line(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def short(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(build.checkpoint, "read_spec", short)
    monkeypatch.setattr(build.hub, "resolve", str)
    with pytest.raises(
        ResourceExhausted, match="too little memory to load the model and its cache: .*of (host|device)"
    ):
        build.build(config.load(None, {"model.path": "m", "serve.compile_cache": ""}))
