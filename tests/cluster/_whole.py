"""A router over real engines, each with all services of a replica, and the real controller."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from jlora import config as configuration
from jlora.cluster.attach import Terms
from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.found import Found
from jlora.cluster.link import LinkServicer
from jlora.cluster.peer import Fetcher, PeerServicer
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.registry import Registry
from jlora.cluster.router import Router
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.routing.policy import Policy
from jlora.cluster.upkeep import Upkeep
from jlora.cluster.uses import Uses
from jlora.ports import System
from jlora.serve.backend import Backend
from jlora.serve.client import Login
from jlora.serve.server import GrpcServer
from jlora.types import Request, SamplingParams, TokenEvent
from jlora.validation import validate
from tests.cluster._links import Loop, wait_for
from tests.cluster._real import SECRET, Seat, engines
from tests.cluster._service import SMALL
from tests.serve._server import PATIENT

PROMPT = tuple(range(3, 12))
LONG = 1000  # tokens: the answer still runs when the test has done something else


class Whole(Seat):
    """A replica with all services of the cluster, as `jlora cluster replica` has them."""

    fetcher: Fetcher

    grpc: GrpcServer

    def kill(self) -> None:
        self.loop.run(self.grpc.stop(0))

    def start(self) -> None:
        self.backend = Backend(self.engine)
        self.fetcher = Fetcher(lambda: self.engine, Login(SECRET.token))

        def add(backend: Backend, server: grpc.aio.Server) -> None:
            servicer = LinkServicer(backend, self.name, SECRET, self.fetcher.adopt, self.engine.records, self.fetcher)
            rpc.add_LinkServicer_to_server(servicer, server)
            rpc.add_PeerServicer_to_server(PeerServicer(lambda: self.engine, SECRET, self.fetcher.adopt), server)

        async def start() -> None:
            self.grpc = GrpcServer(self.backend, PATIENT, services=[add])
            self.address = f"127.0.0.1:{self.grpc.bind('127.0.0.1', 0)}"
            await self.grpc.start()

        self.loop.run(start())


@dataclass
class Answer:
    """A request under way."""

    events: queue.SimpleQueue[list[TokenEvent]] = field(default_factory=queue.SimpleQueue)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def read(self, least: int = 2 * LONG) -> list[int]:
        """The tokens so far, once there are `least` or all. Raises the error that ended it."""
        while not self.ended and len(self.tokens) < least:
            for event in self.events.get(timeout=60):
                if event.error is not None:
                    raise event.error
                self.tokens += [] if event.token_id is None else [event.token_id]
                self.ended = self.ended or event.finish_reason is not None
        return self.tokens


@dataclass
class World:
    router: Router
    controller: Controller
    found: Found
    upkeep: Upkeep
    seats: list[Whole]
    asked: int = 0

    def ask(self, adapter: str, tokens: int = 64) -> Answer:
        answer, self.asked = Answer(), self.asked + 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = validate(Request(f"q{self.asked}", PROMPT, sampling, adapter=adapter), self.router.info.limits)
        self.router.submit(request, answer.events.put).result(60)
        return answer

    def keys(self) -> set[str]:
        return {record.name for seat in self.seats for record in seat.engine.records()}


@contextmanager
def world(model: Path, policy: Policy | None = None, **settings: Any) -> Iterator[World]:
    """Two replicas without adapters, and a router that is attached to both. `settings` are of the cache."""
    cache = {f"cache.{key}": value for key, value in settings.items()}
    config = configuration.load(None, {**SMALL, **cache, "model.path": str(model)})
    system = System()
    with engines([config] * 2) as made, ExitStack() as opened:
        loop = Loop()
        opened.callback(loop.close)
        seats = [Whole(f"r{i}", engine, loop) for i, engine in enumerate(made)]
        for seat in seats:
            seat.start()
            opened.callback(seat.kill)
        registry, found = Registry("", system.threads), Found(config, system)
        controller = Controller(registry, found, Calls(Login(SECRET.token)), system)
        controller.uses = Uses(hold_s=0)
        upkeep = Upkeep(controller, found, system)

        async def start() -> Router:
            return Router(controller, policy or LeastLoaded(), Terms("router", Login(SECRET.token), 5.0), 0)

        router = loop.run(start())
        opened.callback(router.close)
        router.place({seat.name: seat.address for seat in seats})
        wait_for(lambda: len(router.replicas) == 2)
        yield World(router, controller, found, upkeep, seats)
        upkeep.close()
        controller.close()
        registry.close()
        for seat in seats:
            seat.fetcher.close()
