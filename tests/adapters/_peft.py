"""What the tests of the PEFT reader share: reading for one small base, and editing files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlora.adapters.adapter import Adapter
from jlora.adapters.peft import WEIGHTS, read_peft
from jlora.errors import JloraError
from tests import _make

SPEC = _make.tiny_spec(layers=3)


def read(path: Path, **kwargs: Any) -> Adapter:
    return read_peft(path, SPEC, **{"max_rank": 64, **kwargs})


def refused(path: Path, error: type[JloraError], *words: str, **kwargs: Any) -> None:
    """Reading `path` fails with `error`, whose message has all `words` and no directory of ours."""
    with pytest.raises(error) as caught:
        read(path, **kwargs)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert str(path.parent) not in message
    assert "\n" not in message and len(message) < 500


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)
    return path


def key(layer: int, projection: str, half: str = "A") -> str:
    return f"base_model.model.model.layers.{layer}.{_make.MODULES[projection]}.lora_{half}.weight"
