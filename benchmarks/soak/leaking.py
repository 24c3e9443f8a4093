"""`jlora serve` that keeps some bytes of every request, for the soak to find.

python -m benchmarks.soak.leaking BYTES [flags of `jlora serve`]
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future

from jlora.config import Config
from jlora.replica import Replica, Sink
from jlora.serve import flags, launcher
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Request


def leak(replica: Replica, size: int) -> None:
    """Keeps `size` bytes of memory for each request from now on."""
    kept: list[bytes] = []
    submit = replica.submit

    def leaking(request: Request, sink: Sink) -> Future[int]:
        kept.append(os.urandom(size))  # not zeros: the kernel would give no memory for those
        return submit(request, sink)

    replica.submit = leaking


def main(argv: Sequence[str]) -> int:
    """Serves until a signal; returns the exit code."""
    size, config = int(argv[0]), flags.parse(argv[1:])

    async def load(config: Config) -> tuple[Replica, Tokenizer | None]:
        replica, tokenizer = await asyncio.to_thread(launcher.load, config)
        leak(replica, size)
        return replica, tokenizer

    return launcher.run(config, dataclasses.replace(launcher.ENGINE, load=load))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
