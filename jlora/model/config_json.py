"""Reads `config.json` and `generation_config.json` of a Hugging Face Llama into a `ModelSpec`. No jax.

Reads the styles of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
(`rope_parameters`, `dtype`). A setting that jlora does not support is an error that names it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jlora.errors import DataLoss, InvalidArgument, NotFound
from jlora.model.spec import ModelSpec, RopeScaling

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION = "generation_config.json"

# model_type -> architecture.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

# float16 is served as bfloat16, which has the same size and does not overflow in the activations.
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}

# Keys that may change the computation -> values that do not.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu", "swish"),
    "quantization_config": (None,),
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1, 1.0),
}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; errors name the file without its directory.

    Raises:
        NotFound: the file cannot be read.
        DataLoss: it does not contain a JSON object.
    """
    try:
        tree = json.loads(file.read_bytes())
    except OSError as e:
        raise NotFound(f"model directory {file.parent.name!r}: {file.name}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise DataLoss(f"{file.name}: is not valid JSON ({type(e).__name__})") from e
    if not isinstance(tree, dict):
        raise DataLoss(f"{file.name}: must hold a JSON object, not a {type(tree).__name__}")
    return tree


def spec_from_json(directory: Path, name: str, dtype: str = "auto", max_model_len: int = 0) -> ModelSpec:
    """The spec of the model in `directory`; see `checkpoint.read_spec`."""
    config = _Fields(read_json(directory / CONFIG), CONFIG)
    _refuse_unsupported(config)
    heads, width = config.positive("num_attention_heads"), config.positive("hidden_size")
    longest = config.positive("max_position_embeddings")
    if max_model_len > longest:
        raise InvalidArgument(f"model.max_model_len = {max_model_len}: must be at most the model's own {longest}")
    spec = ModelSpec(
        vocab=config.positive("vocab_size"),
        width=width,
        mlp=config.positive("intermediate_size"),
        layers=config.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=_head_dim(config, width, heads),
        max_len=max_model_len or longest,
        rope_theta=_rope_theta(config),
        rope_scaling=_rope_scaling(config),
        norm_eps=config.real("rms_norm_eps", above=0.0),
        tied=config.flag("tie_word_embeddings"),
        dtype=_dtype(config, dtype),
        name=name,
    )
    _check_window(config, spec)
    return _with_end_tokens(spec, config, directory)


class _Fields:
    """The keys of one JSON object, with errors that name file, key and value."""

    def __init__(self, tree: Mapping[str, Any], where: str):
        self.tree = tree
        self.where = where

    def bad(self, key: str, value: Any, limit: str) -> InvalidArgument:
        text = json.dumps(value)
        return InvalidArgument(f"{self.where}: {key} = {text if len(text) <= 80 else text[:77] + '...'}: {limit}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value. null counts as absent. Without a default the key is required."""
        value = self.tree.get(key)
        if value is None and default is None:
            raise self.bad(key, None, "is missing")
        return default if value is None else value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(key, value, "must be a whole number, at least 1")
        return value

    def real(self, key: str, default: float | None = None, above: float = -math.inf) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < math.inf:
            raise self.bad(key, value, f"must be a finite number above {above}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.bad(key, value, "must be true or false")
        return value

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...] | None:
        """One id or a list of them; None if absent."""
        value = self.tree.get(key)
        ids = value if isinstance(value, list) or value is None else [value]
        if ids is not None and not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
            raise self.bad(key, value, f"must be token ids in [0, {vocab})")
        return None if ids is None else tuple(ids)


def _refuse_unsupported(config: _Fields) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise config.bad("model_type", kind, f"not supported; must be one of {', '.join(ARCHITECTURES)}")
    architectures = config.get("architectures", [ARCHITECTURES[kind]])
    if architectures != [ARCHITECTURES[kind]]:
        raise config.bad("architectures", architectures, f'not supported; must be ["{ARCHITECTURES[kind]}"]')
    for key, allowed in _FIXED.items():
        value = config.tree.get(key)
        if not any(value is a or (not isinstance(value, bool) and value == a) for a in allowed):
            raise config.bad(key, value, f"not supported; must be {' or '.join(json.dumps(a) for a in allowed)}")


def _kv_heads(config: _Fields, heads: int) -> int:
    # Llama's default is the number of query heads. Mistral's differs, so Mistral must state it.
    default = heads if config.tree["model_type"] == "llama" else None
    kv_heads = config.positive("num_key_value_heads", default)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}")
    return kv_heads


def _head_dim(config: _Fields, width: int, heads: int) -> int:
    if config.tree.get("head_dim") is None and width % heads:
        raise config.bad("hidden_size", width, f"must be a multiple of num_attention_heads = {heads}, or give head_dim")
    head_dim = config.positive("head_dim", width // heads)
    if head_dim % 2:
        raise config.bad("head_dim", head_dim, "must be even, for rotary embeddings")
    return head_dim


def _rope(config: _Fields) -> _Fields:
    """The rotary settings: `rope_parameters` (transformers 5), else `rope_scaling` (4), else empty."""
    new, old = config.tree.get("rope_parameters"), config.tree.get("rope_scaling")
    if new and old and new != old:
        raise config.bad("rope_scaling", old, "differs from rope_parameters; keep one of them")
    key = "rope_parameters" if new else "rope_scaling"
    settings = new or old or {}
    if not isinstance(settings, dict):
        raise config.bad(key, settings, "must be an object or null")
    return _Fields(settings, f"{config.where}: {key}")


def _rope_theta(config: _Fields) -> float:
    rope = _rope(config)
    source = rope if rope.tree.get("rope_theta") is not None else config
    return source.real("rope_theta", 10000.0, above=0.0)


def _rope_scaling(config: _Fields) -> RopeScaling | None:
    rope = _rope(config)
    key = "rope_type" if "rope_type" in rope.tree else "type"
    kind = rope.tree.get(key, "default")
    if rope.tree.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.bad("partial_rotary_factor", rope.tree["partial_rotary_factor"], "not supported; must be 1")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise rope.bad(key, kind, "not supported; must be default, linear or llama3")
    factor = rope.real("factor", above=0.0)
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = rope.real("low_freq_factor", above=0.0), rope.real("high_freq_factor", above=0.0)
    if high <= low:
        raise rope.bad("high_freq_factor", high, f"must be above low_freq_factor = {low}")
    return RopeScaling(kind, factor, low, high, rope.positive("original_max_position_embeddings"))


def _dtype(config: _Fields, wanted: str) -> str:
    """`wanted`, or for "auto" the checkpoint's own, float32 if it names none."""
    if wanted != "auto":
        if wanted not in ("float32", "bfloat16"):
            raise InvalidArgument(f"model.dtype = {wanted!r}: must be auto, float32 or bfloat16")
        return wanted
    key = "dtype" if config.tree.get("dtype") is not None else "torch_dtype"
    stored = config.get(key, "float32")
    if not isinstance(stored, str) or stored not in DTYPES:
        raise config.bad(key, stored, f"not supported; must be one of {', '.join(DTYPES)}, or set model.dtype")
    if DTYPES[stored] != stored:
        logger.info("%s: %s = %s is served as %s", config.where, key, stored, DTYPES[stored])
    return DTYPES[stored]


def _check_window(config: _Fields, spec: ModelSpec) -> None:
    """Refuses a sliding window shorter than the context; a longer one changes nothing."""
    window = config.tree.get("sliding_window")
    if window is not None and config.positive("sliding_window") < spec.max_len:
        raise config.bad(
            "sliding_window",
            window,
            f"not supported below the context of {spec.max_len}; set model.max_model_len = {window}",
        )


def _with_end_tokens(spec: ModelSpec, config: _Fields, directory: Path) -> ModelSpec:
    """Adds the end and begin tokens of generation_config.json, else of config.json."""
    file = directory / GENERATION
    generation = _Fields(read_json(file) if file.exists() else {}, GENERATION)

    def first(key: str) -> tuple[int, ...]:
        ids = generation.token_ids(key, spec.vocab)
        return (config.token_ids(key, spec.vocab) if ids is None else ids) or ()

    bos = first("bos_token_id")
    return dataclasses.replace(spec, eos_ids=first("eos_token_id"), bos_id=bos[0] if bos else None)
