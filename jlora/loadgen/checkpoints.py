"""Llamas and adapters as files that jlora, transformers and PEFT read, and random ones of them.

Random weights are representable in bfloat16: runs in bfloat16 and in float32 use the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jlora.model.hf_names import MODULES, tensor_slots
from jlora.model.spec import ModelSpec

ADAPTED = ("q", "k", "v", "o")

# 124.7 million weights.
LLAMA_100M = ModelSpec(
    vocab=32000, width=768, mlp=2048, layers=12, heads=12, kv_heads=4, head_dim=64, max_len=1024, name="random-100m"
)
SMALL = ModelSpec(
    vocab=512, width=128, mlp=352, layers=4, heads=4, kv_heads=4, head_dim=32, max_len=512, name="random-small"
)
TINY = ModelSpec(
    vocab=512, width=64, mlp=96, layers=2, heads=4, kv_heads=2, head_dim=16, max_len=128, name="random-tiny"
)

# Of one layer, by projection: A [r, in] and B [out, r], as PEFT holds them.
Layer = Mapping[str, tuple[np.ndarray, np.ndarray]]


def save_model(directory: Path, spec: ModelSpec, tensors: Mapping[str, np.ndarray], **config: Any) -> None:
    """A Llama as transformers writes it: config.json and model.safetensors.

    Args:
        tensors: by Hugging Face's names; matrices are [output, input].
        config: further keys of config.json.
    """
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**keys, **config}, indent=1) + "\n")
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def save_adapter(directory: Path, layers: Sequence[Layer], rank: int, **config: Any) -> None:
    """An adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors.

    Args:
        rank: `r`; `lora_alpha` is twice that unless `config`, further keys of adapter_config.json, says otherwise.
    """
    keys = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [MODULES[name].rpartition(".")[2] for name in layers[0]],
        "inference_mode": True,
    }
    tensors = {}
    for i, layer in enumerate(layers):
        for name, (a, b) in layer.items():
            module = f"base_model.model.model.layers.{i}.{MODULES[name]}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**keys, **config}, indent=1) + "\n")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def write_model(directory: Path, spec: ModelSpec, seed: int) -> None:
    """A random Llama in float32, unless it is there."""
    if (directory / "model.safetensors").exists():
        return
    rng, tensors = np.random.default_rng(seed), {}
    for name, slot in tensor_slots(spec).items():
        # The head is wide enough that greedy choices are rarely close.
        scale = {"embed": 1.0, "head": 2 * spec.width**-0.5}.get(slot.leaf, slot.shape[-1] ** -0.5)
        norm = len(slot.shape) == 1
        tensors[name] = np.ones(slot.shape, np.float32) if norm else _normal(rng, slot.shape, scale)
    save_model(directory, spec, tensors)


def write_adapter(
    directory: Path,
    spec: ModelSpec,
    rank: int,
    seed: int,
    targets: Sequence[str] = ADAPTED,
    dtype: str = "float32",
    **config: Any,
) -> None:
    """A random adapter, strong enough to change the greedy output; nothing, if it is there."""
    if (directory / "adapter_model.safetensors").exists():
        return
    rng = np.random.default_rng(seed)

    def pair(width_in: int, width_out: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = _normal(rng, (rank, width_in), width_in**-0.5), _normal(rng, (width_out, rank), 0.4 / len(targets))
        return a.astype(dtype), b.astype(dtype)

    layers = [{name: pair(*spec.projection_shapes[name]) for name in targets} for _ in range(spec.layers)]
    save_adapter(directory, layers, rank, base_model_name_or_path=spec.name, **config)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)
