"""The part of `tests.port` that knows the inside of the cluster."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import grpc
import pytest

from jlora.adapters import catalogue
from jlora.adapters.catalogue import Row
from jlora.adapters.registry import Record
from jlora.cluster import launcher
from jlora.cluster.attach import Attached
from jlora.cluster.balance import Job, Move
from jlora.cluster.balancing import Balancing
from jlora.cluster.books import Books
from jlora.cluster.controller import Controller
from jlora.cluster.demand import Load
from jlora.cluster.directory_server import DirectoryServicer
from jlora.cluster.dispatch import Dispatcher
from jlora.cluster.fleet import StaticFleet
from jlora.cluster.homes import Homes
from jlora.cluster.link import LinkServicer, Stream
from jlora.cluster.peer import Fetcher, Head, _Transfer
from jlora.cluster.placement import Placement
from jlora.cluster.placing import Placing
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.registry import Registry
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.requests import Table
from jlora.cluster.router import Router
from jlora.cluster.upkeep import Upkeep
from jlora.cluster.uses import Uses
from jlora.cluster.view import ReplicaView
from jlora.config import Config
from jlora.engine.sources import Reader
from jlora.serve.tokenizer import Tokenizer

Seam = tuple[Any, str]  # as in `tests.port`


def router_tokenizer(config: Config, router: Router) -> Tokenizer | None:
    """That of a router's fronts."""
    return launcher._tokenizer(config, router)


def dispatcher(router: Router) -> Dispatcher:
    return router._dispatcher


def ticks(patch: pytest.MonkeyPatch) -> list[int]:
    """How often routers tick, from now on."""
    tick, count = Dispatcher.tick, [0]

    def counted(self: Dispatcher) -> None:
        tick(self)
        count[0] += 1

    patch.setattr(Dispatcher, "tick", counted)
    return count


def sends_per_round(patch: pytest.MonkeyPatch) -> list[int]:
    """Attempts that each round of sending begins, from now on."""
    pump, begin, sent = Dispatcher._pump, Table.begin, [0]

    def pumped(self: Dispatcher) -> None:
        sent.append(0)
        pump(self)

    def begun(self: Table, *args: Any) -> None:
        sent[-1] += 1
        begin(self, *args)

    patch.setattr(Dispatcher, "_pump", pumped)
    patch.setattr(Table, "begin", begun)
    return sent


def jobs(balancing: Balancing) -> list[Job]:
    """What the next plan sees."""
    return balancing._jobs()


def next_plan(balancing: Balancing) -> Coroutine[Any, Any, Sequence[Move]]:
    """Makes the next plan."""
    return balancing._plan()


def coming(balancing: Balancing) -> set[int]:
    """Requests whose moves wait for their adapters."""
    return set(balancing._waiting)


def arrives() -> Seam:
    """Whether a move's adapter has come."""
    return Balancing, "_there"


def remembered(dispatcher: Dispatcher) -> int:
    """Entries of the largest table that has one for each request."""
    return max(map(len, (dispatcher.names, dispatcher.table, dispatcher.entries, dispatcher._handles)))


def handle(dispatcher: Dispatcher, name: str) -> int:
    """Of a live request without a tenant."""
    return dispatcher._handles["", name]


def task(router: Router, name: str, work: Any) -> None:
    """Starts one of the router's own."""
    router._start(name, work)


def cancel(attached: Attached) -> None:
    """Ends its task from outside."""
    assert attached._task is not None
    attached._task.cancel()


def follows_by() -> Seam:
    """One stream of the controller."""
    return RemoteDirectory, "_watch"


def look(upkeep: Upkeep) -> None:
    """At the disk; what it begins has run when this returns."""
    upkeep.look()
    upkeep._pool.submit(lambda: None).result(20)


def full(upkeep: Upkeep) -> int:
    """Replicas that are asked to keep nothing for a while."""
    return len(upkeep._full)


def noted(upkeep: Upkeep) -> int:
    """Entries of all tables of tasks."""
    return sum(map(len, (upkeep._begun, upkeep._pins, upkeep._compared, upkeep._checked)))


def refused(upkeep: Upkeep) -> int:
    """Directories that are not looked at again as they are."""
    return len(upkeep._found._refused)


def planned(placing: Placing) -> dict[str, set[str]]:
    """The homes that the last time step wants."""
    return {name: set(parts) for name, parts in placing._homes.wanted.items()}


def asked(placing: Placing) -> set[str]:
    """Adapters that the last time step has forecast requests for."""
    return {name for name, rate in placing._rates.items() if rate > 0}


def plan(placing: Placing, homes: dict[str, set[str]], patch: pytest.MonkeyPatch) -> None:
    """Wants these homes, of adapters that are all asked for."""
    wanted = {name: dict.fromkeys(where, 1 / len(where)) for name, where in homes.items()}
    _become(placing, wanted, placing._homes.parts, patch)


def homeless(placing: Placing, patch: pytest.MonkeyPatch) -> None:
    """Requests have no homes to go to, until the next look."""
    _become(placing, placing._homes.wanted, {}, patch)


def _become(placing: Placing, wanted: Placement, parts: Placement, patch: pytest.MonkeyPatch) -> None:
    made = Homes(placing._homes._rule)
    made.become(wanted, parts, wanted)
    patch.setattr(placing, "_homes", made)


def load(placing: Placing) -> Load:
    return placing._load


def booked(books: Books) -> set[str]:
    """Replicas that the books have a page of."""
    return set(books._books)


def show(books: Books, views: dict[str, ReplicaView]) -> None:
    """Makes the books show this table."""
    books._views = views


def begin(attached: Attached, channel: Any, first: link.FromReplica) -> None:
    """As if the replica had answered with this message."""
    attached._begin(channel, first)


def hear(attached: Attached, message: link.FromReplica) -> None:
    attached._hear(message)


def wrote(attached: Attached, messages: int) -> None:
    """As if so many messages more had gone to the replica."""
    for _ in range(messages):
        attached._heard.write(attached._terms.clock())


def receiver(attached: Attached) -> Any:
    """Who hears of the link."""
    return attached._receiver


def unsent(attached: Attached) -> int:
    """Messages that wait to be written."""
    return len(attached._sends)


def pause_s(attached: Attached) -> float:
    """Seconds until it is asked again."""
    return attached._pause


def attempts(attached: Attached) -> int:
    """0 before the first attachment was tried."""
    return attached._epoch


async def attach(attached: Attached) -> None:
    """One attachment, to its end."""
    await attached._attach()


def end(attached: Attached) -> None:
    """As if the stream had ended."""
    attached._end("it has ended", "down")


def streams(servicer: LinkServicer) -> list[str]:
    """Routers that are attached."""
    return list(servicer._streams)


def silence_s(servicer: LinkServicer, router: str) -> float:
    """How long a router may say nothing."""
    return servicer._streams[router]._silence_s


def adopt(servicer: LinkServicer, version: link.Version) -> Any:
    """A coroutine that returns when the version is known."""
    return servicer._adopted(version)


def adopting(servicer: LinkServicer) -> int:
    """Versions on their way."""
    return len(servicer._adopting)


def cleared_while_taken(told: Sequence[Any]) -> Iterator[Any]:
    """Takes what a stream has to tell, which is dropped after the first."""
    stream = object.__new__(Stream)
    stream._told = deque(told)
    taken = stream._take()
    yield next(taken)
    stream._told.clear()
    yield from taken


def follows(remote: RemoteDirectory, uses: Uses, epoch: int) -> bool:
    """Whether the router has this epoch of the table, and it is all that the controller has been told of."""
    return {remote._epoch} == {router.epoch for router in uses._routers.values()} == {epoch}


def streams_of(uses: Uses) -> int:
    """Streams of routers whose words still count."""
    return len(uses._routers)


def versions_of(uses: Uses) -> int:
    """Entries of all tables of versions."""
    return len(uses._requests) + len(uses._begun) + len(uses._old)


def looks_at() -> Seam:
    """One old version: whether nobody needs it any more."""
    return Uses, "_is_free"


def epoch(remote: RemoteDirectory) -> int:
    """Of the table; 0 before one has come."""
    return remote._epoch


def connection(remote: RemoteDirectory) -> grpc.Channel:
    return remote._channel


def listens(remote: RemoteDirectory) -> bool:
    """Whether a stream of the controller is open."""
    return remote._heard < math.inf


def applies(remote: RemoteDirectory) -> Seam:
    """Takes a table in."""
    return remote, "_apply"


def tells() -> Seam:
    """The controller's messages for one change of the table."""
    return DirectoryServicer, "_messages"


def watch(remote: RemoteDirectory) -> None:
    """Follows the table until the stream ends."""
    remote._watch()


def names_of(remote: RemoteDirectory) -> list[str]:
    """Names in the table, in order."""
    assert sorted(remote._versions) == remote._names
    return remote._names


def requests_of(remote: RemoteDirectory) -> int:
    """Versions that requests use."""
    return len(remote._requests)


def served(servicer: DirectoryServicer) -> Controller:
    """Whose table the servicer tells."""
    return servicer._controller


def reads(controller: Controller) -> Seam:
    """Has a replica read an adapter."""
    return controller, "_read"


def pins_everywhere(controller: Controller) -> Seam:
    """Has every replica pin an adapter, or not."""
    return controller, "_pin_everywhere"


def resolved(fleet: StaticFleet) -> dict[str, tuple[str, ...]]:
    """What the fleet's addresses resolve to now."""
    fleet._resolve()
    return fleet._found


def pace(fetcher: Fetcher, path_bps: float, peer_bps: float = 1e9) -> None:
    """What it takes for the bytes per second of files, and of peers."""
    fetcher._path_bps, fetcher._peer_bps = path_bps, peer_bps


def channel(fetcher: Fetcher, peer: str) -> grpc.Channel:
    return fetcher._channel(peer)


def connected(fetcher: Fetcher) -> list[str]:
    """Peers with an open channel, the last one used last."""
    return list(fetcher._channels)


def head(fetcher: Fetcher, peer: str, version: link.Version, reader: Reader) -> Head:
    """What a peer says of a version before its data."""
    return fetcher._head(peer, version.key, version.digest, reader)


def fetches() -> Seam:
    """Chunks from a peer."""
    return Fetcher, "_chunks"


def transfer(record: Record, reader: Reader) -> Any:
    """Puts the chunks of a version together."""
    return _Transfer(record, reader)


async def chunks(servicer: Any, request: link.FetchRequest) -> list[link.Chunk]:
    """What a peer gives, without its checks of the caller."""
    return [chunk async for chunk in servicer._chunks(request)]


def encoded(row: Row) -> tuple[Any, ...]:
    """A row of the catalogue's table."""
    return catalogue._encoded(row)


def durability(registry: Registry) -> int:
    """SQLite's `synchronous`."""
    ((level,),) = registry._catalogue._table.execute("pragma synchronous")
    return level


def table(registry: Registry) -> Any:
    """The connection to the registry's file."""
    return registry._catalogue._table
