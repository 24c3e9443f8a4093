"""A real jlora server in this process, and a client of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from jlora import config as configuration
from jlora.engine.service import Service
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.server import GrpcServer


@dataclass(frozen=True)
class Client:
    """Stubs over one channel, and the engine behind the server for looking inside."""

    inference: rpc.InferenceStub
    control: rpc.ControlStub
    service: Service

    def check_idle(self) -> None:
        """Nothing runs, waits or holds blocks of its own once every answer is out."""
        end = time.monotonic() + 10
        while (stats := self.service.stats()).running or stats.waiting or self.service.cache_state().hbm.running_kv:
            assert time.monotonic() < end, f"not idle: {stats}, {self.service.cache_state()}"
            time.sleep(0.01)
        self.service.check_integrity()


@contextmanager
def serve(overrides: Mapping[str, Any]) -> Iterator[Client]:
    """Starts the engine and a gRPC server on a free port; stops both."""
    config = configuration.load(None, overrides)
    service = Service.start(config, progress=False)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="grpc", daemon=True)
    thread.start()
    try:
        server, port = asyncio.run_coroutine_threadsafe(_start(service), loop).result(30)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(rpc.InferenceStub(channel), rpc.ControlStub(channel), service)
        asyncio.run_coroutine_threadsafe(server.stop(grace_s=0), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        service.stop()


async def _start(service: Service) -> tuple[GrpcServer, int]:
    server = GrpcServer(Backend(service=service), heartbeat_s=60.0)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    return server, port
