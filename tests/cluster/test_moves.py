"""Moves that the balance makes at a router: their order, their number, and adapters that come late or never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from jlora.cluster.balance import Move, Terms
from jlora.cluster.balancing import Balancing
from jlora.cluster.directory import Version
from jlora.cluster.requests import MOST_MOVES
from jlora.cluster.routing.session import SessionSticky
from jlora.engine.shelf import HINTS
from tests.cluster import _port as port
from tests.cluster._links import INFO, FakeReplica, Service, request, service, submit, wait_for


@pytest.fixture
def two() -> Iterator[Service]:
    with service(2) as made:
        for replica in made.replicas:
            replica.paused = True
        yield made


def sides(two: Service) -> tuple[FakeReplica, FakeReplica]:
    """The replica that has the requests, and the other one."""
    wait_for(lambda: any(replica.running for replica in two.replicas))
    source, target = sorted(two.replicas, key=lambda replica: not replica.running)
    return source, target


def begin(two: Service, balancing: Balancing, moves: Sequence[Move]) -> None:
    async def run() -> None:
        balancing.begin(moves)

    two.loop.run(run())


def test_a_request_keeps_its_arrival_and_moves_a_bounded_number_of_times(two: Service):
    client = submit(two, request("first"))
    source, target = sides(two)
    dispatcher, balancing = port.dispatcher(two.router), Balancing(port.dispatcher(two.router), 1.0)
    (live,) = dispatcher.table.all()
    for _ in range(MOST_MOVES):
        begin(two, balancing, [Move(live.handle, source.name, target.name, None)])
        wait_for(lambda to=target: to.running)
        source, target = target, source
    begin(two, balancing, [Move(live.handle, source.name, target.name, None)])
    assert balancing.moved == MOST_MOVES and live.replica == source.name
    waits = sorted(start.waited_s for replica in two.replicas for start in replica.started)
    assert len(waits) == MOST_MOVES + 1 and waits[0] < waits[1] < waits[2]
    assert [job.movable for job in port.jobs(balancing)] == [False]
    two.router.abort_named("first")
    client.wait()
    wait_for(lambda: sum(len(replica.cancelled) for replica in two.replicas) == MOST_MOVES + 1)
    assert sum(len(replica.moved) for replica in two.replicas) == MOST_MOVES, "an abort is no move"


def test_an_adapter_that_does_not_come_holds_up_no_other_move(two: Service, monkeypatch: pytest.MonkeyPatch):
    two.directory.versions["slow"] = Version("slow", 1, "/slow", "abc", 8, 2 * INFO.block_bytes + 1)
    clients = [submit(two, request("stays", adapter="slow"))]
    source, target = sides(two)
    for other in two.replicas:
        other.draining = other is target  # what comes goes where the first one is
    dispatcher, balancing = port.dispatcher(two.router), Balancing(port.dispatcher(two.router), 1.0)
    wait_for(lambda: dispatcher.books.view[target.name].health == "draining")
    clients += [submit(two, request(name)) for name in ("goes", "later")]
    target.draining = False
    wait_for(lambda: dispatcher.books.view[target.name].health == "up")
    stays, goes, later = (port.handle(dispatcher, name) for name in ("stays", "goes", "later"))
    begin(
        two,
        balancing,
        [Move(stays, source.name, target.name, "slow@1"), Move(goes, source.name, target.name, None)],
    )
    assert balancing.moved == 1 and place(two, goes) == target.name
    at = {job.key: (job.replica, job.movable) for job in port.jobs(balancing)}
    blocks = {job.key: job.blocks for job in port.jobs(balancing)}
    assert (blocks[stays], blocks[later]) == (3, 0), "an adapter fills whole blocks"
    assert at[stays] == (target.name, False), "it counts where it goes, and no plan moves it meanwhile"
    assert at[later] == (source.name, True)
    begin(two, balancing, [Move(later, source.name, target.name, None)])
    assert balancing.moved == 2 and place(two, stays) == source.name
    wait_for(lambda: target.fetched == ["slow@1"])
    monkeypatch.setattr(*port.arrives(), lambda self, move: True)
    balancing_look(two, balancing)
    assert balancing.moved == 3 and place(two, stays) == target.name
    end(two, clients)


def test_a_replica_is_asked_again_for_what_it_has_refused_in_silence(two: Service, monkeypatch: pytest.MonkeyPatch):
    """An engine has so many hints on their way at most, and says nothing of the others."""
    source, target = two.replicas
    dispatcher, balancing = port.dispatcher(two.router), Balancing(port.dispatcher(two.router), 1.0)
    target.draining = True
    wait_for(lambda: dispatcher.books.view[target.name].health == "draining")
    names = [f"a{i}" for i in range(HINTS + 4)]
    two.directory.versions |= {name: Version(name, 1, f"/{name}") for name in names}
    clients = [submit(two, request(name, adapter=name)) for name in names]
    target.draining = False
    wait_for(lambda: dispatcher.books.view[target.name].health == "up")
    moves = [Move(port.handle(dispatcher, name), source.name, target.name, f"{name}@1") for name in names]
    monkeypatch.setattr("jlora.cluster.balancing.AGAIN_S", 1e6)
    for _ in range(2):
        begin(two, balancing, moves)
    wait_for(lambda: target.fetched == [move.adapter for move in moves])
    for come in (HINTS, len(names)):
        target.holds = [f"{name}@1" for name in names[:come]]
        wait_for(lambda come=come: len(dispatcher.books.view[target.name].tiers) == come)
        monkeypatch.setattr("jlora.cluster.balancing.AGAIN_S", 0.0)
        balancing_look(two, balancing)
        assert balancing.moved == come
    wait_for(lambda: len(target.started) == len(names))
    assert target.fetched[len(names) :] == [move.adapter for move in moves[HINTS:]]
    end(two, clients)


def test_a_move_whose_adapter_never_comes_is_given_up(two: Service, monkeypatch: pytest.MonkeyPatch):
    two.directory.versions["slow"] = Version("slow", 1, "/slow", "abc")
    client = submit(two, request("stays", adapter="slow"))
    source, target = sides(two)
    balancing = Balancing(port.dispatcher(two.router), 1.0)
    (live,) = port.dispatcher(two.router).table.all()
    monkeypatch.setattr("jlora.cluster.balancing.ARRIVE_S", -1.0)
    begin(two, balancing, [Move(live.handle, source.name, target.name, "slow@1")])
    assert not port.coming(balancing) and balancing.moved == 0 and live.replica == source.name
    assert [job.movable for job in port.jobs(balancing)] == [True]
    end(two, [client])


def test_the_longest_plan_and_the_largest_are_told():
    with service(2, policy=SessionSticky()) as one:
        for replica in one.replicas:
            replica.paused = True
        balancing, sizes, took = Balancing(port.dispatcher(one.router), 1.0, Terms(queue_s=0.0)), [], []
        for names in (("a", "b", "c"), ("d", "e")):
            clients = [submit(one, request(name, session="same")) for name in names]
            wait_for(lambda n=names: sorted(len(replica.running) for replica in one.replicas) == [0, len(n)])
            one.loop.run(port.next_plan(balancing))
            sizes.append(balancing.candidates)
            took.append(balancing.solve_s)
            end(one, clients)
    assert sizes == [3, 3] and took[1] >= took[0] > 0


def place(two: Service, handle: int) -> str:
    routed = port.dispatcher(two.router).table.get(handle)
    assert routed is not None
    return routed.replica


def balancing_look(two: Service, balancing: Balancing) -> None:
    async def look() -> None:
        balancing.look()

    two.loop.run(look())


def end(two: Service, clients: Sequence) -> None:
    for name in [name for _, name in list(port.dispatcher(two.router).names)]:
        two.router.abort_named(name)
    for client in clients:
        client.wait()
