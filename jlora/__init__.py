"""jlora serves one Llama with many LoRA adapters from one process, in JAX.

    from jlora import LLM, SamplingParams

`LLM` is imported on first use, so that `import jlora.types` never imports jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jlora.types import SamplingParams

if TYPE_CHECKING:
    from jlora.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from jlora import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
