"""`python -m jlora.serve` is `jlora serve`."""

from __future__ import annotations

import sys

from jlora.serve.launcher import main

if __name__ == "__main__":
    sys.exit(main())
