"""The directory of compiled programs: a damaged entry costs one slow start, not all."""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jlora import config as configuration
from jlora.engine import compile_cache
from jlora.engine.build import compiled_for
from jlora.layout import PoolLayout
from jlora.pallas.cases import TINY
from jlora.replica import ReplicaInfo
from jlora.types import Request
from jlora.validation import Limits
from tests._disk import fill
from tests.engine.test_engine import GREEDY, running, serve, tokens

UNKNOWN = "what the programs were compiled for is unknown"
KEYS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def events() -> Iterator[Counter[str]]:
    """What jax's cache does, by event; its settings are restored."""
    before, seen = {key: getattr(jax.config, key) for key in KEYS}, Counter[str]()

    def heard(event: str, **_: object) -> None:
        seen[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(heard)
    yield seen
    jax.monitoring.unregister_event_listener(heard)
    for key, value in before.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()


def started(directory: Path, events: Counter[str]) -> tuple[int, int]:
    """Starts with this cache and compiles two programs: how many of them it had, and how many not."""
    compilation_cache.reset_cache()
    jax.clear_caches()
    compile_cache.use(str(directory))
    before = Counter(events)
    for scale in (2.5, 3.5):
        jax.jit(lambda x, scale=scale: x * scale + jnp.sin(x)).lower(jnp.ones(7)).compile()
    return events["cache_hits"] - before["cache_hits"], events["cache_misses"] - before["cache_misses"]


@pytest.mark.parametrize("kept", [0, 1, 100, -1], ids=lambda kept: f"{kept} bytes")
def test_a_truncated_entry_is_compiled_once_and_found_from_then_on(tmp_path: Path, events: Counter[str], kept: int):
    def mine() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.glob("*lambda*-cache")}

    started(tmp_path, events)
    hits, misses = started(tmp_path, events)
    assert hits >= 2 and not misses
    name, data = sorted(mine().items())[0]
    (tmp_path / name).write_bytes(data[:kept])
    assert started(tmp_path, events) == (hits - 1, 1)
    assert len(mine()[name]) > 200
    assert started(tmp_path, events) == (hits, 0)


def test_only_entries_that_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for i in range(5):
        (tmp_path / f"{i}-cache").write_bytes(zlib.compress(b"program" * 9))
    (tmp_path / "notes.txt").write_text("no entry")
    assert compile_cache.clean(tmp_path) == []
    read, real = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    later = time.time() + 1
    os.utime(tmp_path / compile_cache.STAMP, (later, later))
    assert compile_cache.clean(tmp_path) == [] and read == []
    (tmp_path / "3-cache").write_bytes(b"")
    (tmp_path / "6-cache").write_bytes(compile_cache.ZSTD + b"cut")
    os.utime(tmp_path / "3-cache", (later + 1, later + 1))
    os.utime(tmp_path / "6-cache", (later + 1, later + 1))
    os.utime(tmp_path / compile_cache.STAMP, (later, later))
    assert "3-cache" in compile_cache.clean(tmp_path) and sorted(read) == ["3-cache", "6-cache"]
    assert {"0-cache", "notes.txt"} <= {path.name for path in tmp_path.iterdir()}


def test_two_replicas_that_start_at_once_both_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace, others = os.replace, [lambda: compile_cache.clean(tmp_path)]

    def meanwhile(*names: object) -> None:
        for other in others[:]:
            others.clear()
            other()
        replace(*names)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "replace", meanwhile)
    (tmp_path / "damaged-cache").write_bytes(b"x")
    assert compile_cache.clean(tmp_path) == ["damaged-cache"]
    assert [path.name for path in tmp_path.iterdir()] == [compile_cache.STAMP]


def test_an_entry_that_vanishes_meanwhile_costs_the_others_no_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = Path.read_bytes

    def vanishes(path: Path) -> bytes:
        if path.name == "gone-cache":
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", vanishes)
    for name in ("a-cache", "gone-cache", "z-cache"):
        (tmp_path / name).write_bytes(b"x")
    assert sorted(compile_cache.clean(tmp_path)) == ["a-cache", "z-cache"]
    assert [path.name for path in tmp_path.iterdir()] == [compile_cache.STAMP]


def test_a_look_that_fails_leaves_no_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(path: Path) -> bytes:
        raise OSError("no such device")

    monkeypatch.setattr(Path, "read_bytes", broken)
    (tmp_path / "a-cache").write_bytes(b"x")
    with pytest.raises(OSError, match="no such device"):
        compile_cache.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a-cache"]


def test_a_directory_that_is_missing_or_cannot_be_written_is_no_reason_to_stop(tmp_path: Path, events: Counter[str]):
    assert compile_cache.clean(tmp_path / "none") == []
    (tmp_path / "file").write_text("")
    assert compile_cache.use(str(tmp_path / "file")) is None
    (tmp_path / compile_cache.STAMP).mkdir()
    compile_cache.use(str(tmp_path))


def test_a_full_disk_is_told_once_and_its_entries_are_read(
    tmp_path: Path, events: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    started(tmp_path, events)

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert started(tmp_path, events)[1] == 0
    assert started(tmp_path / "other", events)[0] == 0
    assert not list((tmp_path / "other").glob("*-cache"))  # jax would warn of each that it cannot write
    first, other = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"serve.compile_cache: {tmp_path} cannot be written, so every start compiles again")
    assert first.endswith(": No space left on device") and str(tmp_path / "other") in other


@pytest.mark.parametrize("text", ["", '{"jax": "1', "[1, 2]", "7", "\x80"], ids=["empty", "cut", "list", "7", "bytes"])
def test_a_damaged_seal_is_a_difference_and_no_reason_to_stop(tmp_path: Path, text: str):
    (tmp_path / compile_cache.FACTS).write_text(text, encoding="latin-1")
    assert compile_cache.differences(tmp_path, {"jax": "1.0"}) == [f"{compile_cache.FACTS} is damaged: {UNKNOWN}"]


def test_a_seal_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compile_cache.seal(tmp_path, {"jax": "1.0"})
    write = Path.write_text

    def full(path: Path, text: str) -> None:
        write(path, text[:9])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        compile_cache.seal(tmp_path, {"jax": "2.0"})
    assert compile_cache.differences(tmp_path, {"jax": "1.0"}) == []


@pytest.mark.parametrize("other", ["width", "layers", "heads", "rope_theta", "max_rank", "engine.cold_start", "merges"])
def test_the_seal_tells_servers_apart_whose_programs_differ(tmp_path: Path, other: str):
    def facts(changed: str) -> dict[str, object]:
        keys = {"max_rank": ("adapters.max_rank", 7), "engine.cold_start": ("engine.cold_start", "cpu")}
        keys |= {"merges": ("engine.merge", "auto")}
        config = configuration.load(None, dict([keys[changed]] if changed in keys else []))
        spec = replace(TINY, **{changed: 1 + getattr(TINY, changed)}) if hasattr(TINY, changed) else TINY
        info = ReplicaInfo("tiny", spec.dtype, Limits(1, 1, 1), (), 16, 1, "cpu", ("cpu 0",), config)
        return compiled_for(info, spec, PoolLayout.of(TINY, 9, 16))

    compile_cache.seal(tmp_path, facts(""))
    assert compile_cache.differences(tmp_path, facts("")) == []
    (found,) = compile_cache.differences(tmp_path, facts(other))
    assert found.startswith(f"{other} is ")
    assert {"jaxlib", "runtime", "device"} <= facts("").keys() and facts("")["device"] != "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
def test_an_engine_starts_and_answers_while_the_disk_is_full(tiny_model: Path, small_disk: Path, events: Counter[str]):
    """It leaves empty entries, which the next start removes and writes again."""

    def answered() -> list[int]:
        compilation_cache.reset_cache()
        jax.clear_caches()
        few = {"engine__max_seqs": 1, "engine__max_step_tokens": 4, "engine__one_row": "off"}
        with running(tiny_model, {}, serve__compile_cache=str(small_disk), **few) as service:
            return tokens(serve(service, [Request("r", (5, 6, 7), GREEDY)])["r"])

    filler = fill(small_disk)
    found = answered()
    assert len(found) == GREEDY.max_tokens and not any(len(path.read_bytes()) for path in small_disk.glob("*-cache"))
    filler.unlink()
    assert answered() == found
    assert any(len(path.read_bytes()) for path in small_disk.glob("*-cache"))
