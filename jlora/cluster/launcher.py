"""The router's process: the fronts over a `Router`. It starts the replicas if the fleet does, and never imports jax.

bind the ports, and answer UNAVAILABLE
start the fleet, and wait until a replica is attached and the adapters are known, and a little for the others
print the ready line, health SERVING
SIGTERM or SIGINT: as `jlora serve`; then the fleet stops
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from jlora.cluster.attach import Terms
from jlora.cluster.directory import Directory
from jlora.cluster.fleet import Fleet
from jlora.cluster.router import Router
from jlora.cluster.routing.policy import Policy
from jlora.cluster.routing.routes import ways_of
from jlora.cluster.routing.ways import Ways
from jlora.config import ClusterConfig, Config
from jlora.engine.futures import done
from jlora.errors import Unavailable
from jlora.model.hub import resolve
from jlora.ports import Threads
from jlora.replica import Replica
from jlora.serve import launcher
from jlora.serve.client import Login
from jlora.serve.launcher import Program
from jlora.serve.server import Service
from jlora.serve.tokenizer import Tokenizer
from jlora.step_model import FittedSteps

log = logging.getLogger(__name__)

NAMED = 64  # replicas that a router of a static fleet is made for: a name stands for any number
REST_S = 2.0  # for the other replicas, once one is attached


@dataclass(frozen=True, slots=True)
class Parts:
    """What a router stands on.

    Attributes:
        fleet: starts the replicas and says where they are.
        directory: knows the adapters; `launch` closes neither it nor what it stands on.
        policy: chooses replicas.
        threads: have started, or start, those of the other parts.
        token: the secret that routers and replicas share.
        services: gRPC services on the router's port, beside those of `jlora.v1`.
        known: ends once the directory knows the service's adapters.
    """

    fleet: Fleet
    directory: Directory
    policy: Policy
    threads: Threads
    token: str = ""
    services: tuple[Service, ...] = ()
    known: Future[None] = field(default_factory=lambda: done(None))


def launch(config: Config, parts: Parts) -> int:
    """Serves until a signal; returns the process's exit code. Then the fleet has stopped."""
    try:
        return launcher.run(config, program(parts, config.cluster))
    finally:
        parts.fleet.stop()


def program(parts: Parts, cluster: ClusterConfig) -> Program:
    """What the router's process serves."""
    replicas = max(cluster.replicas, len(cluster.addresses), NAMED if cluster.fleet == "static" else 0)
    load = partial(_load, parts=parts)
    return Program("jlora cluster", load, _ready, parts.services, replicas=replicas, threads=parts.threads)


def login(config: Config, token: str) -> Login:
    """What a process of the service shows another one.

    With `cluster.tls_name` certificates name the service: processes are reached by addresses, which change.
    With `serve.tls_client_ca` the two prove each other's certificates. With a certificate only, which is then its
    own authority, calls are encrypted.
    """
    serve = config.serve
    ca = serve.tls_client_ca or serve.tls_cert
    return Login(token, ca, serve.tls_cert, serve.tls_key, config.cluster.tls_name) if ca else Login(token)


async def _load(config: Config, parts: Parts) -> tuple[Replica, Tokenizer | None]:
    terms = Terms(f"router-{uuid.uuid4().hex[:12]}", login(config, parts.token), config.cluster.suspect_s)
    balance_s = config.cluster.balance_s if config.cluster.balance == "dlora" else 0.0
    path = config.engine.step_model
    ways = ways_of(FittedSteps.read(Path(path))) if balance_s and path else Ways()
    router = Router(parts.directory, parts.policy, terms, _seed(config, terms.router), balance_s, ways)
    starting = asyncio.ensure_future(asyncio.to_thread(parts.fleet.start, router.place))
    awaited = "replica"
    try:
        began = time.monotonic()
        await starting
        left = max(1.0, config.cluster.start_timeout_s - (time.monotonic() - began))
        async with asyncio.timeout(left):
            await router.ready()
            awaited = "controller"  # without its table, a request for any adapter would fail
            await asyncio.wrap_future(parts.known)
        await router.ready(REST_S)
        await asyncio.wrap_future(router.state())  # what replicas count from here on is this router's to tell
        return router, await asyncio.to_thread(_tokenizer, config, router)
    except TimeoutError:
        await router.aclose()
        raise Unavailable(f"no {awaited} has answered in cluster.start_timeout_s = {left:g} s") from None
    except BaseException:  # also if a signal ends it
        await asyncio.to_thread(parts.fleet.stop)  # `start` may wait still, on its thread
        await router.aclose()
        raise


def _seed(config: Config, router: str) -> int | str:
    """Of the seeds that a router draws: routers of one service share a configuration, and draw seeds of their own."""
    return f"{config.model.seed} {router}" if config.cluster.controller else config.model.seed


def _tokenizer(config: Config, router: Router) -> Tokenizer | None:
    """The model's, from the directory that the replicas serve, or else from what is configured here."""
    path = Path(router.info.config.model.path)
    tokenizer = Tokenizer.from_dir(path if path.is_dir() else resolve(config.model.path))
    if tokenizer is None:
        log.warning("the model has no tokenizer.json: the service takes token ids only")
    return tokenizer


async def _ready(where: str, replica: Replica) -> str:
    assert isinstance(replica, Router)
    return f"jlora cluster ready {where} model={replica.info.model} replicas={len(replica.replicas)}"
