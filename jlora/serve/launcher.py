"""The life of a serving process: bind, load, print the ready line, serve, drain, exit.

look at the model's path, bind the ports (it is wrong, or one is taken: one line, exit 1)
start gRPC and HTTP (health NOT_SERVING, calls UNAVAILABLE)
load model and adapters, warm up (failed: one line, exit 1)
print the ready line, health SERVING
SIGTERM or SIGINT: refuse new requests, let running ones end, exit 0
a second signal: exit at once
the engine or a thread of the fronts fails: health NOT_SERVING, every call ends with UNAVAILABLE, exit `FAILED`
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jlora import config as configuration
from jlora.adapters.names import check_base_name
from jlora.config import Config, ServeConfig
from jlora.errors import ConfigError, JloraError
from jlora.model import hub
from jlora.ports import DiskFiles, OsThreads, ServerGarbage, System, Threads
from jlora.replica import Replica
from jlora.serve import flags
from jlora.serve.access.access import Access
from jlora.serve.backend import Backend
from jlora.serve.gate import BURST
from jlora.serve.http.server import HttpServer
from jlora.serve.pauses import Pauses
from jlora.serve.server import GrpcServer, Service, address
from jlora.serve.supervisor import tell_systemd
from jlora.serve.tokenizer import Tokenizer

if TYPE_CHECKING:  # it needs an extra
    from jlora.serve.tracing import Tracing

log = logging.getLogger(__name__)

# Seconds for the last messages to reach their clients after the replica has closed, and the last spans their collector.
GRACE_S = 2.0
# Seconds for a step to end when its requests have been given up.
CLOSE_S = 10.0
# Exit code when the engine or a thread has failed, or hangs at the end: a supervisor should start the server again.
FAILED = 70
# Threads for calls that wait for a disk, a lock or another process.
WAITERS = max(8, min(32, (os.cpu_count() or 1) + 4))


@dataclass(frozen=True, slots=True)
class Program:
    """What a process serves behind the fronts.

    Attributes:
        name: the command, for messages.
        load: makes the replica, and the tokenizer if there is one. It is cancelled by a signal meanwhile.
        ready: the ready line, from the addresses and the replica.
        check: raises JloraError for what is wrong at a glance, before any port is taken.
        services: gRPC services on the same port, beside the server's own.
        token: a client that shows it may do everything; "" is none.
        replicas: how many engines of `config.engine` are behind it.
        threads: start those that it serves with; the failure of one ends the process. None: it watches its own.
    """

    name: str
    load: Callable[[Config], Awaitable[tuple[Replica, Tokenizer | None]]]
    ready: Callable[[str, Replica], Awaitable[str]]
    services: Sequence[Service] = ()
    token: str = ""
    replicas: int = 1
    threads: Threads | None = None
    check: Callable[[Config], object] | None = None


class Stderr:
    """Standard error that drops what cannot be written, as on a full disk: a server goes on without its log.

    Without it, an error leaves the lock of the progress bar held, so the start hangs. At the end, it turns exit code 0
    into 120.
    """

    def __init__(self, plain: Any):
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._plain.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._plain.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jlora serve` until a signal; returns the process's exit code."""
    return ended(run(flags.parse(argv), ENGINE))


def run(config: Config, program: Program) -> int:
    """Serves `program` until a signal; returns the process's exit code."""
    sys.stderr = Stderr(sys.stderr)  # until the process ends: Python flushes it at last
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jlora").setLevel(config.serve.log_level.upper())
    try:
        return asyncio.run(serve(config, program))
    except JloraError as e:
        print(f"{program.name}: cannot start: {e}", file=sys.stderr, flush=True)
        return 1


async def serve(config: Config, program: Program | None = None) -> int:
    """Serves until a signal; returns the exit code. Raises JloraError if the server cannot start.

    Without a `program` it serves an engine in this process.
    """
    program = program or ENGINE
    stop, threads = _stop_on_signal(), program.threads or OsThreads()
    lost = _lost(threads)
    _start_waiters(threads)
    if not program.token:
        _check_exposed(config.serve)
    backend = Backend(
        access=Access(config.serve, program.token, threads),
        threads=threads,
        tracing=_tracing(config.serve.otlp_endpoint),
        stall_s=config.serve.stall_s,
        pauses=Pauses.of(config.serve.coalesce_s),
        most=max(BURST, program.replicas * (config.engine.max_seqs + config.engine.max_queue)),
    )
    if program.check is not None:
        program.check(config)
    servers, where = _bind(backend, config.serve, program.services)
    for server in servers:
        await server.start()
    telling = asyncio.create_task(tell_systemd(backend), name="systemd")
    try:
        if not await _loads_before(stop, backend, config, program):
            return 0
        replica = backend.loaded
        print(await program.ready(where, replica), flush=True)
        if not await _fails_before(stop, lost, replica):
            patience_s = 0.0 if lost.is_set() else config.serve.drain_s
            if await _drain(backend, servers, patience_s) and not lost.is_set():
                return 0
        await _stop(servers, GRACE_S)
        _exit(FAILED)
        return FAILED
    finally:
        telling.cancel()
        await _stop(servers, grace_s=0)
        if backend.tracing is not None:
            await backend.tracing.close(GRACE_S)


def _start_waiters(threads: Threads) -> None:
    """All threads of `asyncio.to_thread` now: later the machine may start no more."""
    pool = threads.pool("jlora-wait", WAITERS)
    assert isinstance(pool, ThreadPoolExecutor)  # asyncio takes no other
    asyncio.get_running_loop().set_default_executor(pool)


def _tracing(endpoint: str) -> Tracing | None:
    """Raises ConfigError without the extra that it needs."""
    if not endpoint:
        return None
    try:
        from jlora.serve.tracing import Tracing, otlp

        return Tracing(otlp(endpoint))
    except ImportError as e:
        raise ConfigError("serve.otlp_endpoint needs OpenTelemetry: pip install 'jlora[otel]'") from e


Servers = Sequence[GrpcServer | HttpServer]


def _bind(backend: Backend, config: ServeConfig, services: Sequence[Service]) -> tuple[Servers, str]:
    """The servers with their ports taken, and the addresses for the ready line."""
    made: dict[str, tuple[GrpcServer | HttpServer, int]] = {}
    made["grpc"] = (GrpcServer(backend, config, services=services), config.port)
    if config.http_port >= 0:
        made["http"] = (HttpServer(backend, config), config.http_port)
    ports = {kind: server.bind(config.host, port) for kind, (server, port) in made.items()}
    where = " ".join(f"{kind}={address(config.host, port)}" for kind, port in ports.items())
    return [server for server, _ in made.values()], where


async def _stop(servers: Servers, grace_s: float) -> None:
    await asyncio.gather(*(server.stop(grace_s) for server in servers))


async def _fails_before(stop: asyncio.Event, lost: asyncio.Event, replica: Replica) -> bool:
    """Waits for the replica's failure, for `stop` or for `lost`; whether the replica has failed."""
    ends, failure = [asyncio.ensure_future(one.wait()) for one in (stop, lost)], asyncio.wrap_future(replica.failure)
    await asyncio.wait((*ends, failure), return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return failure.done()


def _check_exposed(config: ServeConfig) -> None:
    """Raises ConfigError if other machines would reach a server without keys, and nobody said that they may."""
    if config.keys or _is_local(config.host):
        return
    if not config.insecure:
        raise ConfigError(
            f"serve.host = {config.host}: other machines reach it, and may do all without keys; set --keys FILE "
            "(`jlora keys new` makes keys), or say --insecure"
        )
    log.warning("serve.host = %s: no authentication, every client that reaches a port may make every call", config.host)


def _is_local(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def _loads_before(stop: asyncio.Event, backend: Backend, config: Config, program: Program) -> bool:
    """Waits for the replica or for `stop`; whether the backend has its replica."""
    loading = asyncio.ensure_future(program.load(config))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        print(f"{program.name}: stopped while loading", file=sys.stderr, flush=True)
        loading.cancel()
        await asyncio.wait((loading,))
        return False
    backend.replica, backend.tokenizer = loading.result()
    return True


async def _load(config: Config) -> tuple[Replica, Tokenizer | None]:
    try:
        return await asyncio.to_thread(load, config)
    except asyncio.CancelledError:
        os._exit(0)  # nothing can interrupt a compiler on the loading thread


async def _ready(where: str, replica: Replica) -> str:
    adapters = len(await asyncio.wrap_future(replica.adapters()))
    blocks = (await asyncio.wrap_future(replica.state())).cache.hbm.total
    return f"jlora ready {where} model={replica.info.model} adapters={adapters} blocks={blocks}"


def _check(config: Config) -> None:
    if config.model.path:  # else the start says so
        hub.local(config.model.path)


ENGINE = Program("jlora serve", _load, _ready, check=_check)


def load(config: Config) -> tuple[Replica, Tokenizer | None]:
    """The replica, and the tokenizer if the model has one. Blocks, with progress bars on a terminal."""
    from jlora.engine.local import LocalReplica  # these import jax: only after the flags are checked
    from jlora.model.checkpoint import read_spec

    directory = hub.resolve(config.model.path)
    config = configuration.replace(config, {"model.path": str(directory)})  # so that a hub id is resolved once
    tokenizer = Tokenizer.from_dir(directory)
    if tokenizer is None:
        log.warning("the model has no tokenizer.json: it serves token ids only")
    spec = read_spec(directory, config.model.dtype, config.model.max_model_len)
    check_base_name(config.model.name or spec.name)
    system = System(files=DiskFiles(config.adapters.roots), garbage=ServerGarbage())
    return LocalReplica.start(config, progress=sys.stderr.isatty(), system=system), tokenizer


async def _drain(backend: Backend, servers: Servers, timeout_s: float) -> bool:
    """Lets running requests end and closes the replica; False if the engine has failed or hangs."""
    replica = backend.loaded
    backend.draining = True
    log.info("draining: new requests are refused, running ones have %g s", timeout_s)
    if not await asyncio.wrap_future(replica.drain(timeout_s)):
        log.warning("drain: serve.drain_s = %g s has passed; running requests are aborted", timeout_s)
    closing = asyncio.ensure_future(asyncio.to_thread(replica.close))
    await asyncio.wait((closing,), timeout=CLOSE_S)
    if not closing.done():
        log.error("the engine does not stop: its step has lasted %.0f s", replica.heartbeat_age())
    await _stop(servers, GRACE_S)
    return closing.done() and not replica.failure.done()


def ended(code: int) -> int:
    """The exit code of a process that has served. Where a thread still works, say compiles, the process ends here."""
    if code == 0 and any(not (thread.daemon or thread is threading.main_thread()) for thread in threading.enumerate()):
        _exit(code)
    return code


def _exit(code: int) -> None:
    """Ends the process now: threads that hang would hold up its regular end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _lost(threads: Threads) -> asyncio.Event:
    """An event that is set once one of the threads has failed."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()

    def failed(thread: str, error: BaseException) -> None:
        loop.call_soon_threadsafe(lost.set)

    threads.watch(failed)
    return lost


def _stop_on_signal() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. The second one ends the process."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
