"""Weights land where they belong, whole, whatever they come from; damage is noticed and named."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlora.errors import AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument, JloraError, NotFound
from jlora.model import checkpoint, llama, sharding
from jlora.model.checkpoint import convert, load_params, read_spec
from jlora.model.hub import resolve
from jlora.model.place import Listed
from jlora.model.spec import ModelSpec
from tests import _make, port
from tests.adapters._closed import Closed

WEIGHTS, INDEX = checkpoint.SINGLE, checkpoint.INDEX
Q0 = "model.layers.0.self_attn.q_proj.weight"


def load(directory: Path, stacked: bool = False, tp: int = 1, dtype: str = "auto") -> llama.Params:
    spec = read_spec(directory, dtype)
    shardings = sharding.shardings(spec, sharding.make_mesh(tp))
    return load_params(directory, spec, shardings, stacked=stacked, progress=False)


def expected(spec: ModelSpec, seed: int = 0) -> llama.Params:
    """The pytree written out by hand from the tensors that `make_model` writes."""
    tensors = _make.model_tensors(spec, seed)

    def layer(index: int) -> dict[str, np.ndarray]:
        prefix = f"model.layers.{index}"
        return {
            "attn_norm": tensors[f"{prefix}.input_layernorm.weight"],
            "mlp_norm": tensors[f"{prefix}.post_attention_layernorm.weight"],
            **{name: tensors[f"{prefix}.{module}.weight"].T for name, module in _make.MODULES.items()},
        }

    params = {
        "embed": tensors["model.embed_tokens.weight"],
        "layers": [layer(index) for index in range(spec.layers)],
        "norm": tensors["model.norm.weight"],
    }
    return params if spec.tied else {**params, "head": tensors["lm_head.weight"].T}


def assert_same(got: llama.Params, want: llama.Params) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def edit(directory: Path, change: Callable[[dict[str, np.ndarray]], object], file: str = WEIGHTS) -> Path:
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model of its own, to be damaged."""
    _make.make_model(tmp_path / "models" / "tiny")
    return tmp_path / "models" / "tiny"


def refused(directory: Path, error: type[JloraError], *words: str) -> None:
    with pytest.raises(error) as caught:
        load(directory)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert str(directory.parent) not in message


# --- right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_weight_lands_in_its_place(tmp_path: Path, shards: int, tied: bool):
    spec = _make.make_model(tmp_path / "m", shards=shards, tied=tied)
    want = expected(spec)
    assert_same(load(tmp_path / "m"), want)
    assert_same(load(tmp_path / "m", stacked=True), llama.stack_layers(want))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("stacked", [False, True])
def test_each_device_gets_its_slice_of_the_same_weights(tmp_path: Path, tp: int, stacked: bool):
    spec = _make.make_model(tmp_path / "m", kv_heads=4)
    params = load(tmp_path / "m", stacked=stacked, tp=tp)
    want = expected(spec)
    assert_same(params, llama.stack_layers(want) if stacked else want)
    q = params["layers"]["q"] if stacked else params["layers"][1]["q"]
    assert len(q.addressable_shards) == tp
    assert q.addressable_shards[0].data.shape[-2:] == (spec.width, spec.heads * spec.head_dim // tp)
    assert params["head"].addressable_shards[0].data.shape == (spec.width // tp, spec.vocab)


@pytest.mark.parametrize(
    "stored, served", [(np.float32, "bfloat16"), (np.float16, "bfloat16"), (ml_dtypes.bfloat16, "float32")]
)
def test_stored_dtypes_are_cast_to_the_served_one(model: Path, stored: Any, served: str):
    edit(model, lambda tensors: tensors.update({k: v.astype(stored) for k, v in tensors.items()}))
    want = jax.tree.map(lambda x: x.astype(stored).astype(served), expected(_make.tiny_spec()))
    for stacked in (False, True):
        params = load(model, stacked=stacked, dtype=served)
        assert {str(x.dtype) for x in jax.tree.leaves(params)} == {served}
        assert_same(params, llama.stack_layers(want) if stacked else want)


def test_known_leftovers_are_ignored(tmp_path: Path):
    spec = _make.make_model(tmp_path / "m", tied=True)
    extra = {
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": _make.model_tensors(spec)["model.embed_tokens.weight"],
    }
    assert_same(load(edit(tmp_path / "m", lambda tensors: tensors.update(extra))), expected(spec))


def test_a_head_of_its_own_is_not_lost_where_the_configuration_ties_it(tmp_path: Path):
    spec = _make.make_model(tmp_path / "m", tied=True)
    head = _make.model_tensors(spec)["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    edit(tmp_path / "m", lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(InvalidArgument, match="lm_head.weight differs.*tie_word_embeddings"):
        load(tmp_path / "m")


@pytest.mark.parametrize("stacked", [False, True])
def test_the_host_holds_three_tensors_at_most_and_never_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool
):
    """The one just read, the one on its way, and at worst the one before that, while it is let go."""
    _make.make_model(tmp_path / "m", layers=6, shards=2)
    read, alive, held = getattr(*port.tensor_read()), weakref.WeakSet(), []

    class Watched(np.ndarray):
        """Can be put in a set."""

        __hash__ = object.__hash__

    def watched(self: Any) -> np.ndarray:
        array = read(self).view(Watched)
        alive.add(array)
        held.append([one.nbytes for one in alive])
        return array

    monkeypatch.setattr(*port.tensor_read(), watched)
    load(tmp_path / "m", stacked=stacked)
    tensors = [tensor.nbytes for tensor in _make.model_tensors(_make.tiny_spec(layers=6)).values()]
    largest_shard = max(file.stat().st_size for file in (tmp_path / "m").glob("*.safetensors"))
    assert len(held) == len(tensors) and max(map(len, held)) <= 3
    # A shard is many times its largest tensor, as in real models: the peak is far below it.
    assert 0 < max(map(sum, held)) <= 3 * max(tensors) < 0.5 * largest_shard


def test_the_largest_tensors_are_placed_while_the_device_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A weight is on its device twice while it is placed."""
    _make.make_model(tmp_path / "m", layers=3, shards=2)
    order, put = [], Listed.put
    monkeypatch.setattr(Listed, "put", lambda into, name, *rest: (order.append(name), put(into, name, *rest))[1])
    load(tmp_path / "m")
    outside = [name for name in order if ".layers." not in name]
    assert order[: len(outside)] == outside and {"lm_head.weight", "model.embed_tokens.weight"} <= set(outside)


def test_the_progress_bar_counts_bytes_and_can_be_turned_off(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    load(tiny_model)
    assert capsys.readouterr().err == ""
    spec = read_spec(tiny_model)
    load_params(tiny_model, spec, sharding.shardings(spec, sharding.make_mesh(1)), stacked=False, progress=True)
    err = capsys.readouterr().err
    assert "weights: 100%" in err and f"{spec.parameters * 4 / 1000:.1f}k" in err


# --- damaged or wrong -------------------------------------------------------------------------


def test_missing_extra_and_misshapen_tensors_are_named(model: Path):
    original = (model / WEIGHTS).read_bytes()

    def check(change: Callable[[dict[str, np.ndarray]], object], *words: str) -> None:
        (model / WEIGHTS).write_bytes(original)
        refused(edit(model, change), InvalidArgument, *words)

    check(lambda t: t.pop(Q0), "'tiny'", Q0, "missing")
    check(lambda t: t.pop("lm_head.weight"), "lm_head.weight", "missing")
    check(
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[Q0]}),
        "model.layers.2.mlp.up_proj.weight",
        "not part",
    )
    check(lambda t: t.update({Q0.replace("weight", "bias"): t[Q0][0]}), "q_proj.bias", "not part")
    check(lambda t: t.update({Q0: t[Q0][:-1]}), Q0, "[31, 32]", "[32, 32]")
    check(lambda t: t.update({Q0: t[Q0].reshape(-1)}), Q0, "[1024]", "[32, 32]")
    check(lambda t: t.update({Q0: t[Q0].astype(np.int8)}), Q0, "I8", "F32")
    check(lambda t: t.update({Q0: t[Q0].astype(np.float64)}), Q0, "F64")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_weight_that_is_not_finite_is_data_loss(model: Path, value: float, stacked: bool):
    edit(model, lambda tensors: np.put(tensors[Q0], 100, value))
    with pytest.raises(DataLoss, match=f"{Q0}.*NaN or infinity"):
        load(model, stacked=stacked)


def test_truncated_files_are_data_loss_before_any_weight_is_read(model: Path, monkeypatch: pytest.MonkeyPatch):
    data = (model / WEIGHTS).read_bytes()
    monkeypatch.setattr(*port.tensor_read(), lambda self: pytest.fail("read a weight of a damaged file"))
    for length in (0, 7, 8, 100, 8 + int.from_bytes(data[:8], "little"), len(data) // 2, len(data) - 1):
        (model / WEIGHTS).write_bytes(data[:length])
        refused(model, DataLoss, WEIGHTS, "damaged")


def test_a_flipped_bit_in_the_header_never_passes_unnoticed(model: Path):
    data = (model / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    start = data.index(b'"model.embed_tokens.weight"')
    spec = read_spec(model)
    for at in [*range(8), *range(start, min(end, start + 400))]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        (model / WEIGHTS).write_bytes(flipped)
        with pytest.raises(JloraError), ExitStack() as files:
            port.open_weights(model, spec, files)


def test_an_index_must_name_files_beside_it(tmp_path: Path):
    directory = tmp_path / "models" / "sharded"
    _make.make_model(directory, shards=2)
    index = json.loads((directory / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    for name in ("../other.safetensors", "/etc/passwd", 3, ".."):
        _make.write_json(directory / INDEX, {"weight_map": {**index["weight_map"], Q0: name}})
        refused(directory, InvalidArgument, INDEX, "weight_map")
    _make.write_json(directory / INDEX, {"weight_map": [first]})
    refused(directory, InvalidArgument, INDEX, "weight_map")
    _make.write_json(directory / INDEX, index)
    tensors = load_file(directory / first)
    edit(directory, lambda t: t.update({Q0: tensors.get(Q0, np.zeros((32, 32), np.float32))}), second)
    edit(directory, lambda t: t.update({Q0: np.zeros((32, 32), np.float32)}), first)
    refused(directory, InvalidArgument, Q0, first, second)
    (directory / second).unlink()
    refused(directory, NotFound, INDEX, second, "missing")
    (directory / INDEX).write_text("{")
    refused(directory, DataLoss, INDEX)


def test_pickled_weights_are_refused_and_absent_ones_not_found(model: Path):
    (model / WEIGHTS).unlink()
    refused(model, NotFound, "'tiny'", WEIGHTS)
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(model, InvalidArgument, "pytorch_model.bin", "not opened")


# --- converted --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    _make.make_model(root / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (root / "tiny" / name).write_text("{}")
    return convert(root / "tiny", root / "converted", progress=False)


def test_a_converted_model_is_the_same_model(converted: Path):
    assert read_spec(converted) == _make.tiny_spec()
    want = expected(_make.tiny_spec())
    assert_same(load(converted), want)
    assert_same(load(converted, stacked=True, tp=2), llama.stack_layers(want))
    half = load(converted, dtype="bfloat16", tp=2)
    assert_same(half, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), want))
    assert len(half["layers"][0]["q"].addressable_shards) == 2


def test_a_converted_model_keeps_its_tokenizer_and_its_limits(converted: Path):
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {p.name for p in converted.iterdir()}
    assert not (converted / WEIGHTS).exists()
    assert read_spec(converted, max_model_len=64).max_len == 64
    with pytest.raises(InvalidArgument, match=r"model\.max_model_len = 500"):
        read_spec(converted, max_model_len=500)


def test_a_model_is_converted_for_a_shorter_context(tiny_model: Path, tmp_path: Path):
    directory = convert(tiny_model, tmp_path / "short", progress=False, max_model_len=64)
    assert read_spec(directory).max_len == 64
    with pytest.raises(InvalidArgument, match=r"model\.max_model_len = 65: must be at most the model's own 64"):
        read_spec(directory, max_model_len=65)


@pytest.mark.parametrize("length", [-1, 1])
def test_a_context_in_which_nothing_fits_is_refused(tiny_model: Path, tmp_path: Path, length: int):
    with pytest.raises(InvalidArgument, match=rf"model\.max_model_len = {length}: must be 0 or at least 2"):
        convert(tiny_model, tmp_path / "new", progress=False, max_model_len=length)
    assert not (tmp_path / "new").exists()


def test_convert_never_writes_over_what_is_there(tiny_model: Path, tmp_path: Path, converted: Path):
    for target in (converted, converted / "tokenizer.json"):
        with pytest.raises(AlreadyExists, match=target.name):
            convert(tiny_model, target, progress=False)
    (tmp_path / "source").mkdir()
    with pytest.raises(NotFound, match=r"config\.json"):
        convert(tmp_path / "source", tmp_path / "target", progress=False)
    assert not (tmp_path / "target").exists()


def test_a_full_disk_is_told_before_the_weights_are_read(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(FailedPrecondition, match=r"the weights take .* MB, its disk has 0.0 MB free"):
        convert(tiny_model, tmp_path / "new", progress=False)


def test_a_disk_that_fills_meanwhile_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(self: Any, directory: Path, params: Any) -> None:
        (directory.parent / "params.orbax-checkpoint-tmp").mkdir()
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 11 bytes to file 7: No space left [os_error_code='28']")

    with monkeypatch.context() as patched:
        patched.setattr("orbax.checkpoint.Checkpointer.save", full)
        with pytest.raises(FailedPrecondition, match=r"cannot be written \(No space left\)"):
            convert(tiny_model, tmp_path / "new", progress=False)
    assert not any((tmp_path / "new").iterdir())
    assert convert(tiny_model, tmp_path / "new", progress=False)


def test_a_damaged_conversion_is_data_loss(tiny_model: Path, tmp_path: Path):
    directory = convert(tiny_model, tmp_path / "models" / "converted", progress=False)
    meta = directory / "jlora_model.json"
    good = meta.read_text()
    for bad in ("{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "spec": {"vocab": 3}}'):
        meta.write_text(bad)
        with pytest.raises(DataLoss, match=r"jlora_model\.json"):
            read_spec(directory)
    meta.write_text(good)
    for file in _files(directory / "params"):
        file.write_bytes(b"")
    refused(directory, DataLoss, "'converted'", "params")


def _files(directory: Path) -> Iterator[Path]:
    return (p for p in directory.rglob("*") if p.is_file())


# --- where it comes from ----------------------------------------------------------------------


def test_a_directory_is_taken_as_it_is(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    assert resolve(tiny_model) == tiny_model
    monkeypatch.chdir(tiny_model.parent)
    assert resolve("tiny").samefile(tiny_model)
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    assert resolve("~/tiny") == tiny_model


def test_a_hub_id_is_downloaded_without_other_formats(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    wanted: list[str] = []

    def download(repo_id: str, **patterns: Any) -> str:
        assert repo_id == "org/tiny-1.1B"
        files = [
            "config.json", "generation_config.json", INDEX, "model-00001-of-00001.safetensors", "tokenizer.json",
            "chat_template.jinja", "pytorch_model.bin", "original/params.json", "original/consolidated.00.pth",
            "consolidated.safetensors", "onnx/model.safetensors", "README.md",
        ]  # fmt: skip
        wanted.extend(filter_repo_objects(files, **patterns))
        return str(tiny_model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/tiny-1.1B") == tiny_model
    assert wanted == ["config.json", "generation_config.json", INDEX, "model-00001-of-00001.safetensors",
                      "tokenizer.json", "chat_template.jinja"]  # fmt: skip


def test_a_hub_that_does_not_answer_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repo_id: str, **patterns: Any) -> str:
        raise LocalEntryNotFoundError("Cannot reach the hub\nand a long explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(NotFound) as caught:
        resolve("org/absent")
    assert str(caught.value) == (
        "model.path = 'org/absent': is not a directory, and the hub download failed: Cannot reach the hub"
    )


def test_an_error_of_the_hubs_http_library_is_one_clear_line_too(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def proxied(repo_id: str, **patterns: Any) -> str:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", proxied)
    with pytest.raises(NotFound, match="model.path = 'org/absent': .*the hub download failed: Using SOCKS proxy"):
        resolve("org/absent")


def test_a_directory_that_may_not_be_entered_is_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "stat", closed := Closed("/root/model"))
    with pytest.raises(NotFound, match="model.path = '/root/model'"):
        resolve("/root/model")
    assert closed.asked


NO_ID = ["/no/such/dir", "./absent", "../absent", "a/b/c", "", "org/na me", "~nobody-here/x", "a/model.safetensors"]


@pytest.mark.parametrize("name", NO_ID)
def test_what_cannot_be_a_hub_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(NotFound, match="is not a directory$"):
        resolve(name)


def test_a_file_in_place_of_its_directory_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "model.gguf").touch()
    with pytest.raises(NotFound, match="model.path = 'llama/model.gguf': is a file; name the directory"):
        resolve("llama/model.gguf")


def test_a_fingerprint_is_of_the_weights_and_not_of_their_place(tmp_path: Path):
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        _make.make_model(tmp_path / name, seed=seed)
    one, same, other = (checkpoint.fingerprint(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other and len(one) == 64
    (tmp_path / "one" / WEIGHTS).unlink()
    assert checkpoint.fingerprint(tmp_path / "one") == ""  # loading says why
