"""Adapter directories: both files of a PEFT adapter, and the names that clients give."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from jlora.adapters.names import check_base_name, check_key, check_name
from jlora.adapters.peft import CONFIG, WEIGHTS
from jlora.engine.sources import Reader, read_adapter, scan_adapter
from jlora.errors import ConfigError, InvalidArgument
from jlora.layout import PoolLayout
from jlora.ports import File, Files, Folder, Stamp
from tests import _make
from tests.fuzz._engine import Target, status
from tests.fuzz._structure import of_json

SPEC = _make.tiny_spec(layers=3)
MAX_RANK = 8
RAW, FITTED = b"\x00", b"\x01"  # the first byte of an input for `weights`


@dataclass
class Memory(Files, Folder):
    """A disk with one directory."""

    contents: Mapping[str, bytes]

    @contextmanager
    def folder(self, directory: str) -> Iterator[Folder]:
        yield self

    def stamp(self, directory: str = "", names: Iterable[str] = ()) -> Stamp:
        return (1,)

    def names(self, most: int) -> list[str]:
        return sorted(self.contents)[:most]

    @contextmanager
    def open(self, name: str) -> Iterator[File]:
        yield _Open(self.contents[name])

    def unchanged(self) -> bool:
        return True


class _Open(File):
    def __init__(self, data: bytes):
        self._data, self.size = data, len(data)

    def read(self, size: int) -> np.ndarray:
        part, self._data = self._data[:size], self._data[size:]
        return np.frombuffer(part, np.uint8)


def reader(contents: Mapping[str, bytes]) -> Reader:
    """Reads an adapter out of memory."""
    layout = PoolLayout.of(SPEC, 64, 16)
    return Reader(SPEC, layout, MAX_RANK, ("tiny",), Memory(contents), time.monotonic)


@cache
def made(**options: Any) -> tuple[bytes, bytes]:
    """Configuration and weights of a small adapter."""
    with tempfile.TemporaryDirectory() as folder:
        path = _make.make_adapter(Path(folder) / "a", SPEC, **{"r": 1, "targets": ("q",), **options})
        return (path / CONFIG).read_bytes(), (path / WEIGHTS).read_bytes()


def config() -> Target:
    """An `adapter_config.json` beside weights that fit some of them."""
    plain, weights = made(alora_invocation_tokens=(5, 6))
    options = json.loads(plain)
    variants = [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj", "exclude_modules": ["v_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn": 3}, "alpha_pattern": {"q_proj": 4.5}},
        {"use_rslora": True, "bias": "none", "init_lora_weights": "gaussian", "lora_dropout": 0.1},
    ]
    seeds = [plain, *(json.dumps({**options, **variant}).encode() for variant in variants)]
    words = [json.dumps(key).encode() for key in options] + [b'"dora"', b'"q_proj"', b'".*"', b'"(a|b)*$"', b"\\\\d{9}"]

    def run(data: bytes) -> str:
        return status(lambda: scan_adapter("a", "/a", reader({CONFIG: data, WEIGHTS: weights})))

    return Target("config", run, seeds, words, of_json)


def weights() -> Target:
    """A safetensors file. After a first byte of 1, the length of the header is made right."""
    plain, file = made()
    larger_config, larger = made(r=2, targets=("q", "down"))
    seeds = [mode + one for mode in (RAW, FITTED) for one in (file, larger)]
    words = [b'"F32"', b'"BF16"', b'"F64"', b'"I8"', b'"__metadata__"', b"lora_A", b"[1,32]", b"[0,128]", b"[128,256]"]

    def run(data: bytes) -> str:
        mode, content = data[:1], data[1:]
        if mode == FITTED:
            content = max(0, content.rfind(b"}") - 7).to_bytes(8, "little") + content[8:]
        configuration = larger_config if b"down_proj" in content else plain
        return status(lambda: _read(configuration, content))

    return Target("weights", run, seeds, words, _change_header)


def _change_header(data: bytes, draw: random.Random) -> bytes:
    """Another header before the same tensors."""
    end = data.rfind(b"}") + 1
    header = of_json(data[9:end], draw)
    return FITTED + len(header).to_bytes(8, "little") + header + data[end:]


def _read(configuration: bytes, content: bytes) -> None:
    new = read_adapter("a", "/a", reader({CONFIG: configuration, WEIGHTS: content}))
    assert new.data is not None and np.isfinite(new.data).all()
    deserialize(content)  # what is accepted is what the safetensors package reads


def names() -> Target:
    """Names of adapters, versions and bases: what is accepted is safe in a path."""

    def run(data: bytes) -> str:
        text = data.decode("utf-8", "surrogateescape")
        try:
            check_base_name(text)
        except ConfigError:
            pass
        try:
            check_key(text)
        except InvalidArgument as e:
            assert len(str(e)) < 1500
            return "INVALID_ARGUMENT"
        assert text.isascii() and text.isprintable() and not set(text) & set("/\\ %:") and ".." not in text
        return status(lambda: check_name(text.partition("@")[0]))

    words = [b"..", b"../", b"%2e%2e", b"\x00", b"@1", b"@0", b"\\\\host\\x", "․․".encode(), "／".encode(), b"a" * 128]
    return Target("names", run, [b"sql", b"sql@12", b"a.b-c_d", b"meta-llama/Llama", b"x" * 128], words)
