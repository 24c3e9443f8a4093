"""Random models, adapters and requests on disk, the same for jlora and its peers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jlora.loadgen.checkpoints import ADAPTED, LLAMA_100M, TINY, write_adapter, write_model
from jlora.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Job:
    """One greedy request for exactly `max_tokens` tokens; adapter None is the base model."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A workload before it is drawn. Lengths of prompts and outputs are uniform, bounds included.

    Attributes:
        rank: of every adapter, on q, k, v and o.
    """

    spec: ModelSpec
    requests: int = 0
    prompt_tokens: tuple[int, int] = (1, 1)
    output_tokens: tuple[int, int] = (1, 1)
    adapters: int = 8
    rank: int = 16
    seed: int = 0

    @property
    def names(self) -> list[str]:
        """Of the adapters."""
        return [f"a{i}" for i in range(self.adapters)]

    def describe(self) -> dict[str, object]:
        """Plain values for a results file."""
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
        """The model's directory."""
        return self.directory / "model"

    @property
    def adapters(self) -> Mapping[str, str]:
        """Name -> directory."""
        return {name: str(self.directory / "adapters" / name) for name in self.plan.names}


def draw(plan: Plan) -> tuple[Job, ...]:
    """The plan's requests; adapters take turns."""
    rng, jobs = np.random.default_rng(plan.seed), []
    for i in range(plan.requests):
        length = int(rng.integers(plan.prompt_tokens[0], plan.prompt_tokens[1] + 1))
        output = int(rng.integers(plan.output_tokens[0], plan.output_tokens[1] + 1))
        prompt = tuple(int(t) for t in rng.integers(3, plan.spec.vocab, length))
        jobs.append(Job(i, prompt, output, plan.names[i % plan.adapters] if plan.adapters else None))
    return tuple(jobs)


def prepare(plan: Plan, directory: Path) -> Workload:
    """Writes the workload's files, unless the directory holds this very plan."""
    jobs, mark = draw(plan), directory / "plan.json"
    wanted = json.dumps(plan.describe(), indent=1)
    if not (mark.exists() and mark.read_text() == wanted):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_model(directory / "model", plan.spec, plan.seed)
        for i, name in enumerate(plan.names):
            write_adapter(directory / "adapters" / name, plan.spec, plan.rank, plan.seed + 1000 + i)
        (directory / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
        mark.write_text(wanted)
    return Workload(plan, directory, jobs)


def output_tokens(jobs: Sequence[Job]) -> int:
    """Tokens of output that all jobs ask for."""
    return sum(job.max_tokens for job in jobs)
