"""Real replicas of a tiny model on loopback, and a controller over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from jlora import config as configuration
from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory import Member
from jlora.cluster.found import Found
from jlora.cluster.peer import Fetcher, PeerServicer
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.registry import Registry
from jlora.cluster.secret import Secret
from jlora.cluster.upkeep import Upkeep
from jlora.cluster.uses import Uses
from jlora.errors import NotFound
from jlora.model.spec import ModelSpec
from jlora.ports import System
from jlora.serve.backend import Backend
from jlora.types import AdapterInfo
from tests import _make
from tests.serve import _server
from tests.serve._server import Served

# Of the servers' tests, whose programs are compiled once for all; only those that are needed.
SMALL: Mapping[str, Any] = {**_server.SMALL, "engine.warmup": False}


def text_spec() -> ModelSpec:
    """The shape of `text_model`."""
    return _make.tiny_spec(vocab=_server.VOCAB, max_len=_server.MAX_LEN, eos_ids=(_server.END,))


@contextmanager
def replicas(model: Path, count: int) -> Iterator[list[Served]]:
    """Replicas that know no adapters, and keep what a controller tells them to."""
    with ExitStack() as opened:

        def add(backend: Backend, server: grpc.aio.Server) -> None:
            engine: Any = backend.loaded
            fetcher = Fetcher(lambda: engine)
            opened.callback(fetcher.close)
            rpc.add_PeerServicer_to_server(PeerServicer(lambda: engine, Secret(), fetcher.adopt), server)

        yield [opened.enter_context(_server.serve(model, SMALL, services=[add])) for _ in range(count)]


@dataclass
class Service:
    """A controller over replicas, of which those in `up` are there; they are `emptied` at its end."""

    served: Sequence[Served]
    controller: Controller
    upkeep: Upkeep
    up: list[int] = field(default_factory=list)
    emptied: bool = True

    def members(self) -> list[Member]:
        """As the messages of links would say."""
        return [Member(f"r{i}", self.served[i].address, self.tiers(i)) for i in list(self.up)]

    def at(self, index: int) -> dict[str, AdapterInfo]:
        """What a replica has, by key."""
        return {info.name: info for info in self.served[index].replica.adapters().result(20)}

    def tiers(self, index: int) -> dict[str, str]:
        return {key: info.tier for key, info in self.at(index).items()}

    def until(self, index: int, keys: set[str]) -> None:
        """Rounds of upkeep until a replica has exactly these versions."""

        def reached() -> bool:
            self.upkeep.round()
            return set(self.at(index)) == keys

        _server.wait_until(reached)


@contextmanager
def service(served: Sequence[Served], file: str = "", **settings: Any) -> Iterator[Service]:
    """A new controller; replicas are empty at its end, unless it says otherwise."""
    config = configuration.load(None, {key.replace("__", "."): value for key, value in settings.items()})
    system = System()
    registry, found = Registry(file, system.threads), Found(config, system)
    controller = Controller(registry, found, Calls(), system)
    controller.uses = Uses(hold_s=0)
    made = Service(served, controller, Upkeep(controller, found, system), list(range(len(served))))
    controller.follow(made.members)
    try:
        controller.add(found.first(registry))
        yield made
    finally:
        made.upkeep.close()
        controller.close()
        registry.close()
        for index, one in enumerate(served if made.emptied else ()):
            for key in made.at(index):
                with suppress(NotFound):  # the controller may be dropping it just now
                    one.replica.unload_adapter(key).result(20)
