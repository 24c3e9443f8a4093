"""`jlora bench load`: how long the weights take from files to devices, as published and converted.

    safetensors   a Hugging Face directory, read, transposed and placed tensor by tensor
    orbax         the same model after `jlora convert`, restored straight into the shards

Every sample is a process of its own, as a server's start is: two loads, of which the first compiles
what it needs (a server keeps that in its compile cache) and the second has it. Imports and the start
of the backend are not counted. The files are in the page cache, so a disk is not measured. Both give
the same weights, bit by bit, or the run fails.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from benchmarks import rounds
from benchmarks.rounds import Budget, Sample, Side
from jlora.engine.device import uses_scan
from jlora.loadgen import checkpoints as workload
from jlora.loadgen.checkpoints import LLAMA_100M, TINY
from jlora.model import checkpoint, sharding
from jlora.model.spec import ModelSpec

T = TypeVar("T")

FORMS = ("safetensors", "orbax")
LIBRARIES = ("safetensors", "orbax-checkpoint")


@dataclass(frozen=True, slots=True)
class Plan:
    """One random model, and over how many devices it is sharded."""

    spec: ModelSpec
    tps: tuple[int, ...] = (1, 2)


FULL, QUICK = Plan(LLAMA_100M), Plan(TINY)


def run(plan: Plan, dtype: str, budget: Budget, work: Path) -> dict[str, Any]:
    """Measures; the raw rounds and a summary.

    Args:
        dtype: of the weights on the devices; the files hold float32.
    Raises:
        RuntimeError: the two forms do not give the same weights.
        ConfigError: fewer devices than the plan shards over (on CPU they are made).
    """
    libraries = {name: metadata.version(name) for name in LIBRARIES}
    settings = {"plan": asdict(plan), "parameters": plan.spec.parameters, "dtype": dtype, "libraries": libraries}
    journal = rounds.Journal(work / f"load-{dtype}.jsonl", settings)
    homes = _write(plan.spec, work)
    sides = [
        Side(f"{form} tp {tp}", lambda home=homes[form], tp=tp: _apart(measure, home, dtype, tp))
        for tp in plan.tps
        for form in FORMS
    ]
    done = rounds.interleave(sides, journal, budget, f"load {dtype}")
    found = {(side, sample["checksum"]) for finished in done for side, sample in finished.items()}
    if len({checksum for _, checksum in found}) > 1:
        raise RuntimeError(f"the loaded weights differ, by their checksums: {sorted(found)}")
    return {"settings": settings, "rounds": done, "summary": summarise(plan, done)}


def measure(home: Path, dtype: str, tp: int) -> Sample:
    """Loads a model twice in this process, which has not used jax yet; seconds of both, and a sum of the weights."""
    jax.config.update("jax_num_cpu_devices", tp)
    spec, mesh = checkpoint.read_spec(home, dtype), sharding.make_mesh(tp)
    shardings = sharding.shardings(spec, mesh)
    stacked = uses_scan("auto", mesh.devices.flat[0].platform)
    jax.block_until_ready(jax.device_put(0, mesh.devices.flat[0]))
    seconds: list[float] = []
    params: Any = None
    for _ in range(2):
        params = None  # two copies are never there at once
        began = time.perf_counter()
        params = checkpoint.load_params(home, spec, shardings, stacked=stacked, progress=False)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - began)
    checksum = 0
    for weight in jax.tree.leaves(params):
        checksum = zlib.crc32(np.asarray(weight).tobytes(), checksum)
    return {"seconds": seconds[0], "again_s": seconds[1], "checksum": checksum}


def summarise(plan: Plan, done: Sequence[Mapping[str, Sample]]) -> list[dict[str, Any]]:
    """Per number of devices: median seconds, how many times faster orbax is round by round, the controls."""
    rows = []
    for tp in plan.tps:
        ours, theirs = f"orbax tp {tp}", f"safetensors tp {tp}"
        row: dict[str, Any] = {"tp": tp, "rounds": len(done)}
        for load, key in (("first", "seconds"), ("again", "again_s")):
            row[load] = {
                "safetensors_s": rounds.spread([r[theirs][key] for r in done]).median,
                "orbax_s": rounds.spread([r[ours][key] for r in done]).median,
                "ratio": asdict(rounds.speed_ratio(done, ours, theirs, key)),
                "safetensors_control": rounds.control(done, theirs, key),
                "orbax_control": rounds.control(done, ours, key),
            }
        rows.append(row)
    return rows


def _write(spec: ModelSpec, work: Path) -> Mapping[str, Path]:
    """The model in both forms, and in the page cache."""
    plan = workload.Plan(spec, requests=1, prompt_tokens=(1, 1), output_tokens=(1, 1), adapters=0)
    homes = {"safetensors": workload.prepare(plan, work / "weights").model}
    homes["orbax"] = work / "weights" / "orbax"
    if homes["orbax"].exists():
        shutil.rmtree(homes["orbax"])
    _apart(checkpoint.convert, homes["safetensors"], homes["orbax"], False)
    for file in (path for home in homes.values() for path in home.rglob("*") if path.is_file()):
        file.read_bytes()
    return homes


def _apart(call: Callable[..., T], *args: Any) -> T:
    """The call's result, from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()
