"""`jlora serve` whose stall monitor forgets after `WINDOW_S` seconds: an attack is not told with the one before.

python -m benchmarks.gaps.server [flags of `jlora serve`]
"""

from __future__ import annotations

import sys

from jlora import gaps
from jlora.serve import launcher

WINDOW_S = 3

if __name__ == "__main__":
    gaps.WINDOW_S = WINDOW_S
    sys.exit(launcher.main(sys.argv[1:]))
