"""A replica's process without an engine: it prints the ready line and waits for SIGTERM.

Environment: FAKE_FAILS ends it with a reason before it is ready; FAKE_LOADS keeps it loading.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from jlora.serve import flags


def main(argv: Sequence[str]) -> int:
    config = flags.parse(argv)
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    if reason := os.environ.get("FAKE_FAILS"):
        print(reason, file=sys.stderr)
        return 1
    with socket.create_server((config.serve.host, config.serve.port)) as listening:
        if "FAKE_LOADS" not in os.environ:
            print(f"jlora ready grpc=127.0.0.1:{listening.getsockname()[1]} model=m adapters=0 blocks=1", flush=True)
        end.wait()
    return 0
