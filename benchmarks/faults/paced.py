"""`jlora serve` over a paced device (`benchmarks.failures.replica`): python -m benchmarks.faults.paced [its flags]"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence

from benchmarks.failures import replica
from jlora.config import Config
from jlora.replica import Replica
from jlora.serve import flags, launcher
from jlora.serve.tokenizer import Tokenizer


async def _load(config: Config) -> tuple[Replica, Tokenizer | None]:
    return await asyncio.to_thread(replica.load, config)


def main(argv: Sequence[str]) -> int:
    """Serves until a signal; returns the exit code."""
    return launcher.run(flags.parse(argv), dataclasses.replace(launcher.ENGINE, load=_load))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
