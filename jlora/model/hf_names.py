"""Hugging Face's names for a Llama's modules and tensors, and where each tensor goes in ours.

Checkpoints, adapter files and error messages use these names. A Linear's weight is
[output, input] there and [input, output] here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jlora.model.spec import ModelSpec

MODULES: Mapping[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


class Slot(NamedTuple):
    """The place of one checkpoint tensor in the parameter pytree.

    Attributes:
        layer: None for a weight outside the layers.
        leaf: key in that layer, or in the pytree itself.
        shape: in the checkpoint; `transposed`: ours is its transpose.
    """

    layer: int | None
    leaf: str
    shape: tuple[int, ...]
    transposed: bool = False

    def home(self, tree: Any) -> dict[str, Any]:
        """The part of a pytree like the parameters, layers as a list, that has this leaf."""
        return tree if self.layer is None else tree["layers"][self.layer]


def tensor_slots(spec: ModelSpec) -> dict[str, Slot]:
    """Every tensor of a Llama checkpoint of this shape, by name."""
    slots = {"model.embed_tokens.weight": Slot(None, "embed", (spec.vocab, spec.width))}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for leaf, module in NORMS.items():
            slots[f"{prefix}.{module}.weight"] = Slot(layer, leaf, (spec.width,))
        for leaf, (width_in, width_out) in spec.projection_shapes.items():
            slots[f"{prefix}.{MODULES[leaf]}.weight"] = Slot(layer, leaf, (width_out, width_in), True)
    slots["model.norm.weight"] = Slot(None, "norm", (spec.width,))
    if not spec.tied:
        slots["lm_head.weight"] = Slot(None, "head", (spec.vocab, spec.width), True)
    return slots


def projections(spec: ModelSpec) -> dict[str, tuple[int, str]]:
    """Full module name of every matrix that an adapter may change -> (layer, projection)."""
    return {
        f"model.layers.{layer}.{module}": (layer, name)
        for layer in range(spec.layers)
        for name, module in MODULES.items()
    }


def other_modules(spec: ModelSpec) -> list[str]:
    """Full names of the other modules of `LlamaForCausalLM` that `named_modules` lists."""
    inside = ("", ".self_attn", ".mlp", ".mlp.act_fn", *(f".{norm}" for norm in NORMS.values()))
    layers = [f"model.layers.{layer}{part}" for layer in range(spec.layers) for part in inside]
    return ["model", "model.embed_tokens", "model.layers", *layers, "model.norm", "model.rotary_emb", "lm_head"]
