"""A real jlora server of token ids in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jlora import config as configuration
from jlora.engine.local import LocalReplica
from jlora.serve.backend import Backend
from tests.serve._server import Served, serving


@contextmanager
def serve(overrides: Mapping[str, Any]) -> Iterator[Served]:
    """Starts the engine and a gRPC server on a free port; stops both."""
    replica = LocalReplica.start(configuration.load(None, overrides), progress=False)
    try:
        with serving(Backend(replica)) as served:
            yield served
    finally:
        replica.close()
