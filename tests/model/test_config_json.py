"""`config.json` in both styles as a spec; what is missing, malformed or not served is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from jlora.errors import DataLoss, InvalidArgument, NotFound
from jlora.model.checkpoint import read_spec
from jlora.model.config_json import warn_of_generation
from jlora.model.spec import RopeScaling
from tests import _make

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the two JSON files of the tiny model, in the style of transformers 5."""
    return write(tmp_path / "org" / "tiny")


def write(directory: Path, style: int = 5, **overrides: Any) -> Path:
    directory.mkdir(parents=True)
    _make.write_json(directory / "config.json", _make.hf_config(_make.tiny_spec(**overrides), style))
    return directory


def change(directory: Path, **changes: Any) -> Path:
    """Replaces keys of config.json; ... deletes one."""
    tree = {**json.loads((directory / "config.json").read_text()), **changes}
    _make.write_json(directory / "config.json", {k: v for k, v in tree.items() if v is not ...})
    return directory


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"kv_heads": 4, "tied": True, "dtype": "bfloat16"},
        {"head_dim": 10, "norm_eps": 1e-6, "rope_theta": 500000.0},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": RopeScaling("linear", 2.0), "vocab": 101},
        {"eos_ids": (3, 5, 7), "bos_id": None},
        {"eos_ids": ()},
    ],
)
def test_both_styles_say_the_same_model(tmp_path: Path, style: int, overrides: dict[str, Any]):
    assert read_spec(write(tmp_path / "tiny", style, **overrides)) == _make.tiny_spec(**overrides)


def test_older_spellings_and_defaults(model: Path):
    change(model, rope_parameters=..., rope_theta=5000, rope_scaling={"type": "linear", "factor": 2})
    spec = read_spec(change(model, head_dim=..., num_key_value_heads=..., tie_word_embeddings=..., eos_token_id=9))
    assert spec.rope_theta == 5000.0 and spec.rope_scaling == RopeScaling("linear", 2.0)
    assert (spec.head_dim, spec.kv_heads, spec.tied, spec.eos_ids) == (8, 4, False, (9,))
    assert read_spec(change(model, rope_theta=..., rope_scaling=...)).rope_theta == 10000.0


def test_end_tokens_come_from_the_generation_config_first(model: Path):
    change(model, eos_token_id=3, bos_token_id=4)
    assert (read_spec(model).eos_ids, read_spec(model).bos_id) == ((3,), 4)
    _make.write_json(model / "generation_config.json", {"eos_token_id": [5, 6]})
    assert (read_spec(model).eos_ids, read_spec(model).bos_id) == ((5, 6), 4)
    _make.write_json(model / "generation_config.json", {"eos_token_id": 96})
    with pytest.raises(InvalidArgument, match=r"generation_config\.json: eos_token_id = 96"):
        read_spec(model)


@pytest.mark.parametrize(
    "stored, wanted, got",
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        (..., "auto", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float8", "float32", "float32"),
    ],
)
def test_dtype(model: Path, caplog, stored: Any, wanted: str, got: str):
    with caplog.at_level(logging.INFO, logger="jlora"):
        assert read_spec(change(model, dtype=stored), wanted).dtype == got
    assert ("float16 is served as bfloat16" in caplog.text) == (stored == "float16")


def test_a_shorter_context_may_be_asked_for_but_not_a_longer_one(model: Path):
    assert read_spec(model, max_model_len=64).max_len == 64
    with pytest.raises(InvalidArgument, match=r"model\.max_model_len = 129: must be at most the model's own 128"):
        read_spec(model, max_model_len=129)


def test_mistral_is_served_unless_its_window_is_shorter_than_the_context(model: Path):
    change(model, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    assert read_spec(model).kv_heads == 2
    assert read_spec(change(model, sliding_window=128)).max_len == 128
    with pytest.raises(InvalidArgument, match="sliding_window = 100.*context of 128"):
        read_spec(change(model, sliding_window=100))
    assert read_spec(model, max_model_len=100).max_len == 100
    with pytest.raises(InvalidArgument, match="num_key_value_heads"):  # not Llama's default there
        read_spec(change(model, num_key_value_heads=..., sliding_window=None))


def test_a_mistral_that_says_nothing_of_its_window_has_transformers_default(model: Path):
    change(model, model_type="mistral", architectures=["MistralForCausalLM"], max_position_embeddings=8192)
    with pytest.raises(InvalidArgument, match="sliding_window = 4096.*context of 8192"):
        read_spec(model)
    assert read_spec(model, max_model_len=4096).max_len == 4096
    assert read_spec(change(model, sliding_window=None)).max_len == 8192


def _tokenizer(directory: Path, config: Any, **core: Any) -> None:
    _make.write_json(directory / "tokenizer_config.json", config)
    _make.write_json(directory / "tokenizer.json", core)


CHATML = {"id": 7, "content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    ("config", "core"),
    [
        ({"eos_token": "<|im_end|>"}, {"added_tokens": [CHATML]}),
        ({"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, {"added_tokens": [CHATML]}),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}, {}),
        ({"eos_token": "<|im_end|>"}, {"model": {"type": "BPE", "vocab": {"a": 0, "<|im_end|>": 7}}}),
    ],
)
def test_the_tokenizers_end_token_ends_answers_too(model: Path, config: Any, core: Any, caplog):
    _make.write_json(model / "generation_config.json", {"eos_token_id": 2})  # the base's
    _tokenizer(model, config, **core)
    with caplog.at_level(logging.INFO, logger="jlora"):
        assert read_spec(model).eos_ids == (2, 7)
    assert "end token 7" in caplog.text


@pytest.mark.parametrize(
    ("config", "core"),
    [
        ({"eos_token": "<|im_end|>"}, {"added_tokens": [{**CHATML, "id": 2}]}),  # the same
        ({"eos_token": "<|im_end|>"}, {"added_tokens": [{**CHATML, "id": 100_000}]}),  # beyond the vocabulary
        ({"eos_token": "<|im_end|>"}, {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}),
        ({"eos_token": None}, {"added_tokens": [CHATML]}),
        ({}, {}),
    ],
)
def test_a_tokenizer_may_have_no_other_end_token(model: Path, config: Any, core: Any):
    _make.write_json(model / "generation_config.json", {"eos_token_id": 2})
    _tokenizer(model, config, **core)
    assert read_spec(model).eos_ids == (2,)


def test_an_older_tokenizers_own_file_of_special_tokens_wins(model: Path):
    _make.write_json(model / "generation_config.json", {"eos_token_id": 2})
    _tokenizer(model, {"eos_token": "</s>"}, added_tokens=[CHATML, {"id": 2, "content": "</s>"}])
    _make.write_json(model / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    assert read_spec(model).eos_ids == (2, 7)
    newer = {"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>"}}}
    _make.write_json(model / "tokenizer_config.json", newer)
    assert read_spec(model).eos_ids == (2,)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_tokenizer_is_named(model: Path, file: str):
    _tokenizer(model, {"eos_token": "<|im_end|>"})
    (model / file).write_text("{")
    with pytest.raises(DataLoss, match=file):
        read_spec(model)


def test_a_hub_snapshot_is_named_by_its_id(tmp_path: Path):
    assert read_spec(write(tmp_path / "models--org--tiny-llama" / "snapshots" / "0123abcd")).name == "org/tiny-llama"
    assert read_spec(write(tmp_path / "snapshots" / "mine")).name == "mine"


@pytest.mark.parametrize(
    "name, value",
    [
        ("model_type", "qwen2"),
        ("model_type", ["llama"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", ["LlamaForCausalLM", "Other"]),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5),
        ("dtype", "float8_e4m3fn"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "longrope"}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_what_is_not_served_is_refused_by_name(model: Path, name: str, value: Any):
    with pytest.raises(InvalidArgument, match="not supported") as caught:
        read_spec(change(model, **{name: value}))
    assert name in str(caught.value) and str(model.parent) not in str(caught.value)


@pytest.mark.parametrize(
    "name, value",
    [
        *((name, value) for value in (..., 0, -1, 1.5, "8", True) for name in ("vocab_size", "num_hidden_layers")),
        *((name, ...) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "model_type")),
        ("max_position_embeddings", ...),
        ("rms_norm_eps", ...),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 8),
        ("head_dim", 7),
        ("tie_word_embeddings", "no"),
        ("eos_token_id", 96),
        ("eos_token_id", [1, "x"]),
        ("bos_token_id", -1),
        ("sliding_window", "long"),
        ("rope_parameters", "llama3"),
        ("rope_parameters", {"rope_theta": 0}),
        ("rope_parameters", {"rope_theta": float("inf")}),
        ("rope_parameters", {"rope_type": "linear"}),
        ("rope_parameters", {"rope_type": "linear", "factor": -2}),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),  # and rope_parameters says otherwise
    ],
)
def test_a_missing_or_malformed_field_is_named(model: Path, name: str, value: Any):
    with pytest.raises(InvalidArgument) as caught:
        read_spec(change(model, **{name: value}))
    assert f"config.json: {name}" in str(caught.value) and str(model.parent) not in str(caught.value)


def test_two_original_contexts_that_differ_are_refused(model: Path):
    """transformers 5 takes the one beside the settings of RoPE, and transformers 4 the one inside."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    change(model, rope_parameters={**llama3, "original_max_position_embeddings": 64})
    assert read_spec(change(model, original_max_position_embeddings=64)).rope_scaling == LLAMA3
    with pytest.raises(InvalidArgument, match="original_max_position_embeddings = 16: .* 64 of .*rope_parameters"):
        read_spec(change(model, original_max_position_embeddings=16))


def test_what_the_generation_config_sets_for_requests_is_told_in_one_line(model: Path, caplog):
    neutral = {"temperature": 1.0, "top_p": 1, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "do_sample": True}
    _make.write_json(model / "generation_config.json", {**neutral, "bad_words_ids": [], "eos_token_id": 2})
    warn_of_generation(model)
    assert not caplog.records
    told = {"temperature": 0, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.5, "suppress_tokens": [3] * 99}
    _make.write_json(model / "generation_config.json", {**neutral, **told, "forced_bos_token_id": 4})
    warn_of_generation(model)
    (record,) = caplog.records
    for said in ("temperature = 0", "top_p = 0.9", "top_k = 50", "repetition_penalty = 1.5", "forced_bos_token_id = 4"):
        assert said in record.getMessage()
    assert "suppress_tokens = [3, " in record.getMessage() and len(record.getMessage()) < 400
    (model / "generation_config.json").unlink()
    warn_of_generation(model)
    assert len(caplog.records) == 1


def test_a_width_that_the_heads_do_not_divide_needs_head_dim(model: Path):
    assert read_spec(change(model, hidden_size=30)).head_dim == 8
    with pytest.raises(InvalidArgument, match="hidden_size = 30.*num_attention_heads = 4"):
        read_spec(change(model, head_dim=...))


def test_files_that_are_missing_or_not_json(model: Path):
    with pytest.raises(NotFound, match="absent"):
        read_spec(model.parent / "absent")
    (model / "generation_config.json").write_text("{")
    with pytest.raises(DataLoss, match=r"generation_config\.json"):
        read_spec(model)
    for text in ("", "{", "[1]", "\x00"):
        (model / "config.json").write_text(text)
        with pytest.raises(DataLoss, match=r"config\.json"):
            read_spec(model)
    (model / "config.json").unlink()
    with pytest.raises(NotFound, match=r"'tiny': config\.json"):
        read_spec(model)
