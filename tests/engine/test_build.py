"""A start: what does not fit is told with advice that helps, and programs compile beside the weights."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import pytest
from safetensors.numpy import load_file, save_file

from jlora import config, machine
from jlora.engine import build, sizing
from jlora.engine.ahead import Ahead
from jlora.engine.compiles import COMPILES
from jlora.errors import ConfigError, FailedPrecondition, InvalidArgument, ResourceExhausted
from jlora.layout import BYTES, PoolLayout
from jlora.model import checkpoint
from jlora.model.spec import ModelSpec
from jlora.pallas import gpu_ops
from jlora.pallas.cases import LLAMA3_8B
from jlora.pallas.gpu_support import lora_refusals
from tests import _make, port

SPEC = _make.tiny_spec()
WEIGHTS = SPEC.parameters * BYTES[SPEC.dtype]
BLOCK_TOKENS = 16
BLOCK = PoolLayout.of(SPEC, 1, BLOCK_TOKENS, 1).block_bytes
WHOLE = "model does not fit: weights .* GiB and a pool of .* blocks need .* GiB of the .* GiB free; "


def chosen(free_bytes: int, **keys: Any) -> PoolLayout:
    keys = {f"cache.{key}": value for key, value in keys.items()}
    return build.choose_layout(config.load(None, {"cache.block_tokens": BLOCK_TOKENS, **keys}), SPEC, free_bytes)


def refused(free_bytes: int, **keys: Any) -> str:
    """The advice: what the message says after the numbers."""
    with pytest.raises(ConfigError) as e:
        chosen(free_bytes, **keys)
    found = re.fullmatch(f"({WHOLE})(.*)", str(e.value))
    assert found, str(e.value)
    return found[2]


@pytest.mark.parametrize("keys", [{}, {"hbm_blocks": 50}])
@pytest.mark.parametrize("free_bytes", [WEIGHTS // 2, WEIGHTS, WEIGHTS + 2 * BLOCK - 1])
def test_weights_that_do_not_fit_call_for_smaller_ones_and_not_for_a_smaller_pool(
    free_bytes: int, keys: dict[str, int]
):
    said = refused(free_bytes, **keys)
    assert "model.path" in said and "model.dtype" in said
    assert "cache." not in said and "model.tp" not in said  # devices on a CPU share its memory


def test_on_an_accelerator_more_devices_help_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "model.tp" in refused(WEIGHTS // 2)


def test_too_many_blocks_are_told_how_many_would_do():
    free_bytes = WEIGHTS + 20 * BLOCK
    said = refused(free_bytes, hbm_blocks=21)
    assert said == "lower cache.hbm_blocks to at most 20"
    assert chosen(free_bytes, hbm_blocks=20).blocks == 21  # one is padding's


def test_a_share_that_is_too_small_can_be_set_by_hand():
    free_bytes = WEIGHTS + 7 * BLOCK  # of which a quarter is less than 2 blocks
    assert refused(free_bytes) == "set cache.hbm_blocks, to at most 7"
    assert chosen(free_bytes, hbm_blocks=7).blocks == 8
    assert chosen(WEIGHTS + 8 * BLOCK).blocks == 3


MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(("free_gib", "kept_mib"), [(15.75, 431), (72.0, 0.15 * 57 * 1024)], ids=["v5e", "h100"])
def test_on_an_accelerator_steps_have_room_beside_the_pool(
    free_gib: float, kept_mib: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    free_bytes = int(free_gib * GIB)
    layout = build.choose_layout(config.load(None, {}), LLAMA3_8B, free_bytes)
    left = free_bytes - 2 * LLAMA3_8B.parameters - layout.blocks * layout.block_bytes
    assert left > 348 * MIB  # the sampler's temporaries and the slots' state, by the compiler for a v5e
    assert left / MIB == pytest.approx(kept_mib, rel=0.03) and layout.blocks > 80


def test_a_model_that_leaves_steps_no_room_is_refused_and_told_what_they_need(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match="weights 14.96 GiB, steps 0.42 GiB and a pool of 2 .*; .* or raise model.tp"):
        build.choose_layout(config.load(None, {}), LLAMA3_8B, int(15.3 * GIB))


LLAMA3_70B = dataclasses.replace(LLAMA3_8B, width=8192, mlp=28672, layers=80, heads=64)
HOPPER, AMPERE = "9.0", "8.0"


@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
@pytest.mark.parametrize(
    ("spec", "tp", "capability", "keys", "tokens"),
    [
        (LLAMA3_70B, 4, HOPPER, {}, 64),
        (LLAMA3_70B, 8, HOPPER, {}, 64),
        (LLAMA3_70B, 8, HOPPER, {"cache.block_tokens": 32}, 32),
        (LLAMA3_70B, 8, HOPPER, {"engine.kernels": "xla"}, 32),
        (LLAMA3_70B, 8, AMPERE, {}, 32),
        (LLAMA3_8B, 1, HOPPER, {}, 32),
        (dataclasses.replace(LLAMA3_8B, mlp=114688, layers=2), 1, HOPPER, {}, 64),  # 58 slots: no block holds two
        (dataclasses.replace(LLAMA3_8B, dtype="float32"), 1, HOPPER, {}, 32),
    ],
)
def test_on_a_gpu_a_block_holds_as_many_tokens_as_the_kernels_need(
    spec: ModelSpec, tp: int, capability: str, keys: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
):
    client = SimpleNamespace(platform_version="cuda 13000")
    gpu = SimpleNamespace(platform="gpu", client=client, compute_capability=capability, device_kind="a GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    layout = build.choose_layout(config.load(None, {"model.tp": tp, **keys}), spec, 70 * GIB)
    assert layout.block_tokens == tokens
    if spec is LLAMA3_70B:
        assert (lora_refusals(layout) == {}) == (tokens == 64)


@pytest.mark.parametrize("error", [MemoryError("of host"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: of device")])
def test_a_start_without_memory_is_one_clear_line(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def short(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(build.checkpoint, "read_spec", short)
    monkeypatch.setattr(build.hub, "resolve", str)
    with pytest.raises(
        ResourceExhausted, match="too little memory to load the model and its cache: .*of (host|device)"
    ):
        build.build(config.load(None, {"model.path": "m", "serve.compile_cache": ""}))


SMALL = {"cache.hbm_blocks": 32, "engine.max_seqs": 2, "engine.max_step_tokens": 32, "serve.compile_cache": ""}


@pytest.mark.slow
def test_programs_compile_while_the_weights_are_read_and_not_again_after(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    counts: list[int] = []
    compiled, compile_it, load = threading.Event(), Ahead.compile, build.checkpoint.load_params

    def compiles(*args: Any) -> None:
        compile_it(*args)
        compiled.set()

    def reads(*args: Any, **kwargs: Any) -> Any:
        assert compiled.wait(120), "nothing compiles before the weights are there"
        return load(*args, **kwargs)

    monkeypatch.setattr(Ahead, "compile", compiles)
    monkeypatch.setattr(build.checkpoint, "load_params", reads)
    monkeypatch.setattr(build, "warm_up", lambda runner, first, _: counts.extend(_counted(runner.warm_up(first))))
    built = build.build(config.load(None, {"model.path": str(tiny_model), **SMALL}), progress=False)
    built.engine.close()
    # By shapes alone, and yet the very programs that steps run: from the copies' on, a call compiles nothing.
    assert len(counts) > 2 and len(set(counts)) == 1


def _counted(names: Iterable[str]) -> Iterator[int]:
    """How many programs this thread has compiled by each name."""
    return (COMPILES.count for _ in names)


def test_files_that_lack_a_weight_are_refused_before_anything_compiles(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(tiny_model, tmp_path / "model")
    file = next((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    began: list[object] = []
    monkeypatch.setattr(Ahead, "begin", lambda *args: began.append(args))
    with pytest.raises(InvalidArgument, match="'model.norm.weight' is missing"):
        build.build(config.load(None, {"model.path": str(tmp_path / "model"), **SMALL}), progress=False)
    assert not began


def test_a_start_that_fails_late_leaves_no_thread_with_the_pool(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> NoReturn:
        raise InvalidArgument("planted")

    before = set(threading.enumerate())
    monkeypatch.setattr(*port.adapters_read_at_start(), fails)
    keys = {**SMALL, "model.path": str(tiny_model), "engine.warmup": False}
    with pytest.raises(InvalidArgument, match="planted"):
        build.build(config.load(None, keys), progress=False)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("jlora-copies")}, left


def test_a_start_that_fails_late_frees_the_device_though_its_error_is_kept(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """A notebook keeps the last error, whose traceback holds the start's arrays."""

    def fails(*_: object) -> NoReturn:
        raise InvalidArgument("planted")

    monkeypatch.setattr(*port.adapters_read_at_start(), fails)
    before = {id(array) for array in jax.live_arrays()}
    with pytest.raises(InvalidArgument, match="planted") as kept:
        build.build(config.load(None, {**SMALL, "model.path": str(tiny_model), "engine.warmup": False}), progress=False)
    left = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before and not array.is_deleted())
    assert kept.tb and left < WEIGHTS // 10


def test_a_host_tier_of_a_given_size_is_checked_before_the_weights(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[object] = []
    monkeypatch.setattr(checkpoint, "load_params", lambda *args, **_: read.append(args))
    for size in ({"cache.host_gib": 100_000}, {"cache.host_blocks": 1 << 50}):
        keys = {**SMALL, "model.path": str(tiny_model), "engine.warmup": False, **size}
        with pytest.raises(ConfigError, match="the host tier of .* lower cache.host_blocks or cache.host_gib"):
            build.build(config.load(None, keys), progress=False)
    assert not read


def test_64_bit_programs_are_refused(tiny_model: Path):
    keys = {**SMALL, "model.path": str(tiny_model)}
    with jax.enable_x64(True), pytest.raises(FailedPrecondition, match="^jax_enable_x64 = True: must be False"):
        build.build(config.load(None, keys), progress=False)


@pytest.mark.parametrize(("backend", "share", "steady"), [("cpu", 1 / 4, 896), ("gpu", 0.85, 924)])
def test_free_memory_that_differs_a_little_gives_the_same_programs(
    backend: str, share: float, steady: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rooms = [math.ceil(blocks * BLOCK / share) for blocks in (924, 925, 926, 927)]
    assert {chosen(WEIGHTS + room).blocks - 1 for room in rooms} == {steady}


START = """
import os, sys
from jax._src import xla_bridge
from jlora import LLM, config
from jlora.engine import build
from jlora.serve import launcher

def look(tp):
    print(xla_bridge.backends_are_initialized(), os.environ["XLA_CLIENT_MEM_FRACTION"], flush=True)
    os._exit(0)

build.sharding.make_mesh = look
launcher.load(config.load(None, {"model.path": sys.argv[1], "serve.compile_cache": ""}))
"""


def test_a_server_tells_jax_how_much_of_a_gpu_to_take_before_jax_looks_for_one(tiny_model: Path):
    env = {name: value for name, value in os.environ.items() if name not in machine.GPU_SHARES}
    command = [sys.executable, "-c", START, str(tiny_model)]
    assert subprocess.run(command, env=env, capture_output=True, text=True).stdout == "False 0.92\n"


@pytest.mark.parametrize("platform, share", [("cpu", 4), ("gpu", 2), ("tpu", 2)])
def test_beside_an_accelerator_the_host_tier_is_half_of_the_memory(
    platform: str, share: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sizing, "available_bytes", lambda: 400 * BLOCK)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    layout = PoolLayout.of(SPEC, 101, BLOCK_TOKENS, 1)
    assert sizing.choose_host_blocks(config.load(None, {}), layout, [3]) == 400 // share
    assert sizing.choose_host_blocks(config.load(None, {"cache.host_blocks": 7}), layout, [3]) == 7


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"cache.host_blocks": 9}, "3 of 3 adapters are in host memory"),
        ({"cache.host_blocks": 5}, "1 of 3 .*, and 2 stay on the disk .* the host tier has .* raise cache.host_blocks"),
        ({"cache.host_gib": 5.5 * BLOCK / 2**30}, "1 of 3 .*, and 2 stay on the disk .*; raise cache.host_gib"),
        ({"adapters.lazy": True}, "0 of 3 .*, and 3 stay on the disk .*; adapters.lazy=false .*"),
    ],
)
def test_a_start_says_how_many_adapters_are_in_memory_and_which_key_changes_that(
    keys: dict[str, Any],
    line: str,
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    for seed in range(3):
        _make.make_adapter(tmp_path / f"a{seed}", SPEC, seed)  # of two blocks: q's and v's
    keys = {"cache.block_tokens": BLOCK_TOKENS, "adapters.dir": str(tmp_path), "engine.warmup": False, **keys}
    with caplog.at_level("INFO"):
        built = build.build(config.load(None, {**SMALL, "model.path": str(tiny_model), **keys}), progress=False)
    built.engine.close()
    said = [message for message in caplog.messages if "adapters are in host memory" in message]
    assert len(said) == 1 and re.fullmatch(line, said[0]), said


def test_a_start_tells_once_what_of_the_models_and_an_adapters_files_it_does_not_use(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model, adapter = tmp_path / "model", _make.make_adapter(tmp_path / "a", SPEC)
    shutil.copytree(tiny_model, model)
    for directory, end in ((model, "</s>"), (adapter, "<|im_end|>")):
        _make.write_json(directory / "tokenizer_config.json", {"eos_token": end})
    _make.write_json(model / "generation_config.json", {"eos_token_id": 2, "repetition_penalty": 1.5})
    keys = {"cache.block_tokens": BLOCK_TOKENS, "engine.warmup": False, "adapters.paths": {"a": str(adapter)}}
    built = build.build(config.load(None, {**SMALL, "model.path": str(model), **keys}), progress=False)
    built.engine.close()
    for said in ("repetition_penalty = 1.5", 'adapter a: its own eos_token is "<|im_end|>"'):
        assert sum(said in message for message in caplog.messages) == 1
