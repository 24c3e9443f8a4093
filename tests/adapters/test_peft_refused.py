"""The PEFT reader: what it cannot serve it refuses by name, and damage is noticed."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from jlora.adapters.peft import CONFIG, WEIGHTS, read_peft
from jlora.errors import Busy, DataLoss, InvalidArgument, JloraError, NotFound
from jlora.ports import DiskFiles
from tests import _make
from tests.adapters._peft import SPEC, edit_tensors, key, read, refused


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["mlp.experts"]),
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"corda_method": "ipm"}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"buffer_size": 1}),
        ("velora_config", {"scale": 1.0}),
        ("megatron_config", {"x": 1}),
        ("ensure_weight_tying", True),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
        ("an_option_of_tomorrow", 1),
        ("an_option_of_tomorrow", 0),
        ("an_option_of_tomorrow", "x"),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_name(tmp_path: Path, name: str, value: Any):
    path = _make.make_adapter(tmp_path / "a", SPEC, **{name: value})
    refused(path, InvalidArgument, f"a/{CONFIG}", name, json.dumps(value), "must be")


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_option_that_says_nothing_is_accepted(tmp_path: Path, value: Any):
    assert read(_make.make_adapter(tmp_path / "a", SPEC, an_option_of_tomorrow=value)).rank == 4


@pytest.mark.parametrize(
    "name, value",
    [
        ("r", 0),
        ("r", -1),
        ("r", 2.5),
        ("r", True),
        ("r", "4"),
        ("r", None),
        ("r", 513),
        ("r", 10**6),
        ("lora_alpha", "x"),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 1e38),
        ("lora_alpha", 10**400),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"(": 2}),
        ("alpha_pattern", {"q_proj": "x"}),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", ""),
        ("target_modules", 5),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", "("),
        ("target_modules", ["no_such"]),
        ("target_modules", "q_proj"),  # a regular expression must match the whole name
        ("exclude_modules", 3),
        ("exclude_modules", "["),
        ("layers_to_transform", "x"),
        ("layers_to_transform", [-1]),
        ("layers_to_transform", [0.5]),
        ("layers_to_transform", [7]),
        ("layers_pattern", "layers"),
        ("layers_pattern", 3),
        ("alora_invocation_tokens", [96]),
        ("alora_invocation_tokens", ["x"]),
        ("alora_invocation_tokens", 5),
        ("base_model_name_or_path", 3),
    ],
)
def test_a_malformed_option_is_refused_by_name(tmp_path: Path, name: str, value: Any):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    _make.edit_json(path / CONFIG, **{name: value})
    expected = "target_modules" if name == "layers_to_transform" and value == [7] else name
    refused(path, InvalidArgument, expected)


@pytest.mark.parametrize("name", ["r", "lora_alpha", "target_modules", "peft_type"])
def test_a_missing_option_is_refused_by_name(tmp_path: Path, name: str):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    config = json.loads((path / CONFIG).read_text())
    del config[name]
    _make.write_json(path / CONFIG, config)
    refused(path, InvalidArgument, name)


def test_layers_to_transform_with_a_regular_expression_is_refused_as_in_peft(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC, target_modules=".*q_proj", layers_to_transform=[0])
    refused(path, InvalidArgument, "layers_to_transform")


@pytest.mark.parametrize(
    "targets, named",
    [
        (["q_proj", "lm_head"], "lm_head"),
        (["embed_tokens"], "model.embed_tokens"),
        (["input_layernorm"], "input_layernorm"),
        (".*mlp.*", "model.layers.0.mlp"),
        (".*", "model"),
    ],
)
def test_modules_other_than_the_seven_projections_are_refused_by_name(tmp_path: Path, targets: Any, named: str):
    refused(_make.make_adapter(tmp_path / "a", SPEC, target_modules=targets), InvalidArgument, "target_modules", named)


def test_a_rank_above_the_limit_is_refused_before_the_weights_are_read(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC, r=9)
    refused(path, InvalidArgument, "r = 9", "at most 8", "adapters.max_rank", max_rank=8)
    assert read(path, max_rank=9).rank == 9
    _make.edit_json(path / CONFIG, r=10**12)
    refused(path, InvalidArgument, "r = 1000000000000")
    _make.edit_json(path / CONFIG, r=9, rank_pattern={"v_proj": 80})
    refused(path, InvalidArgument, "r = 80 for model.layers.0.self_attn.v_proj", "at most 64")


def test_an_alpha_that_overflows_is_refused(tmp_path: Path):
    path = edit_tensors(
        _make.make_adapter(tmp_path / "a", SPEC, lora_alpha=1e29), lambda t: t[key(0, "q", "B")].fill(1e30)
    )
    refused(path, InvalidArgument, "lora_alpha", "at most 1000000")


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(tmp_path: Path):
    def make(name: str, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
        return edit_tensors(_make.make_adapter(tmp_path / name, SPEC), change)

    zeros = np.zeros((4, 32), np.float32)
    refused(make("half", lambda t: t.pop(key(1, "v", "B"))), InvalidArgument, key(1, "v", "B"), "missing")
    refused(make("pair", lambda t: [t.pop(key(1, "v", h)) for h in "AB"]), InvalidArgument, key(1, "v", "A"), "missing")
    for extra in (
        key(0, "k"),  # not a target
        key(3, "q"),  # a layer that the base does not have
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        key(0, "q").replace("lora_A.weight", "lora_magnitude_vector"),
        key(0, "q").replace("lora_A.weight", "lora_B.bias"),
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ):
        refused(make("extra", lambda t, e=extra: t.update({e: zeros})), InvalidArgument, extra)
    twice = key(0, "q").replace(".weight", ".default.weight")
    refused(make("twice", lambda t: t.update({twice: zeros})), InvalidArgument, twice, "same matrix")
    for shape in ((5, 32), (4, 33), (4,), (32, 4), (0, 32), (4, 32, 1)):
        wrong = np.zeros(shape, np.float32)
        refused(
            make("shape", lambda t, w=wrong: t.update({key(0, "q"): w})), InvalidArgument, "q_proj.lora_A", "[4, 32]"
        )
    integers = zeros.astype(np.int8)
    refused(make("dtype", lambda t: t.update({key(0, "q"): integers})), InvalidArgument, key(0, "q"), "I8")


def test_an_adapter_of_a_wider_base_is_refused(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", _make.tiny_spec(layers=3, width=64, head_dim=16))
    refused(path, InvalidArgument, "q_proj.lora_A", "[4, 64]", "[4, 32]")


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, bytes, int]:
    """An adapter of four tensors, its weight file's bytes, and where its header ends."""
    path = _make.make_adapter(tmp_path / "small", SPEC, r=1, targets=("q",), layers_to_transform=[0, 2])
    data = (path / WEIGHTS).read_bytes()
    return path, data, 8 + int.from_bytes(data[:8], "little")


def test_a_truncated_file_is_data_loss_at_any_length(small: tuple[Path, bytes, int]):
    path, data, header = small
    for length in {0, 1, 7, 8, 9, *range(16, header, 37), header - 1, header, header + 1, len(data) - 4, len(data) - 1}:
        (path / WEIGHTS).write_bytes(data[:length])
        refused(path, DataLoss, f"small/{WEIGHTS}", "damaged")
    (path / WEIGHTS).write_bytes(data + b"\0")
    refused(path, DataLoss, "damaged")


def test_no_flipped_bit_in_the_header_changes_the_weights(small: tuple[Path, bytes, int]):
    path, data, header = small
    before = read(path)
    survived = 0
    for at in range(header):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        (path / WEIGHTS).write_bytes(flipped)
        try:
            after = read(path)
        except JloraError:
            continue
        survived += 1
        assert after.digest != before.digest
        for place, (a, b) in before.weights.items():
            np.testing.assert_array_equal(after.weights[place][0], a)
            np.testing.assert_array_equal(after.weights[place][1], b)
    assert survived < header / 10  # padding and the like only


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("half", ["A", "B"])
def test_a_weight_that_is_not_finite_is_data_loss(tmp_path: Path, value: float, half: str):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    edit_tensors(path, lambda tensors: np.put(tensors[key(1, "v", half)], 5, value))
    refused(path, DataLoss, f"model.layers.1.self_attn.v_proj.lora_{half}", "NaN or infinity")


@pytest.mark.parametrize("text", [
    b"", b"{", b"\xff\xfe", b"{'r': 1}", b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}",
    rb'{"base_model_name_or_path": "\ud800"}', rb'{"r": "\uDFFF"}', rb'{"\uD834": 1}',
    b'{"base_model_name_or_path": "\xed\xa0\x80"}',
])  # fmt: skip
def test_a_config_that_is_not_json_is_data_loss(tmp_path: Path, text: bytes):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    (path / CONFIG).write_bytes(text)
    refused(path, DataLoss, CONFIG, "JSON")


def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    (path / CONFIG).write_text("[1]")
    refused(path, InvalidArgument, CONFIG, "object")


def test_pairs_of_surrogates_are_characters(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    text = (path / CONFIG).read_text()
    (path / CONFIG).write_text(text.replace('"tiny"', r'"\ud834\udd1e"', 1))
    read(path)


@pytest.mark.parametrize(("number", "kind"), [
    (errno.EIO, DataLoss), (errno.ESTALE, DataLoss), (errno.EMFILE, Busy), (errno.EACCES, NotFound),
])  # fmt: skip
def test_what_the_system_refuses_is_told_apart(tmp_path: Path, number: int, kind: type[JloraError]):
    class Refusing(DiskFiles):
        def folder(self, directory: str) -> NoReturn:
            raise OSError(number, os.strerror(number))

    path = _make.make_adapter(tmp_path / "a", SPEC)
    with pytest.raises(kind, match=os.strerror(number)):
        read_peft(path, SPEC, 64, files=Refusing())


def test_what_is_not_there_is_not_found(tmp_path: Path):
    refused(tmp_path / "absent", NotFound, "absent")
    refused(tmp_path / "nul\0", NotFound)
    for name in (CONFIG, WEIGHTS):
        path = _make.make_adapter(tmp_path / f"without-{name}", SPEC)
        refused(path / name, NotFound)  # a file is not a directory
        (path / name).unlink()
        refused(path, NotFound, name)
        (path / name).mkdir()
        refused(path, NotFound, name)
        (path / name).rmdir()
        os.mkfifo(path / name)  # opening one would wait for ever
        refused(path, NotFound, name)


class _Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "model.ckpt"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, name: str, beside: bool):
    path, mark = _make.make_adapter(tmp_path / "a", SPEC), tmp_path / "exploded"
    (path / name).write_bytes(pickle.dumps(_Bomb(mark)))
    if not beside:
        (path / WEIGHTS).unlink()
    if beside and not name.startswith("adapter_model"):
        assert read(path).rank == 4  # a trainer's own state, not the adapter's weights
    else:
        refused(path, InvalidArgument, name, "not opened")
    assert not mark.exists()


def test_a_file_far_larger_than_the_adapter_is_not_read(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no disk
    refused(path, DataLoss, WEIGHTS, "damaged", str(1 << 40))
