"""The gRPC server: three services, health and reflection.

    server = GrpcServer(Backend(), config.serve)
    port = server.bind("127.0.0.1", 0)       # before the weights are read, so a taken port costs no time
    await server.start()                     # answers NOT_SERVING and UNAVAILABLE from now on
    server.backend.replica = ...             # SERVING within PERIOD_S
    await server.stop(grace_s=1.0)

Health follows the replica, not the process. SERVING means that the replica is loaded, does not drain,
and made progress within `heartbeat_s`. After a long step health turns SERVING again by itself. Time in which
the process was stopped does not count. The service `LIVE` says less: a replica that loads or drains is alive, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jlora.config import ServeConfig
from jlora.errors import ConfigError
from jlora.replica import Replica
from jlora.serve.access.tls import Tls
from jlora.serve.backend import Backend
from jlora.serve.gate import MOST_CALLS
from jlora.serve.health import Health
from jlora.serve.proto import jlora_pb2, jlora_pb2_grpc
from jlora.serve.services import AdaptersServicer, ControlServicer, InferenceServicer
from jlora.serve.status import StatusInterceptor

log = logging.getLogger(__name__)

PERIOD_S = 0.02  # between two rounds of the watch over the loop and the replica
LATE_S = 1.0  # a round that comes later: the process was stopped, or the loop stood still
SEND_BYTES = 64 << 20  # room for the prompt logprobs of a long prompt
# Seconds until gRPC ends a call that no handler has taken: CANCELLED, and no client knows why. So long that a busy
# machine, too, gets through a burst of `BURST` calls and refuses what is too much itself: two busy cores with 32
# streams needed up to 52 s to answer 10,000. With 10 s, 2,078 were ended; with 30 s none were, with little to spare.
PENDING_S = 120
CONNECTIONS = 4096
CONNECTION_SHARE = 2  # of all calls that gRPC takes, one connection may have one part in so many
METADATA_BYTES = 16 << 10  # of one call
HELLO_S = 30.0  # until a connection has said that it speaks HTTP/2
PING_S = 5.0  # between two pings of a client: Go's send none more often than every 10 s
IDLE_S = 300.0  # without a call, after which a connection gives its place to others; clients open another unasked
# Adds services beside the server's own. They check their callers themselves.
Service = Callable[[Backend, grpc.aio.Server], None]
SERVICES = tuple(s.full_name for s in jlora_pb2.DESCRIPTOR.services_by_name.values())
LIVE = "live"  # of health alone


class GrpcServer:
    """One gRPC server over one `Backend`. Create it on the event loop that runs it."""

    def __init__(
        self,
        backend: Backend,
        config: ServeConfig,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        services: Sequence[Service] = (),
    ):
        """`interceptors` see a call before the server's own."""
        self.backend = backend
        self._tls = Tls.of(config, backend.threads)
        self._heartbeat_s = config.heartbeat_s
        self._health = Health()
        # A call before its handler takes up to 18 kB of memory, also one that its client has reset. A lower bound for
        # each connection would not help: gRPC ends busy connections at it (UNAVAILABLE).
        calls = backend.most + 2 * MOST_CALLS  # with those that want no completion, and those that are being refused
        self._server = grpc.aio.server(
            interceptors=[*interceptors, StatusInterceptor(backend, config.stall_s)],
            options=[
                ("grpc.so_reuseport", 0),  # otherwise a second server would silently share the port
                ("grpc.max_receive_message_length", int(config.max_request_mib * 2**20)),
                ("grpc.max_send_message_length", SEND_BYTES),
                ("grpc.server.max_pending_requests", backend.most),
                ("grpc.server.max_pending_requests_hard_limit", backend.most),
                ("grpc.server_max_unrequested_time_in_server", PENDING_S),
                ("grpc.max_concurrent_streams", calls),  # of one connection
                ("grpc.max_metadata_size", METADATA_BYTES),  # below the next, gRPC would refuse some by chance
                ("grpc.absolute_max_metadata_size", METADATA_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", int(PING_S * 1e3)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.max_allowed_incoming_connections", CONNECTIONS),
                ("grpc.server_handshake_timeout_ms", int(HELLO_S * 1e3)),
                ("grpc.max_connection_idle_ms", int(IDLE_S * 1e3)),
            ],
            maximum_concurrent_rpcs=CONNECTION_SHARE * calls,
        )
        jlora_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(backend), self._server)
        jlora_pb2_grpc.add_AdaptersServicer_to_server(AdaptersServicer(backend), self._server)
        jlora_pb2_grpc.add_ControlServicer_to_server(ControlServicer(backend), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for add in services:
            add(backend, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._watching: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """Takes the port (0: a free one) and returns it. Raises ConfigError if it cannot."""
        try:
            _probe(host, port)  # gRPC would say more than one line
            if self._tls is not None:
                return self._server.add_secure_port(address(host, port), self._tls.grpc())
            return self._server.add_insecure_port(address(host, port))
        except (RuntimeError, OSError) as e:
            raise ConfigError(
                f"cannot listen on {address(host, port)}: the port is in use or the host is not this machine's; "
                "--port 0 takes a free port; or change serve.port or serve.host"
            ) from e

    async def start(self) -> None:
        """Starts to answer; health is NOT_SERVING until the backend has a replica."""
        self._set_health(ready=False, live=True)
        await self._server.start()
        self._watching = asyncio.create_task(self._watch(), name="watch")

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives live ones `grace_s` seconds, closes the port."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        self.backend.serving = self.backend.live = False
        self._set_health(ready=False, live=False)
        for end in (self._health.end, *self.backend.at_stop):  # streams without an end would last for the whole grace
            end()
        await self._server.stop(grace_s)

    async def _watch(self) -> None:
        """Measures how late the loop wakes a task that sleeps, and sets health."""
        ready, live, due, patient = False, True, time.monotonic(), 0.0
        while True:
            told, replica, now = (ready, live), self.backend.replica, time.monotonic()
            self.backend.gaps.note(max(0.0, now - due))
            if live and now - due > LATE_S:
                patient = now + self._heartbeat_s  # the engine could not move either: it has its whole time again
            live = replica is None or self._moves(replica, now < patient)
            ready = replica is not None and live and not self.backend.draining
            self.backend.serving, self.backend.live = ready, live
            if (ready, live) != told:
                self._set_health(ready, live)
            if ready != told[0]:
                log.log(logging.INFO if ready else logging.WARNING, "health: %s", "SERVING" if ready else "NOT_SERVING")
            due = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)

    def _moves(self, replica: Replica, patient: bool) -> bool:
        age = replica.heartbeat_age()
        return age <= self._heartbeat_s or (patient and age < math.inf)

    def _set_health(self, ready: bool, live: bool) -> None:
        self._health.set({"": ready, **dict.fromkeys(SERVICES, ready), LIVE: live})


def _probe(host: str, port: int) -> None:
    """Raises OSError if no address of the host has the port free."""
    failed: OSError | None = None
    for family, kind, protocol, _, where in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: a port that was just left is free
            try:
                return probe.bind(where)
            except OSError as e:
                failed = e
    if failed is not None:
        raise failed


def address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
