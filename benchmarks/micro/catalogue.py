"""What a registered adapter costs: seconds and bytes of a start with many adapters that stay on the disk.

No model runs: the adapters are found, registered and written down as `build` does it. Their weight files
have true headers and sizes, and holes for data: registration reads no weights.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.runner import Options
from jlora import config as configuration
from jlora.adapters.catalogue import Catalogue
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.policies import Jlora
from jlora.cache.transfer import Meter
from jlora.engine.loading import Adapters
from jlora.engine.sources import Reader, find
from jlora.layout import PoolLayout, smallest_block_tokens
from jlora.loadgen.checkpoints import LLAMA_100M
from jlora.loadgen.rounds import Sample, Side
from jlora.machine import resident_bytes
from jlora.model.hf_names import MODULES
from jlora.ports import DiskFiles, OsThreads

COUNT = 10_000
RANKS = (8, 16, 32, 64)
TARGETS = ("q", "v")


def run(options: Options) -> None:
    """Registers that many adapters, first unknown ones and then those that the registry knows."""
    count = 100 if options.quick else COUNT
    directory = options.folder("catalogue")
    for i in range(count):
        _write(directory / "adapters" / f"a{i:05}", RANKS[i % len(RANKS)])
    records = options.records("catalogue-python", {"adapters": count, "ranks": list(RANKS), "targets": list(TARGETS)})
    sides = [Side(name, partial(_start, directory, count, name == "known")) for name in ("scanned", "known")]
    records.measure("rounds", sides, options.budget(3))
    shutil.rmtree(directory)


def _start(directory: Path, count: int, known: bool) -> Sample:
    """A start in a process of its own: what an earlier one has freed would hide what this one takes."""
    for left in () if known else directory.glob("adapters.db*"):
        left.unlink()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_measure, directory, count).result()


def _write(directory: Path, rank: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = [MODULES[target].rpartition(".")[2] for target in TARGETS]
    keys = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (directory / "adapter_config.json").write_text(json.dumps(keys))
    header: dict[str, Any] = {}
    end = 0
    for layer in range(LLAMA_100M.layers):
        for target in TARGETS:
            width_in, width_out = LLAMA_100M.projection_shapes[target]
            for half, shape in (("A", [rank, width_in]), ("B", [width_out, rank])):
                begin, end = end, end + 4 * shape[0] * shape[1]
                name = f"base_model.model.model.layers.{layer}.{MODULES[target]}.lora_{half}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)


def _measure(directory: Path, count: int) -> Sample:
    layout = PoolLayout.of(LLAMA_100M, 2048, smallest_block_tokens(LLAMA_100M, 16))
    reader = Reader(LLAMA_100M, layout, 256, (LLAMA_100M.name,), DiskFiles(), time.monotonic)
    keys = {"adapters.dir": str(directory / "adapters"), "adapters.lazy": True}
    manager = CacheManager(Sizes(2047, 2048, layout.block_tokens), Jlora(Meter(1e-3)), time.monotonic)
    gc.collect()
    memory, began = resident_bytes(), time.perf_counter()
    catalogue = Catalogue(str(directory / "adapters.db"), OsThreads(), reader.fits)
    parts: Any = SimpleNamespace(
        scheduler=SimpleNamespace(manager=manager), registry=AdapterRegistry(), swapper=None, clock=time.monotonic,
        readers=2, catalogue=catalogue, wall=time.time,
    )  # fmt: skip
    adapters = Adapters(parts)
    adapters.begin_with(find(configuration.load(None, keys), reader, catalogue, progress=False))
    seconds = time.perf_counter() - began
    assert len(adapters.records()) == count
    memory = resident_bytes() - memory
    catalogue.close()
    kept = sum(file.stat().st_size for file in directory.glob("adapters.db*"))
    return {"seconds": seconds, "bytes": memory / count, "table_bytes": kept / count}
