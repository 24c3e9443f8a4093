"""The PEFT reader: what it reads is what PEFT computes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jlora.adapters.peft import CONFIG, WEIGHTS
from jlora.errors import InvalidArgument
from tests import _make
from tests.adapters._peft import SPEC, edit_tensors, key, read, refused

ALL = tuple(_make.MODULES)

# What PEFT 0.4 (2023) and 0.21 write for a LoRA with default options.
PEFT_0_4 = {
    "auto_mapping": None,
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
PEFT_0_21 = {
    **PEFT_0_4,
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "kasa_config": None,
    "layer_replication": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "monteclora_config": None,
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


@pytest.mark.parametrize("config", [PEFT_0_4, PEFT_0_21], ids=["peft-0.4", "peft-0.21"])
def test_default_configurations_of_old_and_new_peft_load(tmp_path: Path, config: dict[str, Any]):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    (path / CONFIG).write_text(json.dumps(config))
    adapter = read(path)
    assert adapter.target_modules == ("q", "v")
    assert adapter.rank == 4
    assert adapter.ranks["layers.2.self_attn.v_proj"] == 4
    assert len(adapter.weights) == 6


@pytest.mark.parametrize(
    "r, config, rank, scale",
    [
        (4, {"lora_alpha": 8}, 4, 2.0),
        (4, {"lora_alpha": 0.5}, 4, 0.125),
        (4, {"lora_alpha": 8, "use_rslora": True}, 4, 8 / math.sqrt(4)),
        (4, {"lora_alpha": 8, "rank_pattern": {"q_proj": 2}}, 2, 4.0),
        (4, {"lora_alpha": 8, "alpha_pattern": {"q_proj": 2}}, 4, 0.5),
        (4, {"lora_alpha": 8, "alpha_pattern": {"q_proj": 2}, "use_rslora": True}, 4, 1.0),
        (4, {"lora_alpha": 8, "rank_pattern": {"proj": 2}}, 4, 2.0),  # not the module's whole last part
        (4, {"lora_alpha": 8, "rank_pattern": {".*proj": 2, "q_proj": 1}}, 2, 4.0),  # the first in the file wins
        (4, {"lora_alpha": 8, "rank_pattern": {r"^model\.layers\.1\.self_attn\.q_proj": 1}}, 1, 8.0),
        (4, {"lora_alpha": 8, "rank_pattern": {r"layers\.[02]\..*q_proj": 1}}, 4, 2.0),
    ],
)
def test_rank_and_scale_of_a_module(tmp_path: Path, r: int, config: dict[str, Any], rank: int, scale: float):
    path = _make.make_adapter(tmp_path / "a", SPEC, r=r, **config)
    tensors = load_file(path / WEIGHTS)
    adapter = read(path)
    a, b = adapter.weights[1, "q"]
    assert adapter.ranks["layers.1.self_attn.q_proj"] == rank == len(a)
    np.testing.assert_array_equal(a, tensors[key(1, "q", "A")])
    np.testing.assert_allclose(b, tensors[key(1, "q", "B")].T * scale, rtol=1e-6)
    assert a.dtype == b.dtype == np.float32
    assert a.flags.c_contiguous and b.flags.c_contiguous


@pytest.mark.parametrize(
    "config, layers, targets",
    [
        ({"target_modules": "all-linear"}, (0, 1, 2), ALL),
        ({"target_modules": "ALL-LINEAR"}, (0, 1, 2), ALL),
        ({"target_modules": ["q_proj", "mlp.up_proj"]}, (0, 1, 2), ("q", "up")),
        ({"target_modules": ["model.layers.1.self_attn.k_proj"]}, (1,), ("k",)),
        ({"target_modules": ["down_proj", "of_another_model"]}, (0, 1, 2), ("down",)),
        ({"target_modules": r".*\.(q|v)_proj"}, (0, 1, 2), ("q", "v")),
        ({"target_modules": r"model\.layers\.[12]\.mlp\.gate_proj"}, (1, 2), ("gate",)),
        ({"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj", "q_proj"]}, (0, 1, 2),
         ("k", "v", "o", "gate", "down")),
        ({"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*k_proj"}, (0, 1, 2), ("q",)),
        ({"target_modules": ["o_proj"], "layers_to_transform": [0, 2]}, (0, 2), ("o",)),
        ({"target_modules": ["o_proj"], "layers_to_transform": 1}, (1,), ("o",)),
        ({"target_modules": ["o_proj"], "layers_to_transform": []}, (0, 1, 2), ("o",)),
        ({"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, (1,), ("o",)),
        ({"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, (1,), ("o",)),
    ],
)  # fmt: skip
def test_target_modules_choose_layers_and_projections(
    tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...], targets: tuple[str, ...]
):
    path = _make.make_adapter(tmp_path / "a", SPEC, targets=targets, layers_to_transform=list(layers))
    _make.edit_json(path / CONFIG, **{"layers_to_transform": None, **config})
    adapter = read(path)
    assert set(adapter.weights) == {(layer, target) for layer in layers for target in targets}
    assert adapter.target_modules == tuple(p for p in ALL if p in targets)


def test_a_layer_that_the_pattern_does_not_find_is_no_target(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC, layers_to_transform=[1], layers_pattern="blocks")
    refused(path, InvalidArgument, "target_modules", "matches no projection")


def test_fan_in_fan_out_changes_nothing_as_in_peft_on_linear_layers(tmp_path: Path):
    on = read(_make.make_adapter(tmp_path / "on", SPEC, fan_in_fan_out=True))
    off = read(_make.make_adapter(tmp_path / "off", SPEC, fan_in_fan_out=False))
    np.testing.assert_array_equal(on.weights[0, "q"][1], off.weights[0, "q"][1])


def test_alora_invocation_tokens_are_reported(tmp_path: Path):
    assert read(_make.make_adapter(tmp_path / "a", SPEC, alora_invocation_tokens=[5, 95])).alora_invocation_tokens == (
        5,
        95,
    )
    assert read(_make.make_adapter(tmp_path / "b", SPEC)).alora_invocation_tokens == ()


@pytest.mark.parametrize("initialisation", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_load(tmp_path: Path, initialisation: Any):
    assert read(_make.make_adapter(tmp_path / "a", SPEC, init_lora_weights=initialisation)).rank == 4


def test_an_adapter_name_inside_the_tensor_names_is_accepted(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    plain = read(path)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)

    named = read(edit_tensors(path, rename))
    np.testing.assert_array_equal(named.weights[2, "v"][0], plain.weights[2, "v"][0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_dtypes_become_float32(tmp_path: Path, dtype: Any):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    original = load_file(path / WEIGHTS)[key(0, "q")]
    edit_tensors(path, lambda tensors: tensors.update({k: v.astype(dtype) for k, v in tensors.items()}))
    a, _ = read(path).weights[0, "q"]
    assert a.dtype == np.float32
    np.testing.assert_array_equal(a, original.astype(dtype).astype(np.float32))


def test_digest_is_of_the_content_and_nothing_else(tmp_path: Path):
    first = read(_make.make_adapter(tmp_path / "a", SPEC, seed=1))
    again = read(_make.make_adapter(tmp_path / "renamed", SPEC, seed=1))
    other_weights = read(_make.make_adapter(tmp_path / "b", SPEC, seed=2))
    other_config = read(_make.make_adapter(tmp_path / "c", SPEC, seed=1, lora_alpha=9))
    assert first.digest == again.digest
    assert len({first.digest, other_weights.digest, other_config.digest}) == 3
    assert len(first.digest) == 64


@pytest.mark.parametrize(
    "base, served, warns",
    [
        ("meta/llama", ["llama"], False),
        ("/train/ckpt/Llama/", ["other", "org/llama"], False),
        ("meta/llama", ["mistral"], True),
        ("meta/llama", [], False),
        (None, ["mistral"], False),
    ],
)
def test_an_adapter_of_another_base_is_warned_about(tmp_path: Path, caplog, base: Any, served: list[str], warns: bool):
    path = _make.make_adapter(tmp_path / "a", SPEC, base_model_name_or_path=base)
    with caplog.at_level(logging.WARNING, logger="jlora"):
        read(path, base_names=served)
    assert bool(caplog.records) == warns
    assert not warns or ("llama" in caplog.text and "mistral" in caplog.text and "/train" not in caplog.text)


PEFT_CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "rank_pattern": {"target_modules": ["q_proj", "up_proj"],
                     "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7}},
    "alpha_pattern": {"target_modules": ["q_proj", "o_proj"],
                      "alpha_pattern": {r"^model\.layers\.0\..*": 3, "o_proj": 5}},
    "both_patterns_rslora": {"target_modules": "all-linear", "rank_pattern": {"k_proj": 3},
                             "alpha_pattern": {"k_proj": 1, "gate_proj": 9}, "use_rslora": True},
    "all_linear": {"target_modules": "all-linear"},
    "one_projection": {"target_modules": ["gate_proj"]},
    "layers_to_transform": {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0, 2]},
    "one_layer_by_pattern": {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "fan_in_fan_out": {"target_modules": ["q_proj", "up_proj"], "fan_in_fan_out": True},
    "regex": {"target_modules": r".*layers\.[01]\.(self_attn|mlp)\.(q|up)_proj"},
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["v_proj", "model.layers.1.mlp.up_proj"]},
    "exclude_regex": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.0\..*"},
    "alora": {"target_modules": ["q_proj", "k_proj", "v_proj"], "alora_invocation_tokens": [3, 4]},
}  # fmt: skip


@pytest.fixture(scope="module")
def hf_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft", reason="compares with peft, which needs PyTorch")
    directory = tmp_path_factory.mktemp("base") / "tiny"
    _make.make_model(directory, layers=SPEC.layers)
    return directory


@pytest.mark.filterwarnings("ignore")  # PEFT's own: fan_in_fan_out on a Linear, and deprecations inside it
@pytest.mark.parametrize("case", PEFT_CASES)
def test_weights_equal_the_delta_that_peft_computes(tmp_path: Path, hf_base: Path, case: str):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(hf_base)

    torch.manual_seed(0)  # init_lora_weights=False: neither A nor B starts at zero
    config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False, **PEFT_CASES[case])
    get_peft_model(base(), config).save_pretrained(tmp_path / "a")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "a")
    theirs = {
        name.removeprefix("base_model.model.model."): module.get_delta_weight("default").detach().numpy()
        for name, module in loaded.named_modules()
        if hasattr(module, "lora_A") and "default" in module.lora_A
    }
    adapter = read(tmp_path / "a", base_names=["tiny"])
    ours = {f"layers.{layer}.{_make.MODULES[p]}": b.T @ a for (layer, p), (a, b) in adapter.weights.items()}
    assert ours.keys() == theirs.keys() == adapter.ranks.keys()
    for module, delta in theirs.items():
        np.testing.assert_allclose(ours[module], delta, rtol=1e-5, atol=1e-6)
    assert adapter.alora_invocation_tokens == tuple(PEFT_CASES[case].get("alora_invocation_tokens", ()))
