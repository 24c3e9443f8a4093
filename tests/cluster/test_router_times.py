"""How long a router waits: for a replica, and for one that does not end a request at its deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from jlora.cluster.attach import Terms
from jlora.cluster.dispatch import GRACE_S
from jlora.cluster.requests import MOST_LOSSES
from jlora.errors import QueueFull, Unavailable
from tests.cluster import _port as port
from tests.cluster._links import Client, Service, answer, request, service, submit, wait_for


@dataclass
class Clock:
    """One that a test puts forward."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class Waiting:
    """A request without a deadline at a router without a replica."""

    clock: Clock
    service: Service
    client: Client = field(default_factory=Client)

    def __post_init__(self) -> None:
        self.service.kill(self.service.replicas[0])
        wait_for(lambda: not self.service.router.replicas)
        self.submitted = self.service.router.submit(request(max_tokens=20), self.client)
        wait_for(lambda: port.dispatcher(self.service.router).table.waiting())


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    clock = Clock()
    with service(1, Terms("router", suspect_s=1.0, clock=clock)) as made:
        yield Waiting(clock, made)


def test_without_a_deadline_a_request_waits_for_a_replica_for_a_minute(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
):
    ticks = port.ticks(monkeypatch)
    waiting.clock.ahead_s = 40.0
    wait_for(lambda: ticks[0] > 2)
    assert not waiting.submitted.done()
    waiting.clock.ahead_s = 61.0
    with pytest.raises(Unavailable, match="no replica"):
        waiting.submitted.result(20)
    assert not len(port.dispatcher(waiting.service.router).table) and not waiting.client.events


def test_a_replica_that_comes_within_the_minute_answers(waiting: Waiting):
    waiting.clock.ahead_s = 40.0
    waiting.service.place(waiting.service.add("r1"))
    waiting.submitted.result(20)
    assert waiting.client.wait().tokens() == answer(request(max_tokens=20)) and waiting.client.last.error is None


def test_replicas_that_drain_are_no_reason_to_wait_for_longer_or_to_seem_healthy():
    clock = Clock()
    with service(1, Terms("router", suspect_s=1.0, clock=clock)) as one:
        (replica,), dispatcher = one.replicas, port.dispatcher(one.router)
        replica.draining = True
        wait_for(lambda: dispatcher.books.view["r0"].health == "draining")
        submitted = one.router.submit(request(max_tokens=20), Client())
        wait_for(lambda: dispatcher.table.waiting())
        clock.ahead_s = 61.0
        with pytest.raises(Unavailable, match="no replica"):
            submitted.result(20)
        assert one.router.replicas and one.router.heartbeat_age() > 60
        replica.draining = False
        wait_for(lambda: one.router.heartbeat_age() < 1)


def test_a_replica_that_ignores_a_deadline_is_told_to_cancel():
    """The client has its end even so."""
    with service(1) as one:
        (replica,), deadline = one.replicas, time.monotonic() + 1.0
        client = submit(one, request(max_tokens=1 << 20, deadline=deadline))
        last = client.wait().last
        assert time.monotonic() > deadline + GRACE_S, "the replica may end it before"
        assert last.finish_reason == "abort" and last.error is None
        assert last.usage is not None and last.usage.completion_tokens == len(client.tokens()) > 0
        wait_for(lambda: replica.cancelled == [replica.started[0].rid])
        assert not replica.running and not len(port.dispatcher(one.router).table)


def test_a_replica_that_hears_nothing_is_suspected_though_it_speaks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jlora.cluster.attach.DEAF_S", 0.0)  # three seconds are left: of two bounds and a heartbeat
    with service(2) as two:
        for replica in two.replicas:
            replica.deaf = True
        client, asked = Client(), request(max_tokens=40)
        two.router.submit(asked, client)
        wait_for(lambda: all(len(replica.epochs) > 1 for replica in two.replicas))
        two.replicas[0].deaf = two.replicas[1].deaf = False
        client.wait()
        assert client.tokens() == answer(asked)
        assert not any(replica.running for replica in two.replicas), "what it hears later is of a stream that has ended"


def test_the_deadline_ends_a_request_that_full_replicas_refuse_as_it_does_in_an_engines_queue():
    with service(2) as two:
        for replica in two.replicas:
            replica.refuse = [(QueueFull("queue is full"), False)] * MOST_LOSSES
        last = submit(two, request(deadline=time.monotonic() + 0.3)).wait().last
        assert last.finish_reason == "abort" and last.error is None
        assert sum(len(replica.started) for replica in two.replicas) > 1
        for replica in two.replicas:
            replica.refuse = []
