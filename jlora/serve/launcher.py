"""The life of a serving process: bind, load, say ready, serve, drain, exit.

bind port ── taken: one line, exit 1
start gRPC (health NOT_SERVING, calls UNAVAILABLE)
load model, adapters, warm up ── cannot: one line, exit 1
print the ready line, health SERVING
SIGTERM or SIGINT: refuse new requests, let running ones end, exit 0
a second signal: exit at once
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from jlora import config as configuration
from jlora.adapters.names import check_base_name
from jlora.config import Config
from jlora.errors import JloraError

if TYPE_CHECKING:
    from jlora.engine.service import Service
    from jlora.serve.backend import Backend
    from jlora.serve.server import GrpcServer
    from jlora.serve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

# For calls of the engine and for tokenizing. What waits for a request, a file or a copy has no place here:
# aborts and new requests would queue behind it.
THREADS = 64

# After the engine has stopped, seconds for last messages to reach their clients.
GRACE_S = 2.0


def run(config: Config) -> int:
    """Serves until a signal; returns the process's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jlora").setLevel(config.serve.log_level.upper())
    try:
        return asyncio.run(serve(config))
    except JloraError as e:
        print(f"jlora serve: cannot start: {e}", file=sys.stderr, flush=True)
        return 1


async def serve(config: Config) -> int:
    """Serves until a signal; returns the exit code.

    Raises:
        JloraError: it cannot start; the message is one clear line.
    """
    from jlora.serve.backend import Backend  # jax comes with these: not before the flags are known to be right
    from jlora.serve.server import GrpcServer, address

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="serve"))
    stop = _stop_on_signal()
    backend = Backend()
    server = GrpcServer(backend, config.serve.heartbeat_s)
    port = server.bind(config.serve.host, config.serve.port)
    await server.start()
    try:
        await _load_or_stop(backend, config, stop)
        service = backend.engine
        where = address(config.serve.host, port)
        adapters, blocks = len(service.adapters()), service.cache_state().hbm.total
        print(f"jlora ready grpc={where} model={service.model_name} adapters={adapters} blocks={blocks}", flush=True)
        await stop.wait()
        await _drain(backend, server, config.serve.drain_s)
    finally:
        await server.stop(grace_s=0)
    return 0


async def _load_or_stop(backend: Backend, config: Config, stop: asyncio.Event) -> None:
    """Fills the backend; a signal meanwhile ends the process."""
    loading = asyncio.ensure_future(_on_thread(lambda: load(config)))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        print("jlora serve: stopped while loading", file=sys.stderr, flush=True)
        os._exit(0)  # the loading thread is inside a compiler that nothing can interrupt
    service, tokenizer = loading.result()
    backend.tokenizer = tokenizer
    backend.service = service  # last: from here on calls are served


def load(config: Config) -> tuple[Service, Tokenizer | None]:
    """The engine, and the tokenizer if the model has one; blocking, with progress bars on stderr."""
    from jlora.engine.service import Service
    from jlora.model.checkpoint import read_spec, resolve
    from jlora.serve.tokenizer import Tokenizer

    directory = resolve(config.model.path)
    config = configuration.replace(config, {"model.path": str(directory)})  # a hub id is asked for once
    tokenizer = Tokenizer.from_dir(directory)
    if tokenizer is None:
        log.warning("the model has no tokenizer.json: it serves token ids only")
    spec = read_spec(directory, config.model.dtype, config.model.max_model_len)
    check_base_name(config.model.name or spec.name)
    return Service.start(config, progress=True), tokenizer


async def _drain(backend: Backend, server: GrpcServer, timeout_s: float) -> None:
    """Lets running requests end, then stops the engine and the server."""
    service = backend.engine
    backend.draining = True
    log.info("draining: new requests are refused, running ones have %g s", timeout_s)
    if not await asyncio.to_thread(service.drain, timeout_s):
        log.warning("drain: serve.drain_s = %g s passed; what still runs is aborted", timeout_s)
    await asyncio.to_thread(service.stop)
    await server.stop(GRACE_S)


def _stop_on_signal() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _on_thread(work: Callable[[], T]) -> T:
    """Runs `work` on a daemon thread, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as e:  # handed over to whoever awaits
            loop.call_soon_threadsafe(done.set_exception, e)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
