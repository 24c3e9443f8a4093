"""A model and an adapter for it that rounding swallows: merging it into bfloat16 weights changes none of them.

All weights of its projections are 1.5 times a power of two, up to the sign. The adapter adds a little less to each
than the half of their last bit. All tokens' inputs point one way, and so does the adapter's A: it changes answers.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jlora.model.spec import ModelSpec
from tests import _make

TARGETS = ("q", "k", "v", "gate", "up")
SIZE = 1.5 * 2.0**-3
ADDED = 0.9 * 2.0**-11  # half of the last of the 8 bits of a weight is 2 ** -11


def make(directory: Path) -> tuple[ModelSpec, Path, Path]:
    """Writes both: the model's shape, the model, the adapter."""
    spec = _make.make_model(directory / "model", seed=3, dtype="bfloat16")
    tensors = load_file(directory / "model" / "model.safetensors")
    for name, found in tensors.items():
        if "_proj" in name:
            tensors[name] = (np.sign(found.astype(np.float32) + 1e-9) * SIZE).astype(ml_dtypes.bfloat16)
    embedded = 1 + 0.3 * tensors["model.embed_tokens.weight"].astype(np.float32)
    tensors["model.embed_tokens.weight"] = embedded.astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model" / "model.safetensors", metadata={"format": "pt"})
    adapter = _make.make_adapter(directory / "weak", spec, seed=1, r=1, targets=TARGETS, lora_alpha=1)
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, found in factors.items():
        factors[name] = np.ones_like(found) if "lora_A" in name else np.sign(found) * np.float32(ADDED)
    save_file(factors, adapter / "adapter_model.safetensors")
    return spec, directory / "model", adapter
