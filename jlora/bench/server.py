"""A `jlora serve` process of a benchmark's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class ServerProcess:
    """A server on a free port; ready once this is made.

    Args:
        flags: of `jlora serve`, without `--port`.

    Raises:
        RuntimeError: it ended before it was ready; its reason is on standard error.
    """

    def __init__(self, flags: Sequence[str]):
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jlora.serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.address = self._ready()

    def stop(self) -> None:
        """Ends it as an operator would."""
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ready(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.match(r"jlora ready grpc=(\S+)", line):
                return found[1]
        self._process.stdout.close()
        raise RuntimeError(f"the server ended with code {self._process.wait()} before it was ready")


def flags_of(adapters: Mapping[str, str], settings: Mapping[str, object]) -> list[str]:
    """`--adapter` and `--set` flags."""
    flags = [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
    return flags + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
