"""The models that people serve: what their `config.json` says on the hub, read as shapes, sizes and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jlora.errors import InvalidArgument
from jlora.layout import PoolLayout, smallest_block_tokens
from jlora.model.checkpoint import read_spec
from jlora.model.spec import ModelSpec, RopeScaling
from tests import _make

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "pretraining_tp": 1, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_2_7B = {
    **LLAMA, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rope_scaling": None, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_8B = {
    **LLAMA, "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128001, "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA_3_1_8B = {**LLAMA_3_8B, "max_position_embeddings": 131072, "mlp_bias": False, "rope_scaling": ROPE}
LLAMA_3_2_1B = {
    **LLAMA_3_1_8B, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": {**ROPE, "factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip
TINYLLAMA = {
    **LLAMA, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2048,
    "intermediate_size": 5632, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 22,
    "num_key_value_heads": 4, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
MISTRAL_V01 = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
MISTRAL_V03 = {**MISTRAL_V01, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}


class Known(NamedTuple):
    """What a model is known for: weights, head width, bytes of KV per token in bfloat16, context, RoPE, ends."""

    parameters: int
    head_dim: int
    kv_bytes: int
    max_len: int
    theta: float
    eos_id: int
    rope: RopeScaling | None = None


def published(directory: Path, config: dict[str, Any], max_model_len: int = 0) -> ModelSpec:
    _make.write_json(directory / "config.json", config)
    return read_spec(directory, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("config", "known"),
    [
        pytest.param(LLAMA_2_7B, Known(6_738_415_616, 128, 524_288, 4096, 1e4, 2), id="Llama-2-7B"),
        pytest.param(LLAMA_3_8B, Known(8_030_261_248, 128, 131_072, 8192, 5e5, 128001), id="Llama-3-8B"),
        pytest.param(
            LLAMA_3_1_8B,
            Known(8_030_261_248, 128, 131_072, 131_072, 5e5, 128001, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
            id="Llama-3.1-8B",
        ),
        pytest.param(
            LLAMA_3_2_1B,
            Known(1_235_814_400, 64, 32_768, 131_072, 5e5, 128001, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
            id="Llama-3.2-1B",
        ),
        pytest.param(TINYLLAMA, Known(1_100_048_384, 64, 22_528, 2048, 1e4, 2), id="TinyLlama-1.1B"),
        pytest.param(MISTRAL_V03, Known(7_248_023_552, 128, 131_072, 32_768, 1e6, 2), id="Mistral-7B-v0.3"),
    ],
)
def test_a_published_config_gives_the_model_that_is_known(tmp_path: Path, config: dict[str, Any], known: Known):
    spec = published(tmp_path, config)
    layout = PoolLayout.of(spec, 1, smallest_block_tokens(spec, 16))
    kv_bytes = layout.block_bytes // layout.block_tokens
    got = (spec.parameters, spec.head_dim, kv_bytes, spec.max_len, spec.rope_theta, *spec.eos_ids, spec.rope_scaling)
    assert got == known
    assert (spec.dtype, spec.norm_eps, layout.block_tokens) == ("bfloat16", 1e-5, 16)
    assert spec.tied == config["tie_word_embeddings"] and spec.bos_id == config["bos_token_id"]


def test_mistral_v01_is_refused_beyond_its_window_and_served_within(tmp_path: Path):
    with pytest.raises(
        InvalidArgument, match="sliding_window = 4096: .*context of 32768; set model.max_model_len = 4096"
    ):
        published(tmp_path, MISTRAL_V01)
    spec = published(tmp_path, MISTRAL_V01, max_model_len=4096)
    assert (spec.parameters, spec.max_len, spec.rope_theta) == (7_241_732_096, 4096, 1e4)
