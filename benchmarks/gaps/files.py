"""Adapters that somebody wrote to do harm, beside a library of plain ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from jlora.loadgen.checkpoints import write_adapter
from jlora.model.spec import ModelSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BOMB = r"((\w|\.)+)+!"
PINNED, PINNED_RANK = 48, 256  # a few adapters that are large enough to fill a pool


def library_name(number: int) -> str:
    """Of a plain adapter."""
    return f"plain-{number:05}"


def write_library(folder: Path, spec: ModelSpec, count: int) -> None:
    """Plain adapters: large ones first."""
    for i in range(count):
        write_adapter(folder / library_name(i), spec, PINNED_RANK if i < PINNED else 1, i)


def write_hostile(folder: Path, spec: ModelSpec, entries: int) -> None:
    """A directory for each kind, in `folder/KIND/NAME`; `entries` of the longest header and list."""
    good = folder / "good"
    write_adapter(good, spec, 4, 1)
    for i, (option, value) in enumerate({
        "target_modules": BOMB, "exclude_modules": BOMB, "rank_pattern": {BOMB: 2}, "alpha_pattern": {BOMB: 2},
    }.items()):  # fmt: skip
        _edit(_copy(good, folder / "bombs" / str(i)), **{option: value})
    entry = b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    header = b"{" + b"".join(entry % i for i in range(entries)) + b" "
    _weights(_copy(good, folder / "headers" / "0"), header)
    _edit(_copy(good, folder / "invocations" / "0"), alora_invocation_tokens=[5] * (8 * entries))
    for i, shape in enumerate(([0, 2**62], [1] * 200, [2**31, 2**31], [-1, 4])):
        odd = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
        _weights(_copy(good, folder / "shapes" / str(i)), json.dumps(odd).encode())
    _edit(_copy(good, folder / "scales" / "0"), lora_alpha=1e29)
    for i in range(8):
        trap = _copy(good, folder / "fifos" / str(i))
        (trap / (CONFIG, WEIGHTS)[i % 2]).unlink()
        os.mkfifo(trap / (CONFIG, WEIGHTS)[i % 2])


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


def _edit(adapter: Path, **options: Any) -> None:
    said = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**said, **options}))


def _weights(adapter: Path, header: bytes) -> None:
    (adapter / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
