"""Reads `config.json` and `generation_config.json` of a Hugging Face Llama into a `ModelSpec`. No jax.

Reads the styles of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
(`rope_parameters`, `dtype`). A setting that jlora does not support is an error that names it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jlora.errors import DataLoss, InvalidArgument, NotFound
from jlora.model.fields import AboveZero, Fields, Flag, Positive, parse, short
from jlora.model.spec import ModelSpec, RopeScaling
from jlora.model.token_names import end_token

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION = "generation_config.json"

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

_MISTRAL_WINDOW = 4096  # tokens

# float16 is served as bfloat16, which has the same size and does not overflow in the activations.
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}

# What transformers' `generate` takes from `generation_config.json` (vLLM takes some of it) -> values of no effect,
# beside null and what is empty.
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "guidance_scale", "num_beams"), (1,)),
    **dict.fromkeys(("top_k", "min_p", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0, -1)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("max_new_tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "stop_strings"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "penalty_alpha"), ()),
}

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
    """A JSON object. Raises NotFound if the file cannot be read, DataLoss if it holds no object."""
    try:
        tree = parse(file.read_bytes(), file.name)
    except OSError as e:
        raise NotFound(f"model directory {file.parent.name!r}: {file.name}: {e.strerror}") from e
    if not isinstance(tree, dict):
        raise DataLoss(f"{file.name}: must hold a JSON object, not a {type(tree).__name__}")
    return tree


def spec_from_json(directory: Path, name: str, dtype: str = "auto", max_model_len: int = 0) -> ModelSpec:
    """The spec of the model in `directory`; see `checkpoint.read_spec`."""
    config = Fields(read_json(directory / CONFIG), CONFIG)
    _refuse_unsupported(config)
    heads, width = config.read("num_attention_heads", Positive), config.read("hidden_size", Positive)
    rope = _rope(config)
    spec = ModelSpec(
        vocab=config.read("vocab_size", Positive),
        width=width,
        mlp=config.read("intermediate_size", Positive),
        layers=config.read("num_hidden_layers", Positive),
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=_head_dim(config, width, heads),
        max_len=context(config.read("max_position_embeddings", Positive), max_model_len),
        rope_theta=(config if rope.tree.get("rope_theta") is None else rope).read("rope_theta", AboveZero, 10000.0),
        rope_scaling=_rope_scaling(rope, config),
        norm_eps=config.read("rms_norm_eps", AboveZero),
        tied=config.read("tie_word_embeddings", Flag, False),
        dtype=_dtype(config, dtype),
        name=name,
    )
    _check_window(config, spec)
    return with_tokenizers_end(_with_end_tokens(spec, config, directory), directory)


def warn_of_generation(directory: Path) -> None:
    """Logs what `generation_config.json` sets for requests elsewhere, and jlora leaves to each request."""
    file = directory / GENERATION
    tree = read_json(file) if file.exists() else {}
    found = {k: tree[k] for k, neutral in _UNUSED.items() if tree.get(k) not in (None, [], {}, *neutral)}
    if found:
        logger.warning(
            "%s: not applied: %s; requests decide, so send them with each request",
            GENERATION, ", ".join(f"{key} = {short(value)}" for key, value in found.items()),
        )  # fmt: skip


def context(longest: int, wanted: int) -> int:
    """`wanted` tokens, 0 for all that the model has. Raises InvalidArgument if it has fewer, or if nothing fits."""
    if wanted < 0 or wanted == 1:
        raise InvalidArgument(f"model.max_model_len = {wanted}: must be 0 or at least 2")
    if wanted > longest:
        raise InvalidArgument(f"model.max_model_len = {wanted}: must be at most the model's own {longest}")
    return wanted or longest


def _refuse_unsupported(config: Fields) -> None:
    kind = config.tree.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise config.bad("model_type", kind, f"not supported; must be one of {', '.join(ARCHITECTURES)}")
    architectures = config.tree.get("architectures") or [ARCHITECTURES[kind]]
    if architectures != [ARCHITECTURES[kind]]:
        raise config.bad("architectures", architectures, f'not supported; must be ["{ARCHITECTURES[kind]}"]')
    config.require(_FIXED)


def _kv_heads(config: Fields, heads: int) -> int:
    # Llama's default is the number of query heads. Mistral's differs, so Mistral must state it.
    default = heads if config.tree["model_type"] == "llama" else None
    kv_heads = config.read("num_key_value_heads", Positive, default)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}")
    return kv_heads


def _head_dim(config: Fields, width: int, heads: int) -> int:
    if config.tree.get("head_dim") is None and width % heads:
        raise config.bad("hidden_size", width, f"must be a multiple of num_attention_heads = {heads}, or give head_dim")
    head_dim = config.read("head_dim", Positive, width // heads)
    if head_dim % 2:
        raise config.bad("head_dim", head_dim, "must be even, for rotary embeddings")
    return head_dim


def _rope(config: Fields) -> Fields:
    new, old = config.tree.get("rope_parameters"), config.tree.get("rope_scaling")
    if new and old and new != old:
        raise config.bad("rope_scaling", old, "differs from rope_parameters; keep one of them")
    key = "rope_parameters" if new else "rope_scaling"
    settings = new or old or {}
    if not isinstance(settings, dict):
        raise config.bad(key, settings, "must be an object or null")
    return Fields(settings, f"{config.where}: {key}")


def _rope_scaling(rope: Fields, config: Fields) -> RopeScaling | None:
    key = "rope_type" if "rope_type" in rope.tree else "type"
    kind = rope.tree.get(key, "default")
    if rope.tree.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.bad("partial_rotary_factor", rope.tree["partial_rotary_factor"], "not supported; must be 1")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise rope.bad(key, kind, "not supported; must be default, linear or llama3")
    factor = rope.read("factor", AboveZero)
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = rope.read("low_freq_factor", AboveZero), rope.read("high_freq_factor", AboveZero)
    if high <= low:
        raise rope.bad("high_freq_factor", high, f"must be above low_freq_factor = {low}")
    key = "original_max_position_embeddings"
    inner, outer = rope.read(key, Positive), config.tree.get(key)
    if outer not in (None, inner):  # transformers takes it, and older versions do not
        raise config.bad(key, outer, f"differs from the {inner} of {rope.where}; keep one of them")
    return RopeScaling(kind, factor, low, high, inner)


def _dtype(config: Fields, wanted: str) -> str:
    if wanted != "auto":
        return wanted
    key = "dtype" if config.tree.get("dtype") is not None else "torch_dtype"
    stored = config.tree.get(key) or "float32"
    if not isinstance(stored, str) or stored not in DTYPES:
        raise config.bad(key, stored, f"not supported; must be one of {', '.join(DTYPES)}, or set model.dtype")
    if DTYPES[stored] != stored:
        logger.info("%s: %s = %s is served as %s", config.where, key, stored, DTYPES[stored])
    return DTYPES[stored]


def _check_window(config: Fields, spec: ModelSpec) -> None:
    # Null is no window. Without the key, transformers takes Mistral's default.
    window = config.tree.get("sliding_window", _MISTRAL_WINDOW if config.tree["model_type"] == "mistral" else None)
    if window is not None and config.convert("sliding_window", window, Positive) < spec.max_len:
        raise config.bad(
            "sliding_window",
            window,
            f"not supported below the context of {spec.max_len}; set model.max_model_len = {window}",
        )


def _with_end_tokens(spec: ModelSpec, config: Fields, directory: Path) -> ModelSpec:
    file = directory / GENERATION
    generation = Fields(read_json(file) if file.exists() else {}, GENERATION)

    def first(key: str) -> tuple[int, ...]:
        ids = generation.token_ids(key, spec.vocab)
        return (config.token_ids(key, spec.vocab) if ids is None else ids) or ()

    bos = first("bos_token_id")
    return dataclasses.replace(spec, eos_ids=first("eos_token_id"), bos_id=bos[0] if bos else None)


def with_tokenizers_end(spec: ModelSpec, directory: Path) -> ModelSpec:
    """The spec with the tokenizer's `eos_token` among those that end an answer, as in vLLM.

    A fine-tune's tokenizer often names the end of its turns where `generation_config.json` is still the base's.
    """
    end = end_token(directory)
    if end is None or end >= spec.vocab or end in spec.eos_ids:
        return spec
    logger.info("the tokenizer's end token %d ends answers, beside %s", end, list(spec.eos_ids))
    return dataclasses.replace(spec, eos_ids=(*spec.eos_ids, end))
