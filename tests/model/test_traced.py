"""Traced programs on the disk: found again by the same program alone, and only whole."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.engine import compile_cache
from jlora.errors import ConfigError
from jlora.model import traced
from jlora.model.packed import Packed
from jlora.model.traced import FOLDER, Traced
from tests.engine._replica import Running
from tests.engine.test_engine import BASE, GREEDY, Request, config, serve, tokens
from tests.port import sources_of_programs

X = jnp.arange(4.0)


class Program:
    """Scales an array, and counts how often it is traced."""

    def __init__(self, scale: float = 2.0):
        self.scale, self.traces = scale, 0

    def __call__(self, x: jax.Array) -> jax.Array:
        self.traces += 1
        return x * self.scale


def run(directory: Path, program: Program, x: Any = X, facts: object = "facts") -> list[float]:
    """As a process of its own would: with a fresh jit."""
    return jax.jit(Traced(directory, facts)("scale", program))(x).tolist()


def test_a_program_is_traced_once_for_all_processes(tmp_path: Path):
    first, second = Program(), Program()
    assert run(tmp_path, first) == run(tmp_path, second) == [0.0, 2.0, 4.0, 6.0]
    assert (first.traces, second.traces) == (1, 0)


def write_source(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "model").mkdir()
    (directory / "model" / "step.py").write_text("changed")
    monkeypatch.setattr(traced, "ROOT", directory)


def test_a_process_older_than_its_files_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it runs is not what the files say, so a later process must not find it."""
    write_source(tmp_path, monkeypatch)
    first, second = Program(), Program()
    assert run(tmp_path, first) == run(tmp_path, second) == [0.0, 2.0, 4.0, 6.0]
    assert (first.traces, second.traces) == (1, 1) and not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("other", ["facts", "shape", "type", "source", "version", "setting", "platform", "flags"])
def test_another_program_is_never_found(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path, Program())
    x = {"shape": jnp.arange(5.0), "type": jnp.arange(4)}.get(other, X)
    if other == "source":
        write_source(tmp_path, monkeypatch)
        monkeypatch.setattr(traced, "LOADED", sources_of_programs())
    if other == "version":
        monkeypatch.setattr(jax, "__version__", "99.0")
    if other == "platform":
        chip = SimpleNamespace(platform="tpu", device_kind="TPU v5e", client=jax.devices()[0].client)
        monkeypatch.setattr(jax, "devices", lambda: [chip])
    if other == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_other")
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest" if other == "setting" else before)
    try:
        program = Program(3.0)
        assert run(tmp_path, program, x, "other" if other == "facts" else "facts") == (3 * x).tolist()
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert program.traces == 1


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:50],
    "one byte short": lambda data: data[:-1],
    "zeros": lambda data: data[:-9] + bytes(9),
    "another format": lambda data: hashlib.sha256(b"of tomorrow").digest() + b"of tomorrow",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_traced_again_and_replaced(damage: Any, tmp_path: Path):
    run(tmp_path, Program())
    (entry,) = (tmp_path / FOLDER).iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    again, after = Program(), Program()
    assert run(tmp_path, again) == run(tmp_path, after) == [0.0, 2.0, 4.0, 6.0]
    assert (again.traces, after.traces) == (1, 0) and [entry] == list((tmp_path / FOLDER).iterdir())


def test_records_of_other_fields_are_other_programs(tmp_path: Path):
    """Their arrays have equal shapes; only the record's type says what the words mean."""
    a, b = np.dtype([("x", "int32"), ("y", "int32")]), np.dtype([("y", "int32"), ("x", "int32")])
    for kind, x in ((a, 1), (b, 2), (a, 1)):
        program = jax.jit(Traced(tmp_path)("x", lambda record: record.fields()["x"]))
        assert program(Packed(np.array([1, 2], np.int32), kind)) == x


def test_a_directory_that_cannot_be_written_still_serves_and_one_warning_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / FOLDER).write_text("a file")
    wrap = Traced(tmp_path)
    for name in ("one", "two"):
        assert jax.jit(wrap(name, Program()))(X).tolist() == [0.0, 2.0, 4.0, 6.0]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith(f"{tmp_path / FOLDER} cannot be written, so every start traces")


@pytest.mark.parametrize(
    "part", [(traced.export, "export"), (traced.export.Exported, "serialize")], ids=lambda part: part[1]
)
def test_a_program_that_cannot_be_exported_runs_all_the_same_and_one_warning_says_so(
    part: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(*_: object) -> NoReturn:
        raise RuntimeError("failed to downgrade\n  to a version that older readers know")

    monkeypatch.setattr(*part, fails)
    wrap = Traced(tmp_path)
    for name in ("one", "two"):
        assert jax.jit(wrap(name, Program()))(X).tolist() == [0.0, 2.0, 4.0, 6.0]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.endswith("RuntimeError: failed to downgrade") and "program one" in warning
    assert not (tmp_path / FOLDER).exists()


def test_a_fault_of_the_program_itself_is_raised(tmp_path: Path):
    def program(x: jax.Array) -> NoReturn:
        raise ConfigError("tiles do not fit")

    with pytest.raises(ConfigError, match="tiles do not fit"):
        jax.jit(Traced(tmp_path)("x", program))(X)


def test_what_was_read_updates_a_donated_argument_in_place(tmp_path: Path):
    x = np.zeros((1024, 256), np.float32)
    for _ in range(2):  # traced, then read
        update = Traced(tmp_path)("update", lambda pool, row: pool.at[row].set(1.0))
        compiled = jax.jit(update, donate_argnums=0).lower(x, np.int32(3)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == x.nbytes and memory.temp_size_in_bytes < x.nbytes / 20


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_second_server_traces_nothing_and_answers_alike(
    tp: int, own_programs, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = jax.config.jax_compilation_cache_dir
    few = {"engine.max_seqs": 2, "engine.max_step_tokens": 32, "engine.one_row": "off"}
    settings = {**BASE, **few, "model.path": str(tiny_model), "model.tp": tp, "serve.compile_cache": str(tmp_path)}
    found, asked = [], []
    try:
        for _ in range(2):
            replica = Running(config.load(None, settings))
            try:
                found.append(tokens(serve(replica, [Request("r", (3, 4, 5), GREEDY)])["r"]))
                assert replica.stats().compiles_after_warmup == 0
            finally:
                replica.stop()
            monkeypatch.setattr(traced.export, "export", lambda *_: asked.append("traced") or pytest.fail("traced"))
    finally:
        compile_cache.use(str(before))
    assert found[0] == found[1] and asked == []
