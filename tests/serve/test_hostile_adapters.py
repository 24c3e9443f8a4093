"""Adapter files and calls that used to stop or to fool the server, through gRPC."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlora.adapters.peft import CONFIG, MAX_GAIN, WEIGHTS
from jlora.ports import System
from jlora.serve.proto import jlora_pb2 as pb
from tests import _make, port
from tests._disk import Gate
from tests.serve._server import Served, refused, request, serve, wait_until

CODE = grpc.StatusCode


@pytest.fixture
def disk() -> Gate:
    return Gate()


@pytest.fixture
def gated(text_model: Path, disk: Gate) -> Iterator[Served]:
    """A server whose loads wait for the test."""
    with serve(text_model, {"engine.warmup": False}, System(files=disk)) as running:
        yield running


@pytest.fixture
def path(served: Served, tmp_path: Path) -> Path:
    return _make.make_adapter(tmp_path / "a", served.spec, seed=3)


def load(served: Served, path: Path, name: str = "x", **fields: Any) -> pb.AdapterInfo:
    return served.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=str(path), **fields), timeout=60)


def unload(served: Served, name: str = "x") -> None:
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=60)


@pytest.mark.parametrize(
    "option, value",
    [("target_modules", r"((\w|\.)+)+!"), ("exclude_modules", r"((\w|\.)+)+!"), ("rank_pattern", {r"((\w|\.)+)+!": 2}),
     ("alpha_pattern", {r"((\w|\.)+)+!": 2}), ("layers_pattern", [r"((\w|\.)+)+!"])],
)  # fmt: skip
def test_no_regular_expression_stops_the_server(served: Served, path: Path, option: str, value: Any):
    layers = [0, 1] if option == "layers_pattern" else None
    _make.edit_json(path / CONFIG, **{option: value, "layers_to_transform": layers})
    if option in ("target_modules", "layers_pattern"):
        with refused(CODE.INVALID_ARGUMENT, "target_modules", "matches no projection"):
            load(served, path)
    else:
        assert load(served, path).rank == 4
        unload(served)
    _make.edit_json(path / CONFIG, **{option: {r"(?=q)q_proj": 2} if isinstance(value, dict) else r"(?=q).*"})
    with refused(CODE.INVALID_ARGUMENT, option, "regular expression"):
        load(served, path)


def test_a_million_header_entries_and_eight_million_invocation_tokens_are_refused(served: Served, path: Path):
    entry = b'"t%06d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    header = b"{" + b"".join(entry % i for i in range(1_000_000)) + b" "
    whole = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with refused(CODE.INVALID_ARGUMENT, "a header of", "must be at most"):
        load(served, path)
    (path / WEIGHTS).write_bytes(whole)
    text = (path / CONFIG).read_text()
    (path / CONFIG).write_text(text.replace("{", '{"alora_invocation_tokens": [' + "5," * 7_999_999 + "5],", 1))
    with refused(CODE.INVALID_ARGUMENT, CONFIG, "bytes: must be at most"):
        load(served, path)


def test_fifos_in_a_files_place_leave_the_loaders_free(served: Served, path: Path, tmp_path: Path):
    for i in range(8):
        trap = shutil.copytree(path, tmp_path / f"trap{i}")
        (trap / (CONFIG, WEIGHTS)[i % 2]).unlink()
        os.mkfifo(trap / (CONFIG, WEIGHTS)[i % 2])
        with refused(CODE.NOT_FOUND, "not a regular file"):
            load(served, trap)
    assert load(served, path).rank == 4
    unload(served)


def test_a_replaced_directory_is_never_mixed_with_its_successor(served: Served, tmp_path: Path):
    versions = [_make.make_adapter(tmp_path / f"v{i}", served.spec, seed=i, lora_alpha=i) for i in (1, 2)]
    digests = set()
    for version in versions:
        digests.add(load(served, version, replace=True).digest)
    live, over, flips = tmp_path / "live", threading.Event(), 0
    live.symlink_to(versions[0])

    def swap() -> None:
        nonlocal flips
        while not over.is_set():
            flips += 1
            (tmp_path / "new").symlink_to(versions[flips % 2])
            (tmp_path / "new").replace(live)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        seen = {load(served, live, replace=True).digest for _ in range(100)}
    finally:
        over.set()
        swapper.join()
    assert seen <= digests and flips > 100
    unload(served)


@pytest.mark.parametrize("half", ["A", "B", "both"])
def test_an_adapter_at_the_greatest_norms_is_answered_with_finite_numbers(served: Served, path: Path, half: str):
    def scaled(weights: np.ndarray, norm: float) -> np.ndarray:
        return (weights * (norm / np.linalg.norm(weights))).astype(np.float32)

    _make.make_adapter(path, served.spec, seed=3, targets=tuple(_make.MODULES), lora_alpha=4)
    norms = {"A": (0.999 * MAX_GAIN, 1.0), "B": (1.0, 0.999 * MAX_GAIN), "both": (1e3, 0.999e3)}[half]
    tensors = load_file(path / WEIGHTS)
    save_file({k: scaled(v, norms[".lora_B" in k]) for k, v in tensors.items()}, path / WEIGHTS)
    load(served, path)
    answer = served.generate(request("hello there", 20, model="x", logprobs=2)).outputs[0]
    assert len(answer.token_ids) == 20 and answer.finish_reason == "length"
    assert all(math.isfinite(e.logprob) for e in answer.logprobs)
    unload(served)
    save_file({k: scaled(v, 1.01 * norms[".lora_B" in k]) for k, v in tensors.items()}, path / WEIGHTS)
    with refused(CODE.INVALID_ARGUMENT, "lora_alpha", "must be at most 1000000"):
        load(served, path)


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_load_that_its_client_gives_up_is_not_loaded(
    gated: Served, disk: Gate, path: Path, how: str, monkeypatch: pytest.MonkeyPatch
):
    free = gated.cache().host.free
    seam = port.loads(gated.replica)
    begin: Callable[..., Any] = getattr(*seam)
    answers, ended = [], threading.Event()

    def watched(answer: Future[Any], *args: Any) -> Any:
        answers.append(answer)
        try:
            return begin(answer, *args)
        finally:
            ended.set()

    monkeypatch.setattr(*seam, watched)
    disk.shut()
    asked = pb.LoadAdapterRequest(name="unwanted", path=str(path))
    call = gated.adapters.LoadAdapter.future(asked, timeout=0.5 if how == "deadline" else 60)
    assert disk.reached.wait(60)
    if how == "cancelled":
        call.cancel()
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        call.result(60)
    wait_until(lambda: answers[0].cancelled())  # the server has noticed
    disk.open.set()
    assert ended.wait(60)
    assert not gated.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
    assert gated.cache().host.free == free
    gated.check_integrity()
