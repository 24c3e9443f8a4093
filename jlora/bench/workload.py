"""What the benchmarks run: a random Llama, its adapters and a list of jobs, from one seed.

Everything is written as files that both jlora and transformers + PEFT read, so that the two sides
have the same weights and prompts. Weights are representable in bfloat16: a run in bfloat16
and one in float32 use the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jlora.model.spec import ModelSpec

MODULES: Mapping[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
ADAPTED = ("q", "k", "v", "o")

# 124.7 million weights.
LLAMA_100M = ModelSpec(
    vocab=32000, width=768, mlp=2048, layers=12, heads=12, kv_heads=4, head_dim=64, max_len=1024, name="random-100m"
)
SMALL = ModelSpec(
    vocab=512, width=128, mlp=352, layers=4, heads=4, kv_heads=4, head_dim=32, max_len=512, name="random-small"
)
TINY = ModelSpec(
    vocab=512, width=64, mlp=96, layers=2, heads=4, kv_heads=2, head_dim=16, max_len=128, name="random-tiny"
)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: greedy, exactly `max_tokens` tokens of output; adapter None is the base."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A workload before it is drawn. Prompt and output lengths are uniform, bounds included.

    Attributes:
        rank: of every adapter, on q, k, v and o.
    """

    spec: ModelSpec
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    adapters: int = 8
    rank: int = 16
    seed: int = 0

    def describe(self) -> dict[str, object]:
        """The same as plain values, for the results file."""
        return {**asdict(self), "parameters": self.spec.parameters, "adapted": list(ADAPTED)}


R1 = Plan(LLAMA_100M, requests=128, prompt_tokens=(16, 512), output_tokens=(8, 256))
R1_QUICK = Plan(TINY, requests=8, prompt_tokens=(4, 24), output_tokens=(4, 10), adapters=2, rank=4)


@dataclass(frozen=True, slots=True)
class Workload:
    """A drawn workload on disk: DIR/model, DIR/adapters/NAME and DIR/jobs.json."""

    plan: Plan
    directory: Path
    jobs: tuple[Job, ...]

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def adapters(self) -> Mapping[str, str]:
        """Name -> directory."""
        return {name: str(self.directory / "adapters" / name) for name in adapter_names(self.plan)}


def adapter_names(plan: Plan) -> list[str]:
    """The names of the plan's adapters."""
    return [f"a{i}" for i in range(plan.adapters)]


def draw_jobs(plan: Plan) -> tuple[Job, ...]:
    """The plan's requests; adapters take turns, so each has the same share."""
    rng = np.random.default_rng(plan.seed)
    names = adapter_names(plan)
    jobs = []
    for i in range(plan.requests):
        length = int(rng.integers(plan.prompt_tokens[0], plan.prompt_tokens[1] + 1))
        output = int(rng.integers(plan.output_tokens[0], plan.output_tokens[1] + 1))
        prompt = tuple(int(t) for t in rng.integers(3, plan.spec.vocab, length))
        jobs.append(Job(i, prompt, output, names[i % len(names)] if names else None))
    return tuple(jobs)


def prepare(plan: Plan, directory: Path) -> Workload:
    """Writes the workload's files, unless the directory already holds this very plan."""
    jobs = draw_jobs(plan)
    mark = directory / "plan.json"
    wanted = json.dumps(plan.describe(), indent=1)
    if not (mark.exists() and mark.read_text() == wanted):
        mark.unlink(missing_ok=True)
        write_model(directory / "model", plan.spec, plan.seed)
        for i, name in enumerate(adapter_names(plan)):
            write_adapter(directory / "adapters" / name, plan, seed=plan.seed + 1000 + i)
        (directory / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
        mark.write_text(wanted)
    return Workload(plan, directory, jobs)


def write_model(directory: Path, spec: ModelSpec, seed: int) -> None:
    """A random Llama as transformers writes it: config.json and model.safetensors, float32."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    tensors = {
        "model.embed_tokens.weight": _normal(rng, (spec.vocab, spec.width), 1.0),
        "model.norm.weight": np.ones(spec.width, np.float32),
        # Wide enough that greedy choices are rarely close.
        "lm_head.weight": _normal(rng, (spec.vocab, spec.width), 2 * spec.width**-0.5),
    }
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = np.ones(spec.width, np.float32)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = np.ones(spec.width, np.float32)
        for name, (width_in, width_out) in spec.projection_shapes.items():
            tensors[f"{prefix}.{MODULES[name]}.weight"] = _normal(rng, (width_out, width_in), width_in**-0.5)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_adapter(directory: Path, plan: Plan, seed: int, invocation: Sequence[int] | None = None) -> None:
    """A random adapter as PEFT writes it, strong enough to change the greedy output.

    Args:
        invocation: the tokens that make it an activated LoRA.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": plan.spec.name,
        "r": plan.rank,
        "lora_alpha": 2 * plan.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [MODULES[name].rpartition(".")[2] for name in ADAPTED],
        "inference_mode": True,
        **({} if invocation is None else {"alora_invocation_tokens": list(invocation)}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(plan.spec.layers):
        for name in ADAPTED:
            width_in, width_out = plan.spec.projection_shapes[name]
            prefix = f"base_model.model.model.layers.{layer}.{MODULES[name]}"
            tensors[f"{prefix}.lora_A.weight"] = _normal(rng, (plan.rank, width_in), width_in**-0.5)
            tensors[f"{prefix}.lora_B.weight"] = _normal(rng, (width_out, plan.rank), 0.1)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def output_tokens(jobs: Sequence[Job]) -> int:
    """Tokens of output that all jobs ask for."""
    return sum(job.max_tokens for job in jobs)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)
