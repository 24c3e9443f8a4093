"""The one forward pass: against transformers where PyTorch is installed, and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.model import llama, sharding
from jlora.model.checkpoint import load_params, read_spec
from jlora.model.spec import ModelSpec, RopeScaling
from tests import _make

LLAMA3 = RopeScaling("llama3", 4.0, 1.0, 4.0, original_max_len=32)

# Name -> (config style, what differs from the tiny model).
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "gqa": (5, {}),
    "mha": (4, {"kv_heads": 4, "norm_eps": 0.05}),
    "one_wide_kv_head": (5, {"kv_heads": 1, "head_dim": 18}),
    "tied_odd_vocabulary": (4, {"tied": True, "vocab": 101}),
    "llama3": (5, {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama3_old_style": (4, {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "linear": (5, {"rope_scaling": RopeScaling("linear", 2.5)}),
    "linear_old_style": (4, {"rope_scaling": RopeScaling("linear", 2.5)}),
}

dense_logits = jax.jit(llama.dense_logits, static_argnums=0)


def load(directory: Path, stacked: bool = False, dtype: str = "auto") -> tuple[ModelSpec, llama.Params]:
    spec = read_spec(directory, dtype)
    shardings = sharding.shardings(spec, sharding.make_mesh(1))
    return spec, load_params(directory, spec, shardings, stacked=stacked, progress=False)


def tokens(spec: ModelSpec, rows: int = 2, length: int = 48) -> np.ndarray:
    return np.random.default_rng(7).integers(0, spec.vocab, (rows, length), dtype=np.int32)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers(tmp_path: Path, shape: str):
    torch = pytest.importorskip("torch", reason="compares with transformers, which needs PyTorch")
    from transformers import LlamaForCausalLM

    style, changes = SHAPES[shape]
    _make.make_model(tmp_path / "m", style=style, **changes)
    spec, params = load(tmp_path / "m")
    ids = tokens(spec)
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(tmp_path / "m")(torch.from_numpy(ids).long()).logits.numpy()
    ours = dense_logits(spec, params, jnp.asarray(ids))
    np.testing.assert_allclose(ours, theirs, atol=5e-5)
    np.testing.assert_array_equal(jnp.argmax(ours, -1), theirs.argmax(-1))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_checkpoint_written_by_transformers_loads(tmp_path: Path, family: str):
    torch = pytest.importorskip("torch", reason="compares with transformers, which needs PyTorch")
    import transformers

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=None))
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    spec, params = load(tmp_path / "m")
    ids = tokens(spec)
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids).long()).logits.numpy()
    np.testing.assert_allclose(dense_logits(spec, params, jnp.asarray(ids)), theirs, atol=5e-5)


def test_scanned_layers_equal_unrolled_layers(tiny_model: Path):
    spec, listed = load(tiny_model)
    _, stacked = load(tiny_model, stacked=True)
    ids = jnp.asarray(tokens(spec))
    unrolled, scanned = (dense_logits(spec, p, ids) for p in (listed, stacked))
    np.testing.assert_allclose(unrolled, scanned, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, llama.stack_layers(listed), stacked)


def test_the_nnx_module_and_the_plain_pytree_are_one_model():
    spec = _make.tiny_spec(layers=1)
    model = llama.Llama(spec, nnx.Rngs(3))
    ids = jnp.asarray(tokens(spec))
    params = llama.plain(nnx.split(model)[1])
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, ids), dense_logits(spec, params, ids), atol=1e-5)
    shapes, axes = llama.abstract(spec)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    assert sum(x.size for x in jax.tree.leaves(params)) == spec.parameters
    ranks = jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple))
    assert ranks == jax.tree.map(lambda x: x.ndim, params)


def test_a_later_token_never_changes_an_earlier_logit(tiny_model: Path):
    spec, params = load(tiny_model)
    ids = tokens(spec, rows=1)
    changed = ids.copy()
    changed[:, 30:] = (changed[:, 30:] + 1) % spec.vocab
    a, b = (np.asarray(dense_logits(spec, params, jnp.asarray(x))) for x in (ids, changed))
    np.testing.assert_allclose(a[:, :30], b[:, :30], atol=1e-6)
    assert np.abs(a[:, 30:] - b[:, 30:]).max() > 0.1


def test_bfloat16_stays_bfloat16_and_close_to_float32(tiny_model: Path):
    spec, exact = load(tiny_model)
    half_spec, half = load(tiny_model, dtype="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(half)} == {"bfloat16"}
    ids = jnp.asarray(tokens(spec))
    a, b = dense_logits(spec, exact, ids), dense_logits(half_spec, half, ids)
    assert b.dtype == jnp.float32
    assert float(jnp.abs(a - b).max()) < 0.15 * float(jnp.abs(a).max())


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("linear", 4.0), LLAMA3, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)]
)
def test_rotation_speeds_equal_those_of_transformers(scaling: RopeScaling | None):
    pytest.importorskip("torch", reason="compares with transformers, which needs PyTorch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = _make.tiny_spec(head_dim=64, rope_theta=500000.0, rope_scaling=scaling, max_len=256)
    config = LlamaConfig(**{k: v for k, v in _make.hf_config(spec).items() if k not in ("architectures", "model_type")})
    theirs = LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(llama.inverse_frequencies(spec), theirs, rtol=1e-6)


def test_llama3_scaling_keeps_fast_rotations_and_slows_slow_ones():
    plain = _make.tiny_spec(head_dim=64, rope_theta=500000.0)
    scaled = _make.tiny_spec(head_dim=64, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 8.0))
    before, after = llama.inverse_frequencies(plain), llama.inverse_frequencies(scaled)
    turns = 8192 * before / (2 * np.pi)  # over the original context
    np.testing.assert_array_equal(after[turns > 4], before[turns > 4])
    np.testing.assert_allclose(after[turns < 1], before[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any() and np.all(after[between] < before[between]) and np.all(after[between] > before[between] / 8)
    linear = llama.inverse_frequencies(
        _make.tiny_spec(head_dim=64, rope_theta=500000.0, rope_scaling=RopeScaling("linear", 2.0))
    )
    np.testing.assert_allclose(linear, before / 2, rtol=1e-6)
