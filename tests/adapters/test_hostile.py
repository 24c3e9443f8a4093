"""Files that somebody wrote to do harm: refused by what they ask for, before it is read, parsed or computed."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, deserialize

from jlora.adapters import peft
from jlora.adapters.peft import CONFIG, MAX_GAIN, WEIGHTS, read_peft
from jlora.adapters.peft_config import MAX_ALPHA, MAX_BYTES, MAX_INVOCATION
from jlora.errors import DataLoss, InvalidArgument, JloraError
from jlora.ports import DiskFile, DiskFiles, DiskFolder
from tests import _make
from tests.adapters._peft import SPEC, edit_tensors, key, read, refused


class Counting(DiskFiles):
    """A disk that counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    @contextmanager
    def folder(self, directory: str) -> Iterator[DiskFolder]:
        with super().folder(directory) as folder:
            plain = folder.open

            @contextmanager
            def counted(name: str) -> Iterator[Any]:
                with plain(name) as file:
                    yield _Counted(file, self)

            folder.open = counted  # type: ignore[method-assign]
            yield folder


class _Counted:
    def __init__(self, file: DiskFile, disk: Counting):
        self._file, self._disk, self.size = file, disk, file.size

    def read(self, size: int) -> np.ndarray:
        data = self._file.read(size)
        self._disk.bytes += len(data)
        return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return _make.make_adapter(tmp_path / "a", SPEC)


def write_header(path: Path, header: bytes, data: bytes = b"") -> None:
    (path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_header_of_a_million_entries_is_refused_by_its_length(path: Path):
    entry = b'"t%06d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    write_header(path, b"{" + b"".join(entry % i for i in range(1_000_000)) + b" " * 9)
    disk = Counting()
    refused(path, InvalidArgument, f"a/{WEIGHTS}", "header", "must be at most 71680", files=disk)  # six modules
    assert disk.bytes == (path / CONFIG).stat().st_size + 8


def test_a_config_with_eight_million_invocation_tokens_is_not_read(path: Path):
    text = (path / CONFIG).read_text()
    (path / CONFIG).write_text(text.replace("{", '{"alora_invocation_tokens": [' + "5," * 7_999_999 + "5],", 1))
    disk = Counting()
    refused(path, InvalidArgument, f"a/{CONFIG}", str(MAX_BYTES), files=disk)
    assert disk.bytes == 0


def test_an_invocation_has_a_greatest_length(path: Path):
    _make.edit_json(path / CONFIG, alora_invocation_tokens=[5] * MAX_INVOCATION)
    assert len(read(path).alora_invocation_tokens) == MAX_INVOCATION
    _make.edit_json(path / CONFIG, alora_invocation_tokens=[5] * (MAX_INVOCATION + 1))
    refused(path, InvalidArgument, "alora_invocation_tokens", "at most 1024", "got 1025")


HUGE = 1 << 62


@pytest.mark.parametrize(
    "shape, offsets",
    [([0, HUGE], [0, 0]), ([HUGE, 0], [0, 0]), ([HUGE, HUGE], [0, 4]), ([1] * 200, [0, 4]), ([], [0, 4]),
     ([10**400, 1], [0, 4]), ([-1, 4], [0, 4]), ([4, 32], [0, 1 << 80]), ([4, 32], [-512, 0]), ([4, 32], [512, 0]),
     ([4, 32], [0]), ([4, 32], [0, 512, 9]), ([4.5, 32], [0, 512]), ([True, 32], [0, 512]), ("4", [0, 512]),
     ([4, 32], [4, 516])],
)  # fmt: skip
def test_odd_shapes_and_offsets_are_refused(path: Path, shape: Any, offsets: Any):
    header, data = split(path)
    header[key(0, "q")] |= {"shape": shape, "data_offsets": offsets}
    write_header(path, json.dumps(header).encode(), data)
    with pytest.raises((InvalidArgument, DataLoss), match=rf"^a/{WEIGHTS}: ") as error:
        read(path)
    assert len(str(error.value)) < 500


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = (path / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


HEADERS: dict[str, bytes] = {
    "nested": b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "nested objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "not UTF-8": b'{"\xff\xfe": 1}',
    "a lone surrogate": rb'{"\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
    "a number of 60,000 digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 60_000 + b'],"data_offsets":[0,0]}}',
    "a number without end": b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,0]}}',
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}',
    "another key": b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":1}}',
    "no object": b"[1,2]",
    "nothing": b"",
    "metadata of another kind": b'{"__metadata__":{"a":1}}',
    "a long name": b'{"base_model.model.' + b".lora_A" * 9_000 + b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
    "a long dtype": b'{"a":{"dtype":"' + b"F" * 60_000 + b'","shape":[0],"data_offsets":[0,0]}}',
    "a zero byte": b"{}\0",
}


@pytest.mark.parametrize("name", HEADERS)
def test_odd_headers_are_refused(path: Path, name: str):
    write_header(path, HEADERS[name])
    with pytest.raises((InvalidArgument, DataLoss), match=rf"^a/{WEIGHTS}: ") as error:
        read(path)
    assert len(str(error.value)) < 500


CONFIGS: dict[str, bytes] = {
    "nested": b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "nested below the parser's limit": b'{"x":' + b"[" * 900 + b"]" * 900 + b"}",
    "not UTF-8": b'{"r": "\xff"}',
    "a lone surrogate": rb'{"peft_type": "\ud800"}',
    "a huge whole number": b'{"peft_type":"LORA","r":' + b"9" * 4000 + b',"lora_alpha":8,"target_modules":["q_proj"]}',
    "NaN": b'{"peft_type":"LORA","r":4,"lora_alpha":NaN,"target_modules":["q_proj"]}',
    "a key of 200,000 characters": b'{"' + b"k" * 200_000 + b'":1}',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_odd_configs_are_refused(path: Path, name: str):
    (path / CONFIG).write_bytes(CONFIGS[name])
    with pytest.raises((InvalidArgument, DataLoss), match=rf"^a/{CONFIG}: "):
        read(path)


@pytest.mark.parametrize("alpha", [1e29, -1e29, MAX_ALPHA * 1.01, 10**300])
@pytest.mark.parametrize("option", ["lora_alpha", "alpha_pattern"])
def test_a_scale_that_no_product_survives_is_refused(path: Path, option: str, alpha: float):
    _make.edit_json(path / CONFIG, **{option: alpha if option == "lora_alpha" else {"q_proj": alpha}})
    refused(path, InvalidArgument, option, "at most 1000000")


@pytest.mark.parametrize("half, size", [("A", 1e18), ("A", 3e38), ("B", 1e18), ("B", 3e38), ("both", 2e3)])
def test_weights_whose_products_could_overflow_are_refused(path: Path, half: str, size: float):
    """A scale or a weight may be large if the other factor is small: the norms and their product count."""
    halves = "AB" if half == "both" else half

    def fill(tensors: dict[str, np.ndarray]) -> None:
        for h in "AB":
            tensors[key(1, "q", h)].fill(size / math.sqrt(128) if h in halves else 1e-30)

    edit_tensors(path, fill)
    refused(path, InvalidArgument, "model.layers.1.self_attn.q_proj", "lora_alpha", f"must be at most {MAX_GAIN:.0f}")


def test_a_directory_of_very_many_files_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peft, "MAX_FILES", 2)
    assert read(path).rank == 4
    (path / "README.md").touch()
    refused(path, InvalidArgument, "'a'", "at most 2 files")


def mutations(data: bytes, draw: random.Random) -> Iterator[bytes]:
    """Flipped, lost, doubled and exchanged bytes, and numbers and words that other files have."""
    words = [
        b"0",
        b"-1",
        b"1e9",
        b"9" * 30,
        b"[]",
        b"{}",
        b'""',
        b"null",
        b"4611686018427387904",
        b"[0,4611686018427387904]",
    ]
    while True:
        at, length = draw.randrange(len(data)), draw.randint(1, 8)
        kind = draw.randrange(5)
        if kind == 0:
            yield data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            yield data[:at] + data[at + length :]
        elif kind == 2:
            yield data[:at] + data[at : at + length] * 2 + data[at + length :]
        elif kind == 3:
            numbers = list(re.finditer(rb"-?\d+|\[[^][]*\]|true|null", data[:1200]))
            found = draw.choice(numbers)
            yield data[: found.start()] + draw.choice(words) + data[found.end() :]
        else:
            yield data[:at] + draw.randbytes(length) + data[at + length :]


def outcome(load: Callable[[], Any]) -> Any:
    """What it returned, or None if it was refused. Any other error fails the test."""
    try:
        return load()
    except (InvalidArgument, DataLoss):
        return None
    except JloraError as e:
        pytest.fail(f"{type(e).__name__}: {e}")


def test_no_mutation_of_either_file_is_an_internal_error(tmp_path: Path):
    """And what is accepted is what the safetensors package reads."""
    path = _make.make_adapter(
        tmp_path / "a", SPEC, r=1, targets=("q",), layers_to_transform=[0], rank_pattern={"q_proj": 1},
        exclude_modules=["x"], alora_invocation_tokens=[5, 6],
    )  # fmt: skip
    draw, accepted = random.Random(1), 0
    for name in (CONFIG, WEIGHTS):
        original = (path / name).read_bytes()
        for mutated, _ in zip(mutations(original, draw), range(1500), strict=False):
            (path / name).write_bytes(mutated)
            adapter = outcome(lambda: read_peft(path, SPEC, 64))
            if adapter is None:
                continue
            accepted += 1
            try:
                theirs = dict(deserialize((path / WEIGHTS).read_bytes()))
            except SafetensorError as e:
                pytest.fail(f"accepted, and the safetensors package says {e}")
            a = adapter.weights[0, "q"][0]
            np.testing.assert_array_equal(a.ravel(), np.frombuffer(theirs[key(0, "q")]["data"], np.float32))
        (path / name).write_bytes(original)
    assert accepted > 100
