"""Trains the demo's base model and adapters from nothing: `python -m tools.train_demo.train --out DIR`.

The base (0.8 million weights) learns to repeat the user's text, and `tasks.SKILLS` under tags
that no chat uses. Each adapter then learns its task with the base frozen: only A and B move,
through the same `adapt` joint of the forward pass that serving uses; a check's act from its
invocation on only, so what comes before stays the base's. Everything is drawn from
one seed, runs on a CPU, and is written as soon as a stage ends: the base under DIR/model, adapters
under DIR/adapters/NAME, and `training.json` with steps, seconds, versions and the share of exact
greedy answers on held-out texts. `--only a,b` trains just these stages again on the files in DIR.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from jlora.demo.tasks import CHECKS, TASKS, echo
from jlora.model import llama
from jlora.model.spec import ModelSpec
from tools.train_demo import data, export
from tools.train_demo.plans import PLANS, LoraShape

SPEC = ModelSpec(
    vocab=data.VOCAB, width=128, mlp=384, layers=4, heads=4, kv_heads=2, head_dim=32, max_len=1024,
    tied=True, eos_ids=(data.EOS,), bos_id=data.BOS, name="jlora-demo",
)  # fmt: skip

# What the adapters' files name as their base: where the package keeps it.
BASE_PATH = "jlora/demo/assets/model"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one stage learns.

    Attributes:
        steps, lr: of AdamW under a cosine with a short warm-up.
        shapes: (rows, tokens per row) of the steps, in turn; mostly short, for speed, but every
            position of the context must be met in training to work later.
    """

    steps: int
    lr: float
    shapes: tuple[tuple[int, int], ...] = (*((20, 128),) * 6, (5, 512), (2, 1024))

    def shape(self, step: int) -> tuple[int, int]:
        """Rows and tokens per row at `step`."""
        return self.shapes[step % len(self.shapes)]


STAGES = ("base", *TASKS, *CHECKS)
BASE = Recipe(steps=2600, lr=3e-3)
ADAPTER = Recipe(steps=0, lr=4e-3)  # each task says its own steps


# (rows, tokens per row) -> [rows, tokens] ids, and loss weights of the same shape.
Draw = Callable[[Random, int, int], tuple[np.ndarray, np.ndarray]]
# The adapter of a forward pass over [rows, length] ids.
AdaptOf = Callable[[jax.Array], llama.Adapt]
Asked = Sequence[tuple[list[int], str]]  # prompts and their exact answers


@dataclass(frozen=True, slots=True)
class Stage:
    """What `fit` needs to know of a stage: its name, rows, recipe and seed."""

    name: str
    draw: Draw
    recipe: Recipe
    seed: int


def turns_of(turn: Callable[[Random], data.Turn]) -> Draw:
    """Rows of conversations made of such turns."""
    return lambda rng, rows, length: data.batch(rng, turn, rows, length)


def loss_of(params: Any, adapt: llama.Adapt, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean cross-entropy, nats per token, of the answers in [rows, length] conversations."""
    scores = llama.dense_logits(SPEC, params, ids, adapt)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:])
    return jnp.sum(losses * weights[:, 1:]) / jnp.sum(weights[:, 1:])


def lora_joint(lora: export.Lora, shape: LoraShape, acts: jax.Array | None = None) -> llama.Adapt:
    """The `adapt` joint of one adapter: scale * (x A^T) B on the projections it has.

    Args:
        acts: [T] whether it acts on a token; on all without it.
    """

    stacked = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *lora)  # the index of a layer is traced

    def adapt(
        carry: Any, layer: jax.Array | int, x: jax.Array, products: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        def adapted(name: str, y: jax.Array) -> jax.Array:
            if name not in stacked:
                return y
            a, b = (matrix[layer] for matrix in stacked[name])
            delta = (x @ a.T) @ b * shape.scale_of(name)
            return y + (delta if acts is None else jnp.where(acts[:, None], delta, 0))

        return {name: adapted(name, y) for name, y in products.items()}

    return adapt


def activated(ids: jax.Array) -> jax.Array:
    """[rows, length] ids -> [T] whether a check acts on a token: from its invocation on."""
    return (jnp.cumsum(ids == data.INVOCATION[0], axis=1) > 0).reshape(-1)


def new_base(seed: int) -> Any:
    """Fresh weights; the tied embedding starts small so that first guesses are even."""
    params = llama.plain(nnx.split(llama.Llama(SPEC, nnx.Rngs(seed)))[1])
    return {**params, "embed": params["embed"] * 0.05}


def new_lora(shape: LoraShape, seed: int) -> export.Lora:
    """A random, B zero: the adapter starts as the base itself."""
    rng = np.random.default_rng(seed)

    def pair(name: str) -> tuple[jax.Array, jax.Array]:
        width, out = SPEC.projection_shapes[name]
        rank = shape.rank_of(name)
        a = rng.normal(0, 1 / math.sqrt(width), (rank, width))
        return jnp.asarray(a, jnp.float32), jnp.zeros((rank, out), jnp.float32)

    return [{name: pair(name) for name in shape.targets} for _ in range(SPEC.layers)]


def fit(stage: Stage, weights: Any, loss: Callable[[Any, jax.Array, jax.Array], jax.Array]) -> tuple[Any, float]:
    """Minimises `loss(weights, ids, loss weights)`; returns the weights and the last mean loss."""
    recipe = stage.recipe
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe.lr, max(1, recipe.steps // 20), recipe.steps, recipe.lr / 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.02))

    def step(weights: Any, state: Any, ids: jax.Array, mask: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, slope = jax.value_and_grad(loss)(weights, ids, mask)
        updates, state = optimizer.update(slope, state, weights)
        return optax.apply_updates(weights, updates), state, value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    state, rng, recent = optimizer.init(weights), Random(stage.seed), 0.0
    bar = tqdm(range(recipe.steps), desc=f"{stage.name:>10}", unit="step", mininterval=1.0)
    for index in bar:
        ids, mask = stage.draw(rng, *recipe.shape(index))
        weights, state, value = jitted(weights, state, ids, mask)
        if index % 20 == 19 or index == recipe.steps - 1:
            recent = float(value)
            bar.set_postfix(loss=f"{recent:.4f}", refresh=False)
    return weights, recent


def exact_share(params: Any, adapt_of: AdaptOf, asked: Asked) -> float:
    """Share of prompts whose greedy answer is exactly the one that belongs to them.

    Greedy decoding gives the expected answer if and only if every expected token is the most
    likely one after the expected tokens before it, so one forward pass over both decides.
    """
    rows, marks = [], []
    for prompt, told in asked:
        answer = [*told.encode(), data.EOS]
        rows.append(prompt + answer)
        marks.append([0] * len(prompt) + [1] * len(answer))
    length = max(map(len, rows))
    ids = np.array([row + [data.PAD] * (length - len(row)) for row in rows], np.int32)
    wanted = np.array([mark + [0] * (length - len(mark)) for mark in marks], bool)[:, 1:]
    guess = jax.jit(lambda p, t: jnp.argmax(llama.dense_logits(SPEC, p, t, adapt_of(t))[:, :-1], -1))(params, ids)
    return float(np.mean(np.all((np.asarray(guess) == ids[:, 1:]) | ~wanted, axis=1)))


@dataclass(frozen=True, slots=True)
class Run:
    """One call of the script: where it writes, what it scales, how many texts it checks."""

    out: Path
    seed: int
    scale: float
    texts: int

    def recipe(self, recipe: Recipe) -> Recipe:
        return replace(recipe, steps=max(2, round(recipe.steps * self.scale)))

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Adds one stage's numbers to `training.json`."""
        path = self.out / "training.json"
        stages = json.loads(path.read_text())["stages"] if path.exists() else {}
        stages[name] = entry
        whole = {"seed": self.seed, "model": asdict(SPEC), "parameters": SPEC.parameters, "versions": _versions()}
        whole["stages"] = {stage: stages[stage] for stage in STAGES if stage in stages}
        path.write_text(json.dumps(whole, indent=2) + "\n")


def train_base(run: Run) -> None:
    """Trains the base and writes it."""
    stage = Stage("base", turns_of(data.base_turn), run.recipe(BASE), run.seed)
    started = time.monotonic()
    params, loss = fit(stage, new_base(run.seed), lambda p, ids, mask: loss_of(p, llama.no_adapters, ids, mask))
    export.write_model(run.out / "model", SPEC, params)
    asked = [(data.prompt_ids((), text), echo(text)) for text in data.held_out_texts(run.seed, run.texts)]
    exact = exact_share(params, lambda ids: llama.no_adapters, asked)
    _report(run, stage, {"loss": loss, "exact": exact, "seconds": time.monotonic() - started})


def train_adapter(run: Run, params: Any, name: str) -> None:
    """Trains one adapter on the frozen base and writes it."""
    plan, transform = PLANS[name], TASKS[name]
    seed = run.seed + plan.seed
    recipe = run.recipe(replace(ADAPTER, steps=plan.steps))
    stage = Stage(name, turns_of(data.task_turns(transform)), recipe, seed)
    started = time.monotonic()

    def loss(lora: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return loss_of(params, lora_joint(lora, plan.lora), ids, mask)

    lora, last = fit(stage, new_lora(plan.lora, seed), loss)
    export.write_adapter(run.out / "adapters" / name, plan.lora, lora, BASE_PATH)
    asked = [(data.prompt_ids((), text), transform(text)) for text in data.held_out_texts(seed, run.texts)]
    exact = exact_share(params, lambda ids: lora_joint(lora, plan.lora), asked)
    _report(run, stage, {"loss": last, "exact": exact, "seconds": time.monotonic() - started})


def train_check(run: Run, params: Any, name: str) -> None:
    """Trains one activated adapter on the frozen base and writes it."""
    plan, check = PLANS[name], CHECKS[name]
    seed = run.seed + plan.seed
    recipe = run.recipe(replace(ADAPTER, steps=plan.steps))
    stage = Stage(name, lambda rng, rows, length: data.check_batch(rng, check, rows, length), recipe, seed)
    started = time.monotonic()

    def loss(lora: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return loss_of(params, lora_joint(lora, plan.lora, activated(ids)), ids, mask)

    lora, last = fit(stage, new_lora(plan.lora, seed), loss)
    export.write_adapter(run.out / "adapters" / name, plan.lora, lora, BASE_PATH, data.INVOCATION)
    talks = data.held_out_conversations(seed, max(2, run.texts // 4), check)  # each is many texts
    asked = [(data.check_prompt(talk), check.verdict(talk)) for talk in talks]
    exact = exact_share(params, lambda ids: lora_joint(lora, plan.lora, activated(ids)), asked)
    seconds = time.monotonic() - started
    _report(run, stage, {"texts": len(asked), "loss": last, "exact": exact, "seconds": seconds})


def _report(run: Run, stage: Stage, entry: dict[str, Any]) -> None:
    entry = {"steps": stage.recipe.steps, "texts": run.texts} | {key: round(value, 4) for key, value in entry.items()}
    run.record(stage.name, entry)
    print(f"{stage.name}: {entry['exact']:.1%} exact on held-out texts, {entry['seconds']:.0f} s", flush=True)


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "numpy")}
    return {"python": platform.python_version()} | packages


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what `--only` names, or everything; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_demo.train", description="Train the demo's base and adapters"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for model/, adapters/ and training.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="comma-separated stages: base or adapter names (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    args = parser.parse_args(argv)
    stages = args.only.split(",") if args.only else list(STAGES)
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"--only names unknown stages {unknown}; known: {', '.join(STAGES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out, args.seed, *((0.0, 16) if args.quick else (1.0, 1000)))
    if "base" in stages:
        train_base(run)
    params = jax.tree.map(jnp.asarray, export.read_model(args.out / "model", SPEC.layers))
    for name in stages:
        if name in TASKS:
            train_adapter(run, params, name)
        if name in CHECKS:
            train_check(run, params, name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
