"""One server with a tokenizer and three adapters for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import _make
from tests.serve import _server

ADAPTERS = {"upper": (4, ("q", "v")), "lower": (2, ("down",)), "wide": (8, tuple(_make.MODULES))}


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama named "base" with a tokenizer, and its adapters in `../adapters`."""
    root = tmp_path_factory.mktemp("served")
    spec = _server.write_text_model(root / "base")
    for seed, (name, (r, targets)) in enumerate(ADAPTERS.items(), 10):
        _make.make_adapter(root / "adapters" / name, spec, seed=seed, r=r, targets=targets)
    return root / "base"


@pytest.fixture(scope="session")
def served(text_model: Path) -> Iterator[_server.Served]:
    """A server of `text_model` with its adapters."""
    paths = {f"adapters.paths.{name}": str(text_model.parent / "adapters" / name) for name in ADAPTERS}
    with _server.serve(text_model, paths) as running:
        yield running
