"""The tiny model with a tokenizer that the servers' tests use, and their compiled programs."""

from __future__ import annotations

from tests.serve.conftest import compiled_programs, text_model

__all__ = ["compiled_programs", "text_model"]
