"""The demo model as files: Hugging Face's for the base and its tokenizer, PEFT's for adapters.

Our matrices are [input, output]; the files hold [output, input] as PyTorch does. The tokenizer
is byte-level BPE without merges: 256 byte tokens (id = byte) and `data.SPECIALS`, so any text
can be encoded and decoded. The special tokens that it adds to a plain text make it one user turn,
because answering turns is all that this model can do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jlora.loadgen.checkpoints import save_adapter, save_model
from jlora.model.hf_names import MODULES, NORMS
from jlora.model.spec import ModelSpec
from tools.train_demo.data import ASSISTANT, BOS, EOS, PAD, SPECIALS, USER
from tools.train_demo.plans import LoraShape

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Lora = list[dict[str, tuple[Any, Any]]]  # per layer: projection -> A [r, in], B [r, out]


def write_model(directory: Path, spec: ModelSpec, params: Mapping[str, Any]) -> None:
    """Writes `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer."""
    save_model(directory, spec, _named_weights(params), bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    _write_json(
        directory / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
    )
    write_tokenizer(directory, spec.max_len)


def read_model(directory: Path, layers: int) -> dict[str, Any]:
    """The parameters that `write_model` wrote, as `jlora.model.llama` takes them."""
    weights = load_file(directory / "model.safetensors")
    params: dict[str, Any] = {"embed": weights["model.embed_tokens.weight"], "norm": weights["model.norm.weight"]}
    params["layers"] = [
        {name: weights[f"model.layers.{i}.{norm}.weight"] for name, norm in NORMS.items()}
        | {name: weights[f"model.layers.{i}.{module}.weight"].T for name, module in MODULES.items()}
        for i in range(layers)
    ]
    return params


def write_tokenizer(directory: Path, max_len: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_characters().items()}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    turn = [(SPECIALS[token - BOS], token) for token in (BOS, USER, ASSISTANT)]
    single = "{} {} $A {}".format(*(text for text, _ in turn))
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=turn)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": SPECIALS[PAD - BOS],
        "additional_special_tokens": list(SPECIALS[2:]),
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)


def write_adapter(
    directory: Path, shape: LoraShape, lora: Lora, base: str, invocation: Sequence[int] | None = None
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` as PEFT does.

    Args:
        invocation: the tokens that an activated LoRA acts from.
    """
    layers = [
        {name: (_contiguous(a), _contiguous(np.asarray(b).T)) for name, (a, b) in layer.items()} for layer in lora
    ]
    activated = {} if invocation is None else {"alora_invocation_tokens": list(invocation)}
    config: dict[str, Any] = {
        "base_model_name_or_path": base,
        "lora_alpha": shape.alpha,
        "use_rslora": shape.rslora,
        "rank_pattern": {MODULES[name].rpartition(".")[2]: rank for name, rank in shape.ranks.items()},
    }
    save_adapter(directory, layers, shape.rank, **config, **activated)


def read_adapter(directory: Path, layers: int) -> Lora:
    """The weights that `write_adapter` wrote."""
    weights = load_file(directory / "adapter_model.safetensors")

    def pair(module: str) -> tuple[np.ndarray, np.ndarray]:
        return weights[f"{module}.lora_A.weight"], weights[f"{module}.lora_B.weight"].T

    return [
        {
            name: pair(module)
            for name, suffix in MODULES.items()
            if f"{(module := f'base_model.model.model.layers.{i}.{suffix}')}.lora_A.weight" in weights
        }
        for i in range(layers)
    ]


def _named_weights(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    weights = {
        "model.embed_tokens.weight": _contiguous(params["embed"]),
        "model.norm.weight": _contiguous(params["norm"]),
    }
    for index, layer in enumerate(params["layers"]):
        for name, norm in NORMS.items():
            weights[f"model.layers.{index}.{norm}.weight"] = _contiguous(layer[name])
        for name, module in MODULES.items():
            weights[f"model.layers.{index}.{module}.weight"] = _contiguous(np.asarray(layer[name]).T)
    return weights


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (as in GPT-2)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + offset) for offset, byte in enumerate(hidden)}


def _contiguous(array: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array, np.float32))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
