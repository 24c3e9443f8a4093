"""Real engines behind a router in this process, real sockets between them, and one engine alone beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from jlora import config as configuration
from jlora.cluster.attach import Terms
from jlora.cluster.directory import Version
from jlora.cluster.link import LinkServicer
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.router import Router
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.secret import Secret
from jlora.engine.local import LocalReplica
from jlora.serve.backend import Backend
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.server import GrpcServer
from jlora.serve.tokenizer import Tokenizer
from tests import _make
from tests.cluster._links import FakeDirectory, Loop, wait_for
from tests.serve import _server
from tests.serve._server import PATIENT, Served

SECRET = Secret("the-token-of-these-tests")
INVOCATION = (300, 301)


@dataclass
class Seat:
    """An engine, and the server that shows it to routers. The server comes and goes; the engine stays."""

    name: str
    engine: LocalReplica
    loop: Loop
    address: str = ""
    backend: Backend = field(default_factory=Backend)

    def start(self) -> None:
        self.backend = Backend(self.engine)

        def add(backend: Backend, server: grpc.aio.Server) -> None:
            link = LinkServicer(backend, self.name, SECRET, records=self.engine.records)
            rpc.add_LinkServicer_to_server(link, server)

        async def start() -> None:
            self._server = GrpcServer(self.backend, PATIENT, services=[add])
            self.address = f"127.0.0.1:{self._server.bind('127.0.0.1', 0)}"
            await self._server.start()

        self.loop.run(start())

    def kill(self) -> None:
        """Breaks every connection; the engine's requests end, as they would with its process."""
        self.loop.run(self._server.stop(0))

    @property
    def running(self) -> int:
        return self.engine.state().result(20).stats.live_requests

    def holds(self, key: str) -> bool:
        """Whether it has read the adapter."""
        return any(info.name == key and info.tier != "DISK" for info in self.engine.adapters().result(20))


@dataclass
class Cluster:
    """Fronts over a router of some engines, and the same fronts over one engine alone, if there is one."""

    router: Router
    served: Served
    alone: Served
    seats: list[Seat]

    def place(self, *seats: Seat) -> None:
        """The service's replicas from now on; waits until they, and no others, are attached."""
        self.router.place({seat.name: seat.address for seat in seats})
        wait_for(lambda: {one.name for one in self.router.replicas} == {seat.name for seat in seats})

    def busy(self) -> Seat:
        """A seat that has a request; waits for one."""
        wait_for(lambda: any(seat.running for seat in self.seats))
        return next(seat for seat in self.seats if seat.running)


def adapters_of(model: Path, root: Path) -> dict[str, str]:
    """Two of the text model's adapters, one of them twice, and an activated one."""
    spec = _make.tiny_spec(vocab=_server.VOCAB, max_len=_server.MAX_LEN, eos_ids=(_server.END,))
    _make.make_adapter(root / "check", spec, 1, 4, ("q", "v", "down"), alora_invocation_tokens=list(INVOCATION))
    named = {name: str(model.parent / "adapters" / name) for name in ("upper", "wide")}
    return named | {"late": named["wide"], "check": str(root / "check")}


@contextmanager
def cluster(model: Path, adapters: Mapping[str, str], alone: bool = True, count: int = 2) -> Iterator[Cluster]:
    """Starts all engines at once. The one alone has the adapters by name, the others learn of them by version."""
    config = configuration.load(None, {**_server.SMALL, "model.path": str(model)})
    known = configuration.replace(config, {f"adapters.paths.{name}": path for name, path in adapters.items()})
    tokenizer = Tokenizer.from_dir(model)
    with engines([config] * count + [known] * alone) as made, ExitStack() as opened:
        loop = Loop()
        opened.callback(loop.close)
        seats = [Seat(f"r{i}", engine, loop) for i, engine in enumerate(made[:count])]
        for seat in seats:
            seat.start()
            opened.callback(seat.kill)
        invoked = {"check": INVOCATION}  # as a controller has read it
        versions = {
            name: Version(name, 1, path, alora_invocation_tokens=tuple(invoked.get(name, ())))
            for name, path in adapters.items()
        }
        router = loop.run(_router(versions, config))
        opened.callback(router.close)
        router.place({seat.name: seat.address for seat in seats})
        wait_for(lambda: len(router.replicas) == count)
        served = opened.enter_context(_server.serving(Backend(router, tokenizer), PATIENT))
        other = served
        if alone:
            other = opened.enter_context(_server.serving(Backend(made[-1], tokenizer), PATIENT))
        yield Cluster(router, served, other, seats)


async def _router(versions: dict[str, Version], config: configuration.Config) -> Router:
    terms = Terms("router", Login(SECRET.token), suspect_s=5.0)  # this machine may be slow
    return Router(FakeDirectory(versions), LeastLoaded(), terms, config.model.seed)


@contextmanager
def engines(configs: list[configuration.Config]) -> Iterator[list[LocalReplica]]:
    """Loads them beside each other."""
    made: list[LocalReplica | BaseException | None] = [None] * len(configs)

    def load(i: int) -> None:
        try:
            made[i] = LocalReplica.start(configs[i], progress=False)
        except BaseException as e:
            made[i] = e

    threads = [threading.Thread(target=load, args=(i,)) for i in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        for one in made:
            if isinstance(one, BaseException):
                raise one
        yield [one for one in made if isinstance(one, LocalReplica)]
    finally:
        for one in made:
            if isinstance(one, LocalReplica):
                one.close()


def same(one: pb.GenerateResponse, other: pb.GenerateResponse) -> None:
    """The same answer: text, tokens, log-probabilities, ends, and what was counted of it."""
    assert [o.text for o in one.outputs] == [o.text for o in other.outputs]
    assert [list(o.token_ids) for o in one.outputs] == [list(o.token_ids) for o in other.outputs]
    assert [o.finish_reason for o in one.outputs] == [o.finish_reason for o in other.outputs]
    assert one.usage.prompt_tokens == other.usage.prompt_tokens
    assert one.usage.completion_tokens == other.usage.completion_tokens
    for mine, yours in zip(one.outputs, other.outputs, strict=True):
        _close(mine.logprobs, yours.logprobs)
    _close(one.prompt_logprobs, other.prompt_logprobs)


def _close(ones, others) -> None:
    assert [e.token_id for e in ones] == [e.token_id for e in others]
    for one, other in zip(ones, others, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-4
