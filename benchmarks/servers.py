"""Servers of the product that differ from it in one thing, as processes of their own.

    paced           the device takes a model's seconds and draws tokens that a client can check
    cluster         `jlora cluster` with paced replicas
    leaking BYTES   keeps some bytes of every request, for the soak to find
    forgetful       the stall monitor forgets after `WINDOW_S` seconds: an attack is not told with the one before

python -m benchmarks.servers KIND [flags of `jlora serve` or `jlora cluster`]
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from benchmarks.failures import replica as paced
from benchmarks.gaps.streams import WINDOW_S
from jlora import gaps
from jlora.cluster import cli, service
from jlora.config import Config
from jlora.replica import Replica, Sink
from jlora.serve import flags, launcher
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Request


def serve_paced(argv: Sequence[str]) -> int:
    """`jlora serve` over a paced device."""
    return launcher.run(flags.parse(argv), dataclasses.replace(launcher.ENGINE, load=paced.load))


def run_cluster(argv: Sequence[str]) -> int:
    """`jlora cluster` with paced replicas."""
    with cli.secret(cli.parse(list(argv))) as config:
        return service.run(config, cli.fleet_of(config, module=paced.__name__))


def serve_leaking(argv: Sequence[str]) -> int:
    """`jlora serve` that keeps so many bytes of memory for each request."""
    size = int(argv[0])

    async def load(config: Config) -> tuple[Replica, Tokenizer | None]:
        replica, tokenizer = await asyncio.to_thread(launcher.load, config)
        _leak(replica, size)
        return replica, tokenizer

    return launcher.run(flags.parse(argv[1:]), dataclasses.replace(launcher.ENGINE, load=load))


def _leak(replica: Replica, size: int) -> None:
    kept: list[bytes] = []
    submit = replica.submit

    def leaking(request: Request, sink: Sink) -> Future[int]:
        kept.append(os.urandom(size))  # not zeros: the kernel would give no memory for those
        return submit(request, sink)

    replica.submit = leaking


def serve_forgetful(argv: Sequence[str]) -> int:
    """`jlora serve` whose stall monitor forgets soon."""
    gaps.WINDOW_S = WINDOW_S
    return launcher.main(argv)


KINDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "paced": serve_paced,
    "cluster": run_cluster,
    "leaking": serve_leaking,
    "forgetful": serve_forgetful,
}

if __name__ == "__main__":
    sys.exit(KINDS[sys.argv[1]](sys.argv[2:]))
