"""`jlora compile`: a server that starts on the directory compiles nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from jlora.config import Config
from jlora.engine import compile_cache
from jlora.loadgen.server import ServerProcess, look
from jlora.serve import compile
from tests.serve._server import SMALL


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*-cache")}


@pytest.mark.slow
def test_a_server_compiles_nothing_on_the_directory_it_was_given(tiny_model: Path, tmp_path: Path):
    out = tmp_path / "programs"
    settings = [f"{key}={value}" for key, value in {**SMALL, "serve.compile_cache": out}.items()]
    flags = ["--model", str(tiny_model), "--set", *settings]
    made = subprocess.run(
        [sys.executable, "-m", "jlora.cli", "compile", "--out", str(out), *flags],
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert f"--set serve.compile_cache={out} cache.hbm_blocks={SMALL['cache.hbm_blocks']}" in made.stdout
    before = entries(out)
    assert len(before) > 5
    with ServerProcess(flags) as server:
        asyncio.run(look(server.address))  # returns when no program is left
    assert entries(out) == before


def test_it_compiles_the_programs_of_a_server_that_warms_nothing_up(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Config] = []

    def built(config: Config) -> NoReturn:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("jlora.engine.build.build", built)
    with pytest.raises(KeyboardInterrupt):
        compile.main(["--model", str(tiny_model), "--out", str(tmp_path), "--set", "engine.warmup=false"])
    assert asked[0].engine.warmup


def test_the_directory_says_how_the_server_differs(tmp_path: Path):
    facts = {"jax": "1.0", "device": "TPU v6e", "blocks": 100}
    compile_cache.seal(tmp_path / "d", facts)
    assert compile_cache.differences(tmp_path / "d", facts) == []
    assert compile_cache.differences(tmp_path / "d", {**facts, "blocks": 99}) == ["blocks is 99, it was 100"]
    assert json.loads((tmp_path / "d" / compile_cache.FACTS).read_text()) == facts
    assert compile_cache.differences(tmp_path / "elsewhere", facts) == [] == compile_cache.differences(None, facts)
