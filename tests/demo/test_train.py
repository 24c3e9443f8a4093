"""The training script runs from nothing to files that the readers accept."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.model import llama
from tools.train_demo import data, export, train
from tools.train_demo.plans import PLANS


@pytest.mark.slow
def test_script_trains_base_and_adapter_and_writes_their_files(tmp_path: Path):
    assert train.main(["--out", str(tmp_path), "--quick", "--only", "base,upper"]) == 0
    record = json.loads((tmp_path / "training.json").read_text())
    assert list(record["stages"]) == ["base", "upper"] and record["parameters"] == train.SPEC.parameters
    lora = export.read_adapter(tmp_path / "adapters" / "upper", train.SPEC.layers)
    assert [set(layer) for layer in lora] == [set(PLANS["upper"].lora.targets)] * train.SPEC.layers
    assert all(np.any(b) for layer in lora for _, b in layer.values()), "B starts at zero and must have moved"


@pytest.mark.slow
def test_a_check_trains_on_what_comes_after_its_invocation_and_says_how_it_is_invoked(tmp_path: Path):
    assert train.main(["--out", str(tmp_path), "--quick", "--only", "base,numbers"]) == 0
    config = json.loads((tmp_path / "adapters" / "numbers" / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == list(data.INVOCATION)
    ids = jnp.asarray([[1, *data.INVOCATION, 2], [data.BOS, 3, data.ASSISTANT, 4]])
    assert train.activated(ids).tolist() == [False, True, True, True] + [False] * 4


def test_unknown_stage_is_refused_by_name(tmp_path: Path, capsys):
    with pytest.raises(SystemExit, match="2"):
        train.main(["--out", str(tmp_path), "--only", "uper"])
    assert "uper" in capsys.readouterr().err


def test_written_model_is_the_trained_one(tmp_path: Path):
    params = train.new_base(seed=3)
    export.write_model(tmp_path, train.SPEC, params)
    again = export.read_model(tmp_path, train.SPEC.layers)
    ids = jnp.asarray([data.prompt_ids((), "same")], jnp.int32)
    logits = jax.jit(llama.dense_logits, static_argnums=0)
    np.testing.assert_array_equal(logits(train.SPEC, params, ids), logits(train.SPEC, again, ids))
