"""The embedded files are small, complete, readable by everyone's rules, and made by this script."""

from __future__ import annotations

import json

import jinja2.sandbox
import numpy as np
import pytest
from tokenizers import Tokenizer

from jlora.adapters.peft import read_peft
from jlora.demo import assets, pipeline
from jlora.demo.tasks import CHECKS
from jlora.model.checkpoint import read_spec
from jlora.model.spec import ModelSpec
from tools.train_demo import data, export
from tools.train_demo.plans import PLANS
from tools.train_demo.train import BASE, SPEC

LIMIT = 8 * 1024 * 1024


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(assets.MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec(assets.MODEL)


def test_model_tokenizer_and_adapters_together_are_at_most_8_mb():
    assert sum(path.stat().st_size for path in assets.ASSETS.rglob("*") if path.is_file()) <= LIMIT


def test_config_describes_the_trained_shape(spec: ModelSpec):
    shape = ("vocab", "width", "mlp", "layers", "heads", "kv_heads", "head_dim", "max_len", "tied", "dtype", "eos_ids")
    assert {name: getattr(spec, name) for name in shape} == {name: getattr(SPEC, name) for name in shape}


@pytest.mark.parametrize("text", ["plain", "", " two  spaces\n\t", "déjà 東京 🙂", "\x00\x7f", "</s"])
def test_tokenizer_writes_every_byte_as_itself_and_a_plain_text_is_one_turn(tokenizer: Tokenizer, text: str):
    assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())
    ids = tokenizer.encode(text).ids
    assert ids == data.prompt_ids((), text)
    assert tokenizer.decode(ids) == text


def test_tokenizer_knows_every_token_of_the_vocabulary(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() == data.VOCAB == SPEC.vocab
    assert [tokenizer.token_to_id(text) for text in data.SPECIALS] == list(range(256, data.VOCAB))


def test_chat_template_writes_what_training_saw(tokenizer: Tokenizer):
    config = json.loads((assets.MODEL / "tokenizer_config.json").read_text())
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    turns = [("user", "hi"), ("assistant", "HI"), ("user", "more")]
    messages = [{"role": role, "content": content} for role, content in turns]
    told = template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    assert tokenizer.encode(told, add_special_tokens=False).ids == data.prompt_ids([(b"hi", "HI")], "more")


def test_chat_template_writes_a_check_s_invocation_after_the_base_s_conversation(tokenizer: Tokenizer):
    config = json.loads((assets.MODEL / "tokenizer_config.json").read_text())
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    messages = [{"role": m.role, "content": m.content} for m in pipeline.invocation_messages(["a", "b"], ["a", "b"])]
    told = template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    assert tokenizer.encode(told, add_special_tokens=False).ids == data.check_prompt(["a", "b"])


@pytest.mark.parametrize("name", PLANS)
def test_adapter_is_a_correct_peft_adapter_of_its_declared_shape(name: str, spec: ModelSpec, caplog):
    shape = PLANS[name].lora
    adapter = read_peft(assets.adapter_path(name), spec, max_rank=64, base_names=(spec.name,))
    assert not caplog.records, "the reader warned"
    assert set(adapter.target_modules) == set(shape.targets)
    for (layer, projection), (a, b) in adapter.weights.items():
        assert 0 <= layer < spec.layers
        assert len(a) == len(b) == shape.rank_of(projection)
    assert adapter.alora_invocation_tokens == (data.INVOCATION if name in CHECKS else ())


@pytest.mark.parametrize("name", PLANS)
def test_adapter_folds_the_scale_that_training_used(name: str, spec: ModelSpec):
    shape, trained = PLANS[name].lora, export.read_adapter(assets.adapter_path(name), spec.layers)
    adapter = read_peft(assets.adapter_path(name), spec, max_rank=64)
    projection = shape.targets[0]
    a, b = trained[0][projection]
    np.testing.assert_allclose(adapter.weights[0, projection][0], a, rtol=1e-6)
    np.testing.assert_allclose(adapter.weights[0, projection][1], b * shape.scale_of(projection), rtol=1e-6)


def test_training_record_says_how_the_files_were_made():
    record = json.loads((assets.ASSETS / "training.json").read_text())
    stages = record["stages"]
    assert list(stages) == ["base", *PLANS]
    assert stages["base"]["steps"] == BASE.steps
    assert {name: stages[name]["steps"] for name in PLANS} == {name: a.steps for name, a in PLANS.items()}
    assert all(stage["exact"] >= 0.95 for stage in stages.values())
    assert sum(stage["seconds"] for stage in stages.values()) < 3600
