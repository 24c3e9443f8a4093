"""A model or an adapter that brings Python along is served without it: nothing of it is ever imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jlora import config as configuration
from jlora.adapters.peft import CONFIG
from jlora.errors import InvalidArgument
from jlora.model import checkpoint
from jlora.serve.tokenizer import Tokenizer
from tests import _make
from tests.adapters._peft import SPEC, read
from tests.cluster import _port as port
from tests.serve._server import write_text_model

MODULE = "jlora_evil"
AUTO = {name: f"{MODULE}.Evil" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}


def bring_code(directory: Path, *configs: str) -> Path:
    """Puts a module into the directory that leaves a mark when it is imported, and names it in the configurations."""
    mark = directory / "imported"
    (directory / f"{MODULE}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    for name in configs:
        path = directory / name
        facts = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**facts, "auto_map": AUTO, "custom_pipelines": AUTO}))
    return mark


def test_a_models_code_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tmp_path / "model"
    wanted = write_text_model(model)
    ids = Tokenizer.from_dir(model)
    mark = bring_code(model, "config.json", "tokenizer_config.json", "generation_config.json")
    monkeypatch.chdir(model)
    monkeypatch.syspath_prepend(str(model))  # even where an import would find it
    assert checkpoint.read_spec(model, "auto", 0) == wanted
    config = configuration.load(None, {"model.path": str(model)})
    router: Any = SimpleNamespace(info=SimpleNamespace(config=config))
    for tokenizer in (Tokenizer.from_dir(model), port.router_tokenizer(config, router)):
        assert tokenizer is not None and ids is not None and tokenizer.encode("Hello") == ids.encode("Hello")
    assert not mark.exists() and MODULE not in sys.modules


def test_an_adapters_code_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    before = read(path).digest
    mark = bring_code(path)
    monkeypatch.syspath_prepend(str(path))
    assert read(path).digest == before  # the file beside it is nothing to us
    bring_code(path, CONFIG)
    with pytest.raises(InvalidArgument, match="auto_map"):
        read(path)
    assert not mark.exists() and MODULE not in sys.modules
