"""How long a model's weights take from files to devices, as published and after `jlora convert`.

    safetensors   a Hugging Face directory, read, transposed and placed tensor by tensor
    orbax         the same model after `jlora convert`, restored straight into the shards

Every sample is a process of its own, as a server's start is: two loads, of which the first compiles
what it needs and the second has it. Imports and the start of the backend are not counted. The files
are in the page cache, so no disk is measured. Both forms give the same weights, bit by bit.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from benchmarks.runner import Options
from jlora.engine.device import uses_scan
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.model import checkpoint, sharding
from jlora.model.spec import ModelSpec

T = TypeVar("T")

FORMS, TPS = ("safetensors", "orbax"), (1, 2)
LIBRARIES = ("safetensors", "orbax-checkpoint")


def run(options: Options) -> None:
    """Loads both forms on one device and on two. Raises RuntimeError if they give different weights."""
    spec = TINY if options.quick else LLAMA_100M
    settings = {"parameters": spec.parameters, "libraries": {name: metadata.version(name) for name in LIBRARIES}}
    records = options.records(f"load-{options.dtype}", settings)
    homes = _write(spec, options.folder("load"))
    for tp in TPS:
        sides = [Side(form, lambda form=form, tp=tp: apart(load, homes[form], options.dtype, tp)) for form in FORMS]
        records.measure(f"tp {tp}", sides, options.budget(5, quick=1))
    if len({line["checksum"] for line in records.lines}) > 1:
        raise RuntimeError("the two forms give different weights")


def load(home: Path, dtype: str, tp: int) -> Sample:
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
    return {"first_s": seconds[0], "again_s": seconds[1], "checksum": checksum}


def _write(spec: ModelSpec, work: Path) -> Mapping[str, Path]:
    """The model in both forms, and in the page cache."""
    homes = {form: work / form for form in FORMS}
    write_model(homes["safetensors"], spec, seed=0)
    if homes["orbax"].exists():
        shutil.rmtree(homes["orbax"])
    apart(checkpoint.convert, homes["safetensors"], homes["orbax"], False)
    for file in (path for home in homes.values() for path in home.rglob("*") if path.is_file()):
        file.read_bytes()
    return homes


def apart(call: Callable[..., T], *args: Any) -> T:
    """The call's result, from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()
