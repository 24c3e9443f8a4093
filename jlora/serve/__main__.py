"""`python -m jlora.serve` is `jlora serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jlora.serve import flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jlora serve`; returns the process's exit code."""
    config = flags.parse(argv)
    from jlora.serve.launcher import run  # asyncio comes with it: a wrong flag must cost no time

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
