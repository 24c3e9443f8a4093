"""Names, versions, and where an activated LoRA begins in a prompt: as PEFT counts it."""

from __future__ import annotations

import random

import pytest

from jlora.adapters.registry import AdapterRegistry, Record
from jlora.cache.tree import AdapterNode
from jlora.errors import AlreadyExists, InvalidArgument, NotFound


def record(name: str = "check", invocation: tuple[int, ...] = (), uid: int = 1) -> Record:
    return Record(name, "digest", {"layers.0.self_attn.q_proj": 2}, ("q",), invocation, ("q",), 64, node(uid), 0.1)


def node(uid: int) -> AdapterNode:
    return AdapterNode(uid, 1)


@pytest.mark.parametrize(
    ("invocation", "prompt", "at"),
    [
        ((7, 8), (7, 8, 1, 2), 0),
        ((7, 8), (1, 2, 7, 8), 2),  # nothing after it: it still acts, on itself and on what is generated
        ((7, 8), (7, 8, 1, 7, 8, 2), 3),  # the last one
        ((7, 8), (7, 8, 1, 7), 0),  # cut off at the end: no occurrence
        ((7, 7), (1, 7, 7, 7, 2), 2),  # overlapping ones
        ((7, 8, 7), (7, 8, 7, 8, 7), 2),
        ((7,), (7, 1, 7, 1), 2),
        ((7, 8), (7, 8), 0),
        ((7, 8), (8, 7), None),
        ((7, 8), (7,), None),
    ],
)
def test_the_last_occurrence_activates_from_its_first_token(
    invocation: tuple[int, ...], prompt: tuple[int, ...], at: int | None
):
    assert record(invocation=invocation).activation(prompt) == at


def test_activation_is_where_peft_puts_it():
    peft = pytest.importorskip("peft.tuners.lora.variants", reason="compares with peft, which needs PyTorch")
    import torch
    from peft import LoraConfig

    draw = random.Random(0)
    for _ in range(400):
        invocation = tuple(draw.randint(0, 1) for _ in range(draw.randint(1, 4)))
        prompt = tuple(draw.randint(0, 1) for _ in range(draw.randint(1, 14)))
        config = {"x": LoraConfig(alora_invocation_tokens=list(invocation), task_type="CAUSAL_LM")}
        (offset,) = peft.calculate_alora_offsets(config, "x", torch.tensor([prompt]))  # counted from the end
        expected = None if offset is None else len(prompt) - offset
        assert record(invocation=invocation).activation(prompt) == expected, (invocation, prompt)


def test_a_lora_needs_no_invocation():
    registry, plain = AdapterRegistry(), record()
    registry.add(plain)
    assert registry.resolve("check", (1, 2)) == (plain, None)


def test_a_prompt_without_the_invocation_is_refused_by_adapter_and_sequence_or_left_to_the_base():
    strict, lenient = AdapterRegistry(), AdapterRegistry("base")
    known = record(invocation=(70, 80))
    for registry in (strict, lenient):
        registry.add(known)
        assert registry.resolve("check", (1, 70, 80)) == (known, 1)
    with pytest.raises(InvalidArgument, match=r"'check'.*alora_invocation_tokens = \[70, 80\].*alora_missing"):
        strict.resolve("check", (70, 8, 80))
    assert lenient.resolve("check", (70, 8, 80)) == (None, None)


def test_unknown_names_and_names_in_use_are_said():
    registry = AdapterRegistry()
    registry.add(record("check"))
    with pytest.raises(NotFound, match="'chek'.*did you mean 'check'"):
        registry.resolve("chek", (1,))
    with pytest.raises(AlreadyExists, match="'check'"):
        registry.check_free("check")


def test_versions_stay_reachable_until_they_are_gone():
    registry = AdapterRegistry()
    old, new = record(uid=registry.new_uid()), record(uid=registry.new_uid())
    registry.add(old)
    registry.remove("check")
    registry.add(new)
    assert registry.get("check") is new and registry.by_uid(1) is old and registry.versions("check") == [1, 2]
    registry.purge({2: new.node})
    assert registry.versions("check") == [2]
