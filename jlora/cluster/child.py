"""A replica in a process of its own, and how it ends with its parent.

    python -m jlora.cluster.child PARENT_PID MODULE [flags]

MODULE is `jlora.cluster.worker`, or another one whose `main(flags)` serves and prints the same ready line.

A replica wants the main thread, for signals and for jax, so whoever keeps replicas gives each a process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from jlora import machine
from jlora.config import Config
from jlora.errors import Unavailable

PR_SET_PDEATHSIG = 1
# Seconds beyond serve.drain_s in which a replica must have stopped: the engine's last step, the last messages.
STOP_S = 15.0
REPLICA = "jlora.cluster.worker"
ENV = "JLORA_CLUSTER_ENV"  # in the environment of Ray's driver: `cluster.env`, as JSON
READY = re.compile(r"jlora ready grpc=(\S+)")


def main(argv: Sequence[str]) -> int:
    """Runs a replica that the kernel kills with its parent's thread; returns its exit code."""
    parent, module, flags = int(argv[0]), argv[1], list(argv[2:])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be watched
            return 1
    return importlib.import_module(module).main(flags)


def flags_of(config: Config, env: bool = False) -> list[str]:
    """Flags that read as `config`, wherever its file is: every key that has not its default.

    `env`: those of `cluster.env` too, whose values may be secrets. A command line, which every user of the machine
    may read, has none of them.
    """
    flags = []
    for section in fields(Config):
        values = getattr(config, section.name)
        for key in fields(values):
            name, value = f"{section.name}.{key.name}", getattr(values, key.name)
            if value != getattr(section.default, key.name) and (env or name != "cluster.env"):
                flags += _flags(name, value)
    return flags


def _flags(key: str, value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [word for name, entry in value.items() for word in _flags(f"{key}.{name}", entry)]
    if isinstance(value, tuple):
        value = ("," if key == "cluster.addresses" else os.pathsep).join(value)
    return ["--set", f"{key}={value}"]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a replica's process ended; `reason` is the last line that it wrote."""

    code: int
    reason: str


class Child:
    """A replica's process. On Linux it dies with the thread that makes this, so that thread must stay with it.

    Raises OSError if the process cannot be started.
    """

    def __init__(self, config: Config, module: str = REPLICA):
        """Starts the replica `config.cluster.replica`."""
        self.name = config.cluster.replica
        self._config = config
        self._last = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), module, *flags_of(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": machine.python_path(), **config.cluster.env},
            process_group=0,  # Ctrl-C reaches the router alone, which drains
        )
        self._pump = threading.Thread(target=self._show, name=f"jlora-{self.name}-log", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ready(self) -> str:
        """Waits for the address that the replica serves. Raises Unavailable if it ends, or takes too long."""
        limit = self._config.cluster.start_timeout_s
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit, kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if found := READY.match(line.decode(errors="replace")):
                    return found[1]
        finally:
            timer.cancel()
        end = self.wait()
        if late.is_set():
            raise Unavailable(f"replica {self.name}: not ready after cluster.start_timeout_s = {limit:g} s")
        why = f": {end.reason}" if end.reason else ""
        raise Unavailable(f"replica {self.name}: ended with code {end.code} before it was ready{why}")

    def wait(self) -> Exit:
        """Waits for the end of the process."""
        assert self._process.stdout is not None
        for _ in self._process.stdout:  # a full pipe would hold it up
            pass
        code = self._process.wait()
        self._pump.join(timeout=1.0)  # a child of its own may hold the pipe
        return Exit(code, self._last)

    def terminate(self) -> None:
        """Asks it to drain and end; it is killed if it takes longer than `serve.drain_s` and `STOP_S`."""
        self._process.terminate()
        timer = threading.Timer(self._config.serve.drain_s + STOP_S, self._process.kill)
        timer.daemon = True
        timer.start()

    def _show(self) -> None:
        """Forwards its stderr line by line, behind its name; of a progress bar, only the last state."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if text := line.decode(errors="replace").rstrip().rpartition("\r")[2]:
                self._last = text
                print(f"[{self.name}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
