"""Where the trained files of the demo are: in the package, so that an installed wheel has them."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"
MODEL = ASSETS / "model"
ADAPTERS = ASSETS / "adapters"


def adapter_path(name: str) -> Path:
    """The PEFT directory of one of `tasks.TASKS` or `tasks.CHECKS`."""
    return ADAPTERS / name
