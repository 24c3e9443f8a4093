"""A router whose policy or directory fails, whose adapters cannot be read, and what its books say meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jlora.cluster.balance import Move
from jlora.cluster.balancing import Balancing
from jlora.cluster.books import Books
from jlora.cluster.directory import Version
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.routing.policy import Policy
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.view import Held, ReplicaView
from jlora.errors import DataLoss, NotFound, ResourceExhausted
from jlora.serve.client import MAX_MESSAGE_BYTES
from jlora.serve.proto import jlora_pb2 as pb
from tests.cluster import _port as port
from tests.cluster._links import (
    INFO,
    VOCAB,
    Client,
    FakeReplica,
    Service,
    answer,
    request,
    service,
    submit,
    wait_for,
)
from tests.cluster.test_router import whole


@pytest.fixture
def two() -> Iterator[Service]:
    with service(2) as made:
        yield made


def test_the_books_count_the_tokens_of_what_runs_and_nothing_of_what_has_ended(two: Service):
    book = port.dispatcher(two.router).books
    whole(submit(two, request("whole", max_tokens=20, n=2)), request("whole", max_tokens=20, n=2), two)
    for replica in two.replicas:
        replica.paused = True
    waits = submit(two, request("waits"))
    two.router.abort_named("waits")
    waits.wait()
    assert [seen.held for seen in book.view.values()] == [Held(), Held()]


def test_of_many_that_wait_some_are_sent_at_a_time(two: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jlora.cluster.dispatch.SENDS", 3)
    dispatcher = port.dispatcher(two.router)
    for replica in two.replicas:
        two.kill(replica)
    wait_for(lambda: not two.router.replicas)
    clients = [Client() for _ in range(8)]
    for i, client in enumerate(clients):
        two.router.submit(request(f"r{i}", max_tokens=2), client)
    wait_for(lambda: len(dispatcher.table.waiting()) == 8)
    sent = port.sends_per_round(monkeypatch)
    two.place(two.add("r9"))
    for client in clients:
        client.wait()
    assert [n for n in sent if n] == [3, 3, 2]


@pytest.mark.parametrize("policy", [LeastLoaded(), SessionSticky()])
def test_the_requests_of_a_lost_replica_go_on_spread_and_some_at_a_time(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jlora.cluster.dispatch.SENDS", 3)
    with service(3, policy=policy, paused=True) as made:
        asked = [request(f"r{i}", max_tokens=2) for i in range(18)]
        clients = [submit(made, one) for one in asked]
        dead, *others = made.replicas
        before = [len(one.started) for one in others]
        assert len(dead.started) == 6
        sent = port.sends_per_round(monkeypatch)
        made.kill(dead)
        wait_for(lambda: sum(len(one.started) for one in others) == sum(before) + 6)
        assert [len(one.started) - had for one, had in zip(others, before, strict=True)] == [3, 3]
        assert max(sent) <= 3 and sum(sent) == 6
        for one in others:
            one.paused = False
        assert [client.wait().tokens() for client in clients] == [answer(one) for one in asked]


def test_an_answer_that_went_on_elsewhere_says_nothing_of_a_replicas_pace(two: Service):
    pace = port.dispatcher(two.router).pace
    asked = request(max_tokens=100)
    client = submit(two, asked)
    wait_for(lambda: len(client.tokens()) > 5)
    two.kill(next(replica for replica in two.replicas if replica.started))
    assert client.wait().tokens() == answer(asked) and client.last.timing is not None
    assert client.last.timing.prefill > 0 and pace.outputs == 100
    assert pace.token == pace.answer == 0.0 and not pace.answers


def test_a_request_that_only_full_replicas_may_take_holds_up_no_other(monkeypatch: pytest.MonkeyPatch):
    engine = replace(INFO.config.engine, max_seqs=1, max_queue=2)
    info = replace(INFO, config=replace(INFO.config, engine=engine))
    with service(2, policy=LeastLoaded(), info=info, paused=True) as made:
        full, other = made.replicas
        made.directory.versions["x"] = Version("x", 1, "/x")
        full.holds, other.draining = ["x@1"], True
        dispatcher = port.dispatcher(made.router)
        wait_for(lambda: dispatcher.books.view[other.name].health == "draining")
        wait_for(lambda: dispatcher.books.view[full.name].tiers)
        clients = [submit(made, request(f"r{i}")) for i in range(3)]  # all that it holds
        asked = [request("bound", adapter="x"), request("free"), request("last")]
        for one in asked:
            clients.append(Client())
            made.router.submit(one, clients[-1])
        wait_for(lambda: len(dispatcher.table.waiting()) == 3)
        dispatcher.table.waiting()[0].others.add(other.name)  # it was found with other weights
        other.draining = False
        wait_for(lambda: len(other.started) == 2)
        assert [routed.request.id for routed in dispatcher.table.waiting()] == ["bound"]
        full.paused = other.paused = False
        assert [client.wait().tokens() for client in clients[3:]] == [answer(one) for one in asked]
        assert [start.adapter.key for start in full.started][-1] == "x@1"


LACKS = [NotFound("no such directory"), DataLoss("files have changed"), ResourceExhausted("too little memory")]


@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_an_adapter_that_one_replica_cannot_read_is_anothers(two: Service, error: Exception):
    two.directory.versions["x"] = Version("x", 1, "/x")
    asked = request("one", adapter="x")
    for replica in two.replicas:
        replica.refuse = [(error, False)]
    first = two.router.submit(asked, Client())
    with pytest.raises(type(error)):
        first.result(20)
    assert [len(replica.started) for replica in two.replicas] == [1, 1]
    two.replicas[0].refuse, two.replicas[1].refuse = [(error, False)] * 2, []
    for i in range(2):
        again = request(f"again{i}", adapter="x")
        whole(submit(two, again), again, two)


@pytest.mark.parametrize("where", ["choose", "peers", "end"])
def test_a_bug_in_policy_or_directory_ends_its_own_request_alone(two: Service, where: str):
    dispatcher = port.dispatcher(two.router)
    two.directory.versions |= {"bad": Version("bad", 1, "/b"), "x": Version("x", 1, "/x")}
    part = dispatcher.choice.policy if where == "choose" else two.directory
    works = getattr(part, where)

    def broken(*args: object) -> object:
        if any(getattr(arg, "adapter", getattr(arg, "key", "")) == "bad@1" for arg in args):
            raise KeyError("a bug")
        return works(*args)

    setattr(part, where, broken)
    for replica in two.replicas:  # so that they wait, and a tick sends them
        replica.draining = True
    wait_for(lambda: all(seen.health == "draining" for seen in dispatcher.books.view.values()))
    bad, good = request("bad", max_tokens=3, adapter="bad"), request("good", max_tokens=3, adapter="x")
    client = Client()
    submitted, ended = two.router.submit(bad, Client()), two.router.submit(good, client)
    for replica in two.replicas:
        replica.draining = False
    ended.result(20)
    if where != "end":
        with pytest.raises(KeyError):
            submitted.result(20)
    wait_for(lambda: not dispatcher.names)
    whole(client, good, two)
    assert not two.router.failure.done()


def test_members_may_be_asked_while_a_replica_goes(two: Service):
    class Going(dict[str, ReplicaView]):
        def __contains__(self, name: object) -> bool:
            found = super().__contains__(name)
            self.pop(str(name), None)  # on the loop's thread, just now
            return found

    dispatcher = port.dispatcher(two.router)
    dispatcher.books = Books()
    port.show(dispatcher.books, Going({"r0": ReplicaView("r0", "up")}))
    assert {member.name for member in dispatcher.members()} <= {"r0"}


def test_a_replica_of_other_weights_under_the_same_name_is_not_used():
    with service(1, info=replace(INFO, base="a" * 64)) as one:
        other, unknown = one.add("r1", info=replace(INFO, base="b" * 64)), one.add("r2")
        one.place(*one.replicas)
        wait_for(lambda: len(other.epochs) >= 2 and len(one.router.replicas) == 2)
        assert {attached.name for attached in one.router.replicas} == {"r0", unknown.name}


class Spoiler(FakeReplica):
    """Each of its tokens also has these fields."""

    spoils = link.Token()

    def _step(self, running: dict[int, Any]) -> list[link.Token]:
        tokens = super()._step(running)
        for token in tokens:
            token.MergeFrom(self.spoils)
        return tokens


@pytest.mark.parametrize(
    "spoils",
    [link.Token(id=VOCAB), link.Token(id=-1), link.Token(finish_reason="bored")]
    + [link.Token(finish_reason="length", usage=pb.Usage(cached_tokens=-5))]
    + [
        link.Token(finish_reason="length", timing=timing)
        for timing in (pb.Timing(ttft_s=math.nan), pb.Timing(tpot_s=-1.0))
    ],
)
def test_a_replica_that_sends_what_no_engine_says_is_left_and_its_request_goes_on_elsewhere(spoils: link.Token):
    with service(0) as made:
        spoiler = Spoiler("a0")
        spoiler.spoils = spoils
        made.loop.run(spoiler.serve())
        made.replicas.append(spoiler)
        made.place(spoiler)
        wait_for(lambda: len(made.router.replicas) == 1)
        client = submit(made, request("whole", max_tokens=5))
        wait_for(lambda: spoiler.started)
        made.add("r0")
        made.place(*made.replicas)
        client.wait()
        assert client.tokens() == answer(request("whole", max_tokens=5))
        assert client.last.finish_reason == "length" and client.last.timing is not None


def test_the_adapter_of_a_move_is_fetched_though_others_that_need_it_have_ended(two: Service):
    two.directory.versions["x"] = Version("x", 1, "/x", "abc")
    for replica in two.replicas:
        replica.paused = True
    waits = submit(two, request("waits", adapter="x"))
    wait_for(lambda: any(replica.running for replica in two.replicas))
    source, target = sorted(two.replicas, key=lambda replica: not replica.running)
    dispatcher = port.dispatcher(two.router)
    (live,) = dispatcher.table.all()
    moves = [Move(key, source.name, target.name, "x@1") for key in (live.handle + 1, live.handle, live.handle + 2)]

    async def begin() -> None:
        Balancing(dispatcher, 1.0).begin(moves)

    two.loop.run(begin())
    wait_for(lambda: target.fetched)
    assert target.fetched == ["x@1"]
    two.router.abort_named("waits")
    waits.wait()


def test_no_request_moves_to_a_replica_that_has_other_weights():
    """It was lost there before, for that reason."""
    with service(2) as two:
        for replica in two.replicas:
            replica.paused = True
        dispatcher = port.dispatcher(two.router)
        client = submit(two, request("first"))
        wait_for(lambda: any(replica.running for replica in two.replicas))
        source, target = sorted(two.replicas, key=lambda replica: not replica.running)
        (live,) = dispatcher.table.all()

        async def move() -> tuple[bool, bool]:
            going = Move(live.handle, source.name, target.name, None)
            live.others.add(target.name)
            refused = dispatcher.migrate(going)
            live.others.clear()
            return refused, dispatcher.migrate(going)

        assert two.loop.run(move()) == (False, True)
        two.router.abort_named("first")
        client.wait()


def test_a_session_stays_where_a_move_has_brought_it():
    with service(2, policy=SessionSticky()) as two:
        for replica in two.replicas:
            replica.paused = True
        dispatcher = port.dispatcher(two.router)
        first = submit(two, request("first", session="chat"))
        wait_for(lambda: any(replica.running for replica in two.replicas))
        source, target = sorted(two.replicas, key=lambda replica: not replica.running)
        (live,) = dispatcher.table.all()

        async def move() -> bool:
            return dispatcher.migrate(Move(live.handle, source.name, target.name, None))

        assert two.loop.run(move())
        wait_for(lambda: target.running)
        second = submit(two, request("second", session="chat"))
        wait_for(lambda: len(target.running) == 2)
        assert not source.running
        for client, name in ((first, "first"), (second, "second")):
            two.router.abort_named(name)
            client.wait()


@pytest.mark.parametrize("second", ["one", "other"])
def test_an_answer_goes_on_with_the_weights_with_which_it_began_or_ends(second: str):
    """No digest was known; the first attempt tells one."""
    with service(2) as two:
        two.directory.versions["x"] = Version("x", 1, "/x")
        asked = request(max_tokens=100, adapter="x")
        for replica in two.replicas:
            replica.digest = "one"
        client = submit(two, asked)
        wait_for(lambda: len(client.tokens()) > 5)
        first, then = sorted(two.replicas, key=lambda replica: not replica.started)
        then.digest = second
        two.kill(first)
        client.wait()
        assert (first.started[0].adapter.digest, then.started[0].adapter.digest) == ("", "one")
        if second == "one":
            assert client.tokens() == answer(asked, 0)
        else:
            assert isinstance(client.last.error, DataLoss)
            assert client.tokens() == answer(asked, 0)[: len(client.tokens())]
            wait_for(lambda: bool(then.cancelled))


def test_a_replica_whose_message_is_too_large_is_lost_and_its_requests_go_on_elsewhere(two: Service):
    asked = request(max_tokens=300)
    client = submit(two, asked)
    (busy,) = (replica for replica in two.replicas if replica.started)
    wait_for(client.tokens)
    busy.newer = link.FromReplica(hello=link.HelloBack(info=bytes(MAX_MESSAGE_BYTES))).SerializeToString()
    wait_for(lambda: port.dispatcher(two.router).books.view[busy.name].health == "down")
    busy.newer = b""
    whole(client, asked, two)
    wait_for(lambda: len(two.router.replicas) == 2)
    assert len(busy.epochs) > 1
