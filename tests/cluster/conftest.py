"""The tiny model with a tokenizer that the servers' tests use."""

from __future__ import annotations

from tests.serve.conftest import text_model

__all__ = ["text_model"]
