"""Clients of the shared server: the real `openai` package, and httpx for what it cannot send."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.serve._server import Served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """Without retries, so that an error is seen."""
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """Plain HTTP."""
    with httpx.Client(base_url=served.http, timeout=60) as made:
        yield made
