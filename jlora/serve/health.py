"""gRPC's health service, for one event loop.

The servicer of `grpc_health` writes to its watchers while it holds the lock that a change needs. There, one client
that reads nothing keeps every later change from everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_SAID = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """What is well, by the services' names. A watcher that reads late misses what has changed meanwhile."""

    def __init__(self) -> None:
        self._well: Mapping[str, bool] = {}
        self._changed = asyncio.Event()  # another one after each change
        self._over = False

    def set(self, well: Mapping[str, bool]) -> None:
        self._well, changed, self._changed = dict(well), self._changed, asyncio.Event()
        changed.set()

    def end(self) -> None:
        """Ends the watchers' streams, once they have been told: the server stops."""
        self._over = True
        self.set(self._well)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> _SAID:
        if request.service not in self._well:
            await context.abort(grpc.StatusCode.NOT_FOUND, "health: no such service")
        return _SAID(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        told, over = None, False
        while not over:
            changed, status, over = self._changed, self._status(request.service), self._over
            if status != told:
                await context.write(_SAID(status=status))
            told = status
            if not over:
                await changed.wait()

    def _status(self, service: str) -> int:
        well = self._well.get(service)
        return _SAID.SERVICE_UNKNOWN if well is None else _SAID.SERVING if well else _SAID.NOT_SERVING
