"""Answers that every way to run an engine must give."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def expected(tiny_model: Path, tiny_adapters: dict[str, Path]) -> dict[str, list[int]]:
    """The answers to `test_engine.mixed()`, each request alone."""
    from tests.engine.test_engine import mixed, running, serve, tokens

    with running(tiny_model, tiny_adapters, cache__prefix_reuse=False) as service:
        return {request.id: tokens(serve(service, [request])[request.id]) for request in mixed()}
