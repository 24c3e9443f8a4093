"""Who runs the replicas, and where they are now. A replica that starts again has a new address."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jlora import config as configuration
from jlora.cluster import gpus
from jlora.cluster.child import REPLICA, STOP_S, Child
from jlora.config import ClusterConfig, Config
from jlora.errors import Unavailable
from jlora.ports import OsThreads, Thread, Threads

log = logging.getLogger(__name__)

# Takes the address of every replica that is there now, by name. It must not block.
Watch = Callable[[Mapping[str, str]], None]

# The router has the keys, the HTTP port and the names of adapters; a replica learns of an adapter from it.
ROUTERS: Mapping[str, Any] = {
    "adapters.paths": {}, "adapters.dir": "", "adapters.registry": "", "serve.http_port": -1, "serve.keys": "",
}  # fmt: skip
# Seconds between two looks at the names of a static fleet: the time to live of Kubernetes' DNS.
RESOLVE_S = 5.0
# Seconds before a replica starts again: the first, doubled each time up to the last.
BACKOFF_S = (0.5, 30.0)


class Fleet(Protocol):
    """Starts replicas, keeps them, and says where they are."""

    def start(self, watch: Watch) -> None:
        """Starts the replicas and waits until each has served once; `watch` is called with every change.

        A static fleet waits for nothing. Raises JloraError if a replica cannot start; then none is left.
        """
        ...

    def stop(self) -> None:
        """Drains and ends what `start` started; then nothing of it is left. The watch hears nothing of it.

        It may be called while `start` runs, which then raises Unavailable. A second call does nothing.
        """
        ...


class Places:
    """The addresses of a fleet's replicas; tells the watch of each change, in order, until `close`."""

    def __init__(self, watch: Watch = lambda addresses: None):
        self._watch = watch
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._closed = False

    def close(self) -> None:
        """Tells nothing from now on: the watch may be gone."""
        with self._lock:
            self._closed = True

    def put(self, name: str, address: str | None) -> None:
        """The replica is there from now on; None: nowhere."""
        with self._lock:
            before = dict(self._addresses)
            if address is None:
                self._addresses.pop(name, None)
            else:
                self._addresses[name] = address
            if self._addresses != before and not self._closed:
                self._watch(dict(self._addresses))

    def replace(self, addresses: Mapping[str, str]) -> None:
        """All replicas at once."""
        with self._lock:
            if addresses != self._addresses and not self._closed:
                self._addresses = dict(addresses)
                self._watch(dict(addresses))


class StaticFleet:
    """Replicas that others run, at the addresses of the configuration, under these as names.

    A host name stands for every address that it resolves to: a headless service of Kubernetes resolves to
    the ready endpoints of its EndpointSlices. While it cannot be resolved, its last addresses stay.
    """

    def __init__(self, config: ClusterConfig, threads: Threads | None = None):
        self._config, self._threads = config, threads or OsThreads()
        self._places = Places()
        self._found: dict[str, tuple[str, ...]] = {}
        self._stopping = threading.Event()
        self._thread: Thread | None = None

    def start(self, watch: Watch) -> None:
        """Resolves the names for the first time, and again every `RESOLVE_S` seconds."""
        self._places = Places(watch)
        self._resolve()
        self._thread = self._threads.start("jlora-fleet", self._look)

    def stop(self) -> None:
        """The replicas live on."""
        self._places.close()
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._stopping.wait(RESOLVE_S):
            self._resolve()

    def _resolve(self) -> None:
        for address in self._config.addresses:
            try:
                self._found[address] = resolve(address)
            except (OSError, UnicodeError) as e:
                log.warning("cluster.addresses: %s does not resolve: %s", address, e)
        self._places.replace({one: one for found in self._found.values() for one in found})


def resolve(address: str) -> tuple[str, ...]:
    """Every IP:PORT behind HOST:PORT, sorted. Raises OSError."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    # One address for each machine of a dual stack.
    family = socket.AF_INET if any(f == socket.AF_INET for f, *_ in found) else socket.AF_INET6
    hosts = sorted({str(where[0]) for f, *_, where in found if f == family})
    return tuple(f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts)


def replica_config(config: Config, name: str, host: str) -> Config:
    """What a replica of ours reads of a service's configuration."""
    model = Path(config.model.path)
    return configuration.replace(
        config,
        {
            "model.path": str(model.resolve() if model.is_dir() else model),  # or a hub id
            **ROUTERS,
            "serve.host": host,
            "serve.port": 0,
            "cluster.replica": name,
        },
    )


class LocalFleet:
    """Replicas in processes of this machine, r0, r1, ...; one that ends starts again."""

    def __init__(self, config: Config, module: str = REPLICA, threads: Threads | None = None):
        """`module`: what each process runs, see `child`. Raises ConfigError if there are too few GPUs."""
        self._module, self._starts = module, threads or OsThreads()
        self._places = Places()
        self._configs = [
            configuration.replace(
                replica_config(config, f"r{i}", "127.0.0.1"), {"cluster.env": {**config.cluster.env, **share}}
            )
            for i, share in enumerate(gpus.shares(config))
        ]
        self._stop_s = config.serve.drain_s + STOP_S
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._children: dict[str, Child] = {}
        self._threads: list[Thread] = []

    def start(self, watch: Watch) -> None:
        """One thread for each replica starts it, waits for its end, and starts it again."""
        self._places = Places(watch)
        first: list[Future[None]] = [Future() for _ in self._configs]
        for config, up in zip(self._configs, first, strict=True):
            name = f"jlora-{config.cluster.replica}"
            self._threads.append(self._starts.start(name, partial(self._keep, config, up)))
        try:
            for up in wait(first, return_when=FIRST_EXCEPTION).done:
                up.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM to all; SIGKILL to those that take longer than `serve.drain_s` and a little more."""
        self._places.close()
        with self._lock:
            self._stopping.set()
            for child in self._children.values():
                child.terminate()
        for thread in self._threads:
            thread.join()

    @property
    def pids(self) -> Mapping[str, int]:
        """The processes that run now, by the replica's name."""
        with self._lock:
            return {name: child.pid for name, child in self._children.items()}

    def _keep(self, config: Config, up: Future[None]) -> None:
        name, (wait_s, longest_s) = config.cluster.replica, BACKOFF_S
        while not self._stopping.is_set():
            try:
                self._run(config, up)
            except Exception as e:
                if not isinstance(e, Unavailable | OSError):
                    log.error("replica %s: its start has failed", name, exc_info=e)
                if not up.done():
                    up.set_exception(e if isinstance(e, Unavailable) else Unavailable(f"replica {name}: {e}"))
                    return
                log.warning("%s", e)
                wait_s = min(2 * wait_s, longest_s)
            else:
                wait_s = BACKOFF_S[0]
            if not self._stopping.is_set():
                log.warning("replica %s: starts again in %g s", name, wait_s)
                self._stopping.wait(wait_s)
        if not up.done():  # stopped before it began
            up.set_exception(Unavailable(f"replica {name}: the fleet stops"))

    def _run(self, config: Config, up: Future[None]) -> None:
        """One life of a replica. Raises Unavailable or OSError if it does not come to serve."""
        name = config.cluster.replica
        with self._lock:  # a child either sees the stop, or is stopped
            if self._stopping.is_set():
                raise Unavailable(f"replica {name}: the fleet stops")
            child = self._children[name] = Child(config, self._module)
        try:
            log.info("replica %s: is process %d", name, child.pid)
            self._places.put(name, child.ready())
            if not up.done():
                up.set_result(None)
            end = child.wait()
            if not self._stopping.is_set():
                log.warning("replica %s: ended with code %d", name, end.code)
        finally:
            self._places.put(name, None)
            with self._lock:
                del self._children[name]
