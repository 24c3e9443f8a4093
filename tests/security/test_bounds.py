"""No table of ours grows with the names and prompts that clients make up: 100,000 keys for each, or 10,000 calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from jlora.cluster.prefixes import Prefixes
from jlora.cluster.routing.policy import Ask
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.routing.sessions import Sessions
from jlora.cluster.uses import Uses
from jlora.cluster.view import ReplicaView
from jlora.engine.futures import failed
from jlora.errors import LimitReached, NotFound, QueueFull
from jlora.serve.backend import Backend
from jlora.serve.gate import Gate, Room
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.recent import MOST, Recent
from jlora.serve.services import InferenceServicer
from jlora.serve.status import StatusInterceptor
from jlora.serve.tally import Tally
from jlora.types import Request, Usage
from tests import port
from tests.cluster import _port as cluster
from tests.cluster._links import INFO, Client, request, service

KEYS = 100_000
# A table, how many entries it has, and how many it may have.
Filled = tuple[Callable[[], int], int]


def sessions() -> Iterator[Filled]:
    homes = Sessions(most=1000)
    policy, view = SessionSticky(homes), {"one": ReplicaView("one", "up")}
    yield lambda: len(homes), 1000
    for i in range(KEYS):
        policy.choose(view, Ask(None, 0, 8, session=f"session {i}"))


def prefixes() -> Iterator[Filled]:
    table = Prefixes(block_tokens=2, most=1000)
    yield lambda: len(table), 1000
    for i in range(KEYS):
        table.sent("one", table.chain((i, i + 1), ("adapter", f"tenant {i}")))


def adapters() -> Iterator[Filled]:
    tally = Tally()
    yield lambda: max(len(tally), len(tally.lines())), 1024
    for i in range(KEYS):
        tally.add(f"adapter {i}", Usage(1, 0, 1))


def tenants() -> Iterator[Filled]:
    """Clients without a key name their tenant: it is no key of the tables of limits."""
    replica: Any = Full()
    backend = Backend(replica)
    yield lambda: port.tenants(backend.gate, backend.access.tenants), 2
    asyncio.run(refused_calls(backend, KEYS // 10))
    assert replica.asked == KEYS // 10


class Full:
    """A replica without room; what it is asked has passed all of a server."""

    info = INFO
    asked = 0

    def submit(self, request: Request, _: object) -> Future[int]:
        assert request.tenant == f"tenant {self.asked}"
        self.asked += 1
        return failed(QueueFull("queue is full"))


async def refused_calls(backend: Backend, count: int) -> None:
    """Calls of `Generate`, each of a client that makes up its tenant, as gRPC hands them to the server."""
    serves: Any = grpc.unary_unary_rpc_method_handler(
        InferenceServicer(backend).Generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
    )
    calls = StatusInterceptor(backend, stall_s=30.0)

    async def found(_: object) -> Any:
        return serves

    for i in range(count):
        details: Any = SimpleNamespace(
            method="/jlora.v1.Inference/Generate", invocation_metadata=(("authorization", f"Bearer tenant {i}"),)
        )
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), tenant=f"tenant {i}")
        handler = await calls.intercept_service(found, details)
        context = Refused(handler.request_deserializer(message.SerializeToString()))
        await handler.stream_unary(None, context)
        assert context.code == grpc.StatusCode.RESOURCE_EXHAUSTED


class Refused:
    """gRPC's context of a call that is refused, as far as the server asks it."""

    def __init__(self, message: object):
        self.code: grpc.StatusCode | None = None
        self._message = message

    async def read(self) -> object:
        return self._message

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.code = code
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()


def ended() -> Iterator[Filled]:
    """Answers within the minute that a summary tells of."""
    recent = Recent(lambda: 0.0)
    yield lambda: recent.summary().ttft.count, MOST
    for _ in range(KEYS):
        recent.add(0.1, 0.01)


def routers() -> Iterator[Filled]:
    """Routers that come under new names, say what they use and leave; each counts for another tenth of a second."""
    now = iter(range(10 * KEYS))
    uses = Uses(hold_s=0.1, clock=lambda: next(now) * 0.01)
    yield lambda: cluster.streams_of(uses), 10
    for i in range(KEYS):
        uses.saw(i, f"router {i}", 1, [f"a@{i}"])
        uses.left(i)


def versions() -> Iterator[Filled]:
    """Versions that are replaced under their requests; the last request goes on."""
    uses = Uses(hold_s=0.0)
    yield lambda: cluster.versions_of(uses), 3
    for i in range(KEYS):
        uses.begin(f"a@{i}")
        uses.retire(f"a@{i}", i, lambda: None)
        if i < KEYS - 1:
            uses.end(f"a@{i}")


FILLS = (sessions, prefixes, adapters, tenants, ended, routers, versions)


@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
def test_a_table_stays_bounded(fill: Callable[[], Iterator[Filled]]):
    filling: Any = fill()
    size, most = next(filling)
    assert size() <= most
    for _ in filling:
        pass
    assert 0 < size() <= most


@pytest.mark.slow
def test_a_router_remembers_no_request_that_it_refuses():
    """Models that nobody has, and more completions than there is room for beside one that waits."""
    count, room = KEYS // 10, INFO.config.engine.max_queue + INFO.config.engine.max_seqs
    with service(1) as made:
        made.kill(made.replicas[0])
        waiting = made.router.submit(request("waits"), Client())
        refusals: list[Future[int]] = []

        async def ask() -> None:
            for i in range(count):
                unknown = request(f"u{i}", adapter=f"adapter {i}", tenant=f"tenant {i}", session=f"session {i}")
                full = request(f"f{i}", n=room, tenant=f"tenant {i}")
                refusals.extend(made.router.submit(one, Client()) for one in (unknown, full))
                await asyncio.sleep(0)

        made.loop.run(ask())
        assert Counter(type(one.exception(20)) for one in refusals) == {NotFound: count, QueueFull: count}
        assert not waiting.done() and cluster.remembered(cluster.dispatcher(made.router)) == 1


def test_what_is_bounded_is_still_counted():
    gate = Gate()
    with gate.completions(Room(2, 2), 3, "greedy"):
        with pytest.raises(LimitReached, match="greedy"), gate.completions(Room(2, 2), 1, "greedy"):
            pass
        with gate.completions(Room(2, 2), 1, "modest"):
            pass
