"""Tiny checkpoints and adapters in the Hugging Face and PEFT file formats, without PyTorch.

    spec = make_model(tmp_path / "model", seed=1, kv_heads=4)
    path = make_adapter(tmp_path / "sql", spec, seed=2, r=8, targets=("q", "down"))

Weights are random and of such a size that logits have no near ties, and adapters are loud
enough that greedy output differs from the base model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jlora.model.spec import ModelSpec, RopeScaling

# Written out again here, not imported: the tests' own statement of the file format.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

TINY: Mapping[str, Any] = {
    "vocab": 96,
    "width": 32,
    "mlp": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "max_len": 128,
    "eos_ids": (2,),
    "bos_id": 1,
}


def tiny_spec(name: str = "tiny", **overrides: Any) -> ModelSpec:
    """The tests' default shape, with `ModelSpec` fields replaced by `overrides`."""
    return ModelSpec(**{**TINY, "name": name, **overrides})


def make_model(directory: str | Path, seed: int = 0, shards: int = 1, style: int = 5, **overrides: Any) -> ModelSpec:
    """Writes a random Llama as transformers would: config, generation config and weights.

    Args:
        shards: more than one writes `model-0000i-of-0000n.safetensors` and their index.
        style: 4 or 5, the transformers version whose `config.json` is imitated.
        overrides: fields of `ModelSpec`; the rest is `TINY`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    spec = tiny_spec(directory.name, **overrides)
    write_json(directory / "config.json", hf_config(spec, style))
    write_json(directory / "generation_config.json", {"bos_token_id": spec.bos_id, "eos_token_id": list(spec.eos_ids)})
    write_weights(directory, model_tensors(spec, seed), shards)
    return spec


def hf_config(spec: ModelSpec, style: int = 5) -> dict[str, Any]:
    """`config.json` of a Llama of this shape, in the style of transformers 4 or 5."""
    config: dict[str, Any] = {
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
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids),
    }
    scaling = None if spec.rope_scaling is None else _hf_rope(spec.rope_scaling)
    if style == 5:
        parameters = scaling or {"rope_type": "default"}
        return {**config, "dtype": spec.dtype, "rope_parameters": {**parameters, "rope_theta": spec.rope_theta}}
    return {**config, "torch_dtype": spec.dtype, "rope_theta": spec.rope_theta, "rope_scaling": scaling}


def model_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by their Hugging Face names; matrices are [output, input]."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16).astype(spec.dtype)

    tensors = {"model.embed_tokens.weight": normal(spec.vocab, spec.width)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = normal(spec.width, scale=0.1) + np.ones(spec.width, spec.dtype)
        for name, (width_in, width_out) in spec.projection_shapes.items():
            tensors[f"{prefix}.{MODULES[name]}.weight"] = normal(width_out, width_in, scale=width_in**-0.5)
    tensors["model.norm.weight"] = normal(spec.width, scale=0.1) + np.ones(spec.width, spec.dtype)
    if not spec.tied:
        tensors["lm_head.weight"] = normal(spec.vocab, spec.width, scale=2 * spec.width**-0.5)
    return tensors


def write_weights(directory: Path, tensors: Mapping[str, np.ndarray], shards: int = 1) -> None:
    """One `model.safetensors`, or `shards` files dealt round-robin with their index."""
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    place = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: tensor for name, tensor in tensors.items() if place[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    total = sum(t.nbytes for t in tensors.values())
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": place})


def make_adapter(
    directory: str | Path,
    spec: ModelSpec,
    seed: int = 0,
    r: int = 4,
    targets: Sequence[str] = ("q", "v"),
    **config: Any,
) -> Path:
    """Writes a random PEFT LoRA; returns its directory.

    Args:
        targets: projections that get weights, by jlora's names (q, k, v, o, gate, up, down).
        config: keys of `adapter_config.json` to add or replace. `rank_pattern` and
            `layers_to_transform` also change which tensors are written, as in PEFT.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.name,
        "r": r,
        "lora_alpha": 2 * r,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [MODULES[t].rpartition(".")[2] for t in targets],
        "inference_mode": True,
        **config,
    }
    write_json(directory / "adapter_config.json", settings)
    save_file(adapter_tensors(spec, settings, targets, seed), directory / "adapter_model.safetensors")
    return directory


def adapter_tensors(
    spec: ModelSpec, settings: Mapping[str, Any], targets: Sequence[str], seed: int = 0
) -> dict[str, np.ndarray]:
    """Random A [r, in] and B [out, r] by PEFT's names, for the ranks that `settings` asks for."""
    rng = np.random.default_rng(seed)
    layers = settings.get("layers_to_transform")
    layers = range(spec.layers) if layers is None else [layers] if isinstance(layers, int) else layers
    tensors = {}
    for layer in layers:
        for name in targets:
            module = f"model.layers.{layer}.{MODULES[name]}"
            width_in, width_out = spec.projection_shapes[name]
            r = rank_of(module, settings)
            prefix = f"base_model.model.{module}"
            a, b = rng.standard_normal((r, width_in)) * width_in**-0.5, rng.standard_normal((width_out, r)) * 0.5
            tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def rank_of(module: str, settings: Mapping[str, Any]) -> int:
    """PEFT's rank of a module: the first matching key of `rank_pattern`, else `r`."""
    for key, rank in (settings.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return rank
    return settings["r"]


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, as transformers and peft write it."""
    path.write_text(json.dumps(value, indent=2))


def edit_json(path: Path, **changes: Any) -> None:
    """Replaces top-level keys of a JSON file."""
    write_json(path, {**json.loads(path.read_text()), **changes})


def _hf_rope(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_len,
    }
