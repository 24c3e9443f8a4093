"""`python -m jlora.serve` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(
    r"jlora ready grpc=(127\.0\.0\.1:\d+) (?:http=(?P<http>\S+) )?"
    r"model=(?P<model>\S+) adapters=(?P<adapters>\d+) blocks=(?P<blocks>\d+)\n"
)
PROGRAM = ("-m", "jlora.serve")


@contextmanager
def process(
    argv: list[str], program: Sequence[str] = PROGRAM, within: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`python -m jlora.serve`, or another program; killed at the end if it still runs.

    Args:
        within: a command that runs the one it is given, in its own place.
    """
    command = [*within, sys.executable, *program, *argv]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()


def ready(server: subprocess.Popen[str]) -> re.Match[str]:
    """The ready line, which is the first line of stdout."""
    assert server.stdout is not None
    line = server.stdout.readline()
    found = READY.fullmatch(line)
    assert found, f"{line!r} {server.stderr.read() if server.stderr and server.poll() is not None else ''}"
    return found
