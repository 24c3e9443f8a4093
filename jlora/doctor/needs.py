"""The packages that `jlora doctor` cannot do without. Standard library only."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("jax", "flax", "numpy", "scipy", "msgspec", "rich")  # each is imported by the name that pip knows


def missing() -> str:
    """What this Python lacks and how to get it, in one line; "" if it has all."""
    absent = " ".join(name for name in PACKAGES if not _has(name))
    return f"needs packages that this Python lacks: pip install {absent}" if absent else ""


def _has(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
