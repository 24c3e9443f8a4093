"""What transformers and PEFT answer: random checkpoints, adapters and the right logprobs.

    python -m tests.oracle.make_golden --out tests/oracle/golden --seed 0

Every model is written by transformers' `save_pretrained` and every adapter by PEFT's, then all
are loaded back from those files in float32, and what they answer is written next to them. The
files in `golden/` come from this script; where PyTorch is installed the oracle test runs it
again with another seed. Needs torch, transformers and peft; jlora is never imported.

Layout: OUT/CASE/model, OUT/CASE/adapters/NAME, OUT/CASE/answers.json (see `Answer`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"  # read on import: PEFT would look for the base model's card

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

OUTPUT_TOKENS = 12
TOP = 3
# A prompt is drawn again until no greedy choice is closer than this: a tie is nobody's error.
MARGIN = 5e-3


@dataclass(frozen=True)
class Case:
    """One base model and its adapters; `config` goes to transformers, `adapters` to LoraConfig.

    A key that starts with `_` is written into `adapter_config.json` after PEFT saved it.

    Attributes:
        prompts: lengths of random prompts, of the base and every adapter.
        invoked_at: for each length, where activated LoRAs are invoked; -1 is at the prompt's end. With it
            all answer the same text, but for the invocations in it.
    """

    config: Mapping[str, Any]
    adapters: Mapping[str, Mapping[str, Any]]
    prompts: Sequence[int] = (1, 19, 40)
    invoked_at: Sequence[Sequence[int]] = ()
    architecture: type = LlamaConfig


@dataclass(frozen=True)
class Answer:
    """What one request must return.

    Attributes:
        adapter: None is the base model.
        prompt: token ids.
        prompt_logprobs: of prompt[1:], given what is before.
        tokens, logprobs: the greedy continuation.
        top: for each output token, the TOP most likely (id, logprob).
    """

    adapter: str | None
    prompt: list[int]
    prompt_logprobs: list[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

QUERY_VALUE = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}

CASES: Mapping[str, Case] = {
    # Grouped-query attention with every kind of adapter: the case that all server settings run.
    "gqa": Case(
        config={},
        adapters={
            "rslora": {"r": 6, "lora_alpha": 9, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
            "patterns": {
                "r": 4,
                "lora_alpha": 8,
                "target_modules": ["q_proj", "v_proj", "o_proj"],
                "rank_pattern": {"layers.0.self_attn.q_proj": 3, "v_proj": 7},
                "alpha_pattern": {r"model\.layers\.1\..*": 3, "o_proj": 20},
            },
            "linear": {"r": 4, "lora_alpha": 4, "target_modules": "all-linear"},
            "single": {"r": 5, "lora_alpha": 10, "target_modules": ["down_proj"]},
            "layers": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]},
            "fan": {"r": 3, "lora_alpha": 6, "target_modules": ["up_proj", "o_proj"], "_fan_in_fan_out": True},
            "regex": {
                "r": 1,
                "lora_alpha": 2,
                "target_modules": r".*\.layers\.0\.(mlp\.(gate|up)|self_attn\.k)_proj",
                "exclude_modules": [r"gate_proj"],
            },
            "wide": {"r": 16, "lora_alpha": 16, "target_modules": ["k_proj", "gate_proj"]},
        },
    ),
    "mha": Case(
        config={"num_key_value_heads": 4},
        adapters={
            "linear": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
            "rslora": {**QUERY_VALUE, "use_rslora": True},
        },
    ),
    "tied_llama3": Case(
        config={
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        adapters={"linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}},
        prompts=(3, 100),
    ),
    "odd_vocab_mqa": Case(
        config={
            "vocab_size": 101,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        adapters={"patterns": {**QUERY_VALUE, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 4}}},
    ),
    "linear_rope": Case(
        config={"head_dim": 12, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        adapters={"single": {"r": 8, "lora_alpha": 8, "target_modules": ["o_proj"]}},
        prompts=(1, 70),
    ),
    "mistral": Case(
        config={"sliding_window": None, "num_key_value_heads": 2, "head_dim": 8},
        adapters={"query_value": QUERY_VALUE},
        prompts=(5, 30),
        architecture=MistralConfig,
    ),
    # Activated LoRAs beside a plain one. The blocks of the tests have 8 tokens: invocations at the start,
    # at the end, on a block's border, off it, over it, repeated, and so close that they overlap or touch.
    "alora": Case(
        config={},
        adapters={
            "check": {**QUERY_VALUE, "alora_invocation_tokens": [90, 91, 92]},
            "twice": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "alora_invocation_tokens": [88, 88]},
            "one": {
                "r": 6,
                "lora_alpha": 9,
                "use_rslora": True,
                "target_modules": ["o_proj", "down_proj"],
                "alora_invocation_tokens": [95],
            },
            "plain": QUERY_VALUE,
        },
        prompts=(3, 20, 43, 40, 45, 46, 52, 45, 60),
        invoked_at=((0,), (0,), (-1,), (16,), (13,), (22,), (5, 30), (24, 25), (8, 40, 43)),
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Writes every case (or those named) under --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name in args.cases:
        write_case(args.out / name, CASES[name], seed=1000 * args.seed + list(CASES).index(name))
        print(f"{args.out / name}")


def write_case(directory: Path, case: Case, seed: int) -> None:
    """Model, adapters and answers of one case."""
    torch.manual_seed(seed)
    write_model(directory / "model", case)
    for name, settings in case.adapters.items():
        write_adapter(directory / "adapters" / name, directory / "model", settings)
    answers = compute_answers(directory, case, np.random.default_rng(seed))
    text = ",\n".join(json.dumps(dataclasses.asdict(a)) for a in answers)
    (directory / "answers.json").write_text(f"[\n{text}\n]\n")


def write_model(directory: Path, case: Case) -> None:
    """Weights large enough that the distributions are far from uniform."""
    model = AutoModelForCausalLM.from_config(case.architecture(**{**BASE, **case.config}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.2 if "norm" in name else 0.7 if "embed" in name or "lm_head" in name else 0.25
            weight.normal_(1.0 if "norm" in name else 0.0, scale)
    model.to(torch.float32).save_pretrained(directory)


def write_adapter(directory: Path, model_path: Path, settings: Mapping[str, Any]) -> None:
    """A LoRA with random A and B, loud enough to change what is greedy."""
    after = {key[1:]: value for key, value in settings.items() if key.startswith("_")}
    config = LoraConfig(task_type="CAUSAL_LM", **{k: v for k, v in settings.items() if not k.startswith("_")})
    model = get_peft_model(load_base(model_path), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    path = directory / "adapter_config.json"
    after["base_model_name_or_path"] = model_path.parent.name  # not a path of the machine it was made on
    path.write_text(json.dumps({**json.loads(path.read_text()), **after}, indent=2, sort_keys=True))
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's model card template


def load_base(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def compute_answers(directory: Path, case: Case, rng: np.random.Generator) -> list[Answer]:
    """Every prompt length with the base and each adapter, from the files just written."""
    first, *rest = case.adapters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it ignores fan_in_fan_out on nn.Linear
        model = PeftModel.from_pretrained(load_base(directory / "model"), directory / "adapters" / first, first).eval()
        for name in rest:
            model.load_adapter(directory / "adapters" / name, name)
    names = (None, *case.adapters)
    if case.invoked_at:
        texts = zip(case.prompts, case.invoked_at, strict=True)
        return [answer for length, places in texts for answer in clear_answers(model, names, rng, length, places)]
    return [a for name in names for length in case.prompts for a in clear_answers(model, (name,), rng, length)]


def clear_answers(
    model: PeftModel,
    adapters: Sequence[str | None],
    rng: np.random.Generator,
    length: int,
    places: Sequence[int] = (),
) -> list[Answer]:
    """All adapters' answers to one random text of this length, drawn again while any choice is a near tie."""
    for _ in range(100):
        text = rng.integers(3, model.config.vocab_size, length).tolist()
        answers = []
        for adapter in adapters:
            with using(model, adapter):
                answer, margin = greedy(model, adapter, invoked(text, invocation(model, adapter), places))
            if margin <= MARGIN:
                break
            answers.append(answer)
        else:
            return answers
    raise RuntimeError(f"no prompt of {length} tokens without a near tie for {adapters}: weights too small?")


@contextlib.contextmanager
def using(model: PeftModel, adapter: str | None) -> Iterator[None]:
    """The model with this adapter on; None is the base."""
    with model.disable_adapter() if adapter is None else contextlib.nullcontext():
        if adapter is not None:
            model.set_adapter(adapter)
        yield


def invocation(model: PeftModel, adapter: str | None) -> list[int]:
    """The sequence that switches an activated LoRA on; empty for others."""
    return (model.peft_config[adapter].alora_invocation_tokens or []) if adapter is not None else []


def invoked(text: list[int], tokens: list[int], places: Sequence[int]) -> list[int]:
    """The text with the invocation written over it at these places."""
    for at in places if tokens else ():
        at = at if at >= 0 else len(text) - len(tokens)
        text = [*text[:at], *tokens, *text[at + len(tokens) :]]
    return text


@torch.no_grad()
def greedy(model: PeftModel, adapter: str | None, prompt: list[int]) -> tuple[Answer, float]:
    """Greedy decoding without a cache, and its smallest gap between first and second choice.

    PEFT finds an activated LoRA's invocation; its offset counts from the end, so it grows with the output.
    """
    answer, margin = decoded(model, adapter, prompt)
    if invocation(model, adapter):  # its own generate, with a cache, must say the same
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        told = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=OUTPUT_TOKENS, do_sample=False)
        told = told[0, len(prompt) :].tolist()  # it may have stopped at the end token
        if margin > MARGIN and told != answer.tokens[: len(told)]:
            raise RuntimeError(f"PEFT's generate and its forward differ for {adapter!r}: {told}, {answer.tokens}")
    return answer, margin


def decoded(model: PeftModel, adapter: str | None, prompt: list[int]) -> tuple[Answer, float]:
    """`greedy` by one forward pass per token over all that is there."""
    ids = list(prompt)
    (offset,) = calculate_alora_offsets(model.peft_config, adapter or "__base__", torch.tensor([prompt]))
    margin = float("inf")
    answer: Answer | None = None
    for _ in range(OUTPUT_TOKENS):
        offsets = {} if offset is None else {"alora_offsets": [offset + len(ids) - len(prompt)]}
        scores = torch.log_softmax(model(torch.tensor([ids]), **offsets).logits[0].float(), -1)
        if answer is None:
            chosen = scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)]
            answer = Answer(adapter, prompt, chosen.tolist())
        best = scores[-1].topk(TOP)
        margin = min(margin, float(best.values[0] - best.values[1]))
        answer.tokens.append(int(best.indices[0]))
        answer.logprobs.append(float(best.values[0]))
        answer.top.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        ids.append(answer.tokens[-1])
    assert answer is not None
    return answer, margin


if __name__ == "__main__":
    main()
