"""Where an activated LoRA begins in a prompt: as PEFT counts it, and soon."""

from __future__ import annotations

import random
import time

import pytest

from jlora.adapters.invocation import last_occurrence


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
    assert last_occurrence(prompt, invocation) == at


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
        assert last_occurrence(prompt, invocation) == expected, (invocation, prompt)


LONG = 1 << 16
BAD = {  # what makes a search from the end, or one without memory, compare far more than it reads
    "all the same": ((5,) * LONG, (5,) * 63 + (6,)),
    "all the same, another first": ((5,) * LONG, (6,) + (5,) * 63),
    "all the same, another in the middle": ((5,) * LONG, (5,) * 2000 + (6,) + (5,) * 2000),
    "a period": ((5, 5, 6) * (LONG // 3), (5, 5, 6) * 300 + (5, 6)),
    "two in turn": ((5, 6) * (LONG // 2), (5, 6, 6)),
}


@pytest.mark.parametrize("prompt, invocation", BAD.values(), ids=BAD)
def test_no_prompt_of_64k_tokens_takes_long(prompt: tuple[int, ...], invocation: tuple[int, ...]):
    assert last_occurrence((*invocation, *prompt), invocation) == 0
    began = time.thread_time()
    assert last_occurrence(prompt, invocation) is None
    assert time.thread_time() - began < 0.05  # it takes 2 ms


def test_any_token_id_of_a_vocabulary_is_searched_for():
    ids = (0, 1, 255, 256, 0xD800, 0xDFFF, 0xFFFF, 0x10000, 0x10FFFF)
    for at, token in enumerate(ids):
        assert last_occurrence(ids, (token,)) == at
        assert last_occurrence((*ids, *ids), ids[at:]) == at + len(ids)
