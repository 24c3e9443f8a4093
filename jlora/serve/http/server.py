"""The HTTP server: uvicorn on the event loop that also runs gRPC, over the same `Backend`.

server = HttpServer(backend, config.serve)
port = server.bind("127.0.0.1", 0)     # before the weights are read
await server.start()                   # answers 503 until the backend has a replica
await server.stop(grace_s=1.0)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jlora.config import ServeConfig
from jlora.errors import ConfigError
from jlora.serve.access.caller import Need
from jlora.serve.access.tls import Tls
from jlora.serve.backend import Backend
from jlora.serve.http import failures
from jlora.serve.http.call import Endpoint, Handler
from jlora.serve.http.dashboard import Dashboard, file
from jlora.serve.http.inference import Inference
from jlora.serve.http.metrics import metrics
from jlora.serve.http.models import Models
from jlora.serve.http.protocol import IDLE_S, Connection
from jlora.serve.pages import Seen
from jlora.serve.server import address


class _Uvicorn(uvicorn.Server):
    """Leaves the process's signals to the launcher."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One HTTP server over one `Backend`. Create it on the event loop that runs it."""

    def __init__(self, backend: Backend, config: ServeConfig):
        tls = Tls.of(config, backend.threads)
        settings = uvicorn.Config(
            application(backend, config),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # a client's broken request is no event for the operator
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
        )
        settings.load()
        settings.ssl = None if tls is None else tls.http()
        self._uvicorn = _Uvicorn(settings)
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """Takes the port (0: a free one) and returns it. Raises ConfigError if it cannot."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            every = host.strip("[]") == "::" and socket.has_dualstack_ipv6()  # IPv4 too, as gRPC takes it
            self._socket = socket.create_server((host.strip("[]"), port), family=family, dualstack_ipv6=every)
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {address(host, port)}: the port is in use or the host is not this machine's; "
                "--http-port 0 takes a free port; or change serve.http_port or serve.host"
            ) from e
        # Accepted sockets inherit it. asyncio does not set it for a listener of `create_server`, and each part of an
        # answer would wait until the client's system acknowledges the last one: 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket.getsockname()[1]

    async def start(self) -> None:
        """Starts to answer."""
        assert self._socket is not None, "bind first"
        self._task = asyncio.create_task(self._uvicorn.serve([self._socket]), name="http")

    async def stop(self, grace_s: float) -> None:
        """Refuses new connections, gives live calls `grace_s` seconds (at least one), closes the port."""
        if self._task is not None:
            self._uvicorn.config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
            self._uvicorn.should_exit = True
            await asyncio.wait((self._task,))


def application(backend: Backend, config: ServeConfig) -> Starlette:
    """The routes."""
    inference, models = Inference(backend), Models(backend)

    def route(path: str, handler: Handler, need: Need, method: str = "POST", queued: bool = False) -> Route:
        return Route(path, Endpoint(handler, backend, config, need, queued), methods=[method])

    events = route("/dashboard/events", Dashboard(backend).events, Need.SIGHT, "GET")
    events.methods = {"GET"}  # an answer to HEAD would have no end either
    return Starlette(
        routes=[
            route("/v1/completions", inference.completions, Need.KEY, queued=True),
            route("/v1/chat/completions", inference.chat, Need.KEY, queued=True),
            route("/v1/models", models.list, Need.KEY, "GET"),
            route("/v1/models/{name:path}", models.one, Need.KEY, "GET"),
            *(route(f"{prefix}/load_lora_adapter", models.load, Need.ADMIN) for prefix in ("", "/v1")),
            *(route(f"{prefix}/unload_lora_adapter", models.unload, Need.ADMIN) for prefix in ("", "/v1")),
            route("/v1/prefetch", inference.prefetch, Need.KEY),
            route("/tokenize", inference.tokenize, Need.KEY),
            route("/detokenize", inference.detokenize, Need.KEY),
            route("/health", models.health, Need.NOTHING, "GET"),
            route("/ready", models.ready, Need.NOTHING, "GET"),
            route("/live", models.live, Need.NOTHING, "GET"),
            route("/version", models.version, Need.KEY, "GET"),
            route("/", file("page.html"), Need.NOTHING, "GET"),
            route("/dashboard/page.js", file("page.js"), Need.NOTHING, "GET"),
            route("/dashboard/page.css", file("page.css"), Need.NOTHING, "GET"),
            events,
            route("/metrics", partial(metrics, backend, Seen()), Need.SIGHT, "GET"),
            route("/debug/profile", models.profile, Need.ADMIN),
        ],
        exception_handlers={HTTPException: _no_route},  # type: ignore[dict-item]
    )


async def _no_route(request: Request, error: HTTPException) -> Response:
    """404 and 405 in OpenAI's shape."""
    said = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return JSONResponse(failures.body(error.status_code, said), error.status_code, error.headers)
