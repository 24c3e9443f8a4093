"""What a link holds for a router that reads nothing, and what a replica's token opens."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import grpc
import pytest

from jlora.cluster import link as module
from jlora.cluster import wire
from jlora.cluster.attach import PAUSES_S, Terms
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.router import Router as ClusterRouter
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.worker import largest_mib
from jlora.config import Config, ServeConfig
from jlora.engine.futures import done, running
from jlora.errors import ResourceExhausted, Unauthenticated
from jlora.replica import ReplicaInfo, Sink
from jlora.serve.access.access import Access
from jlora.serve.access.caller import Need
from jlora.serve.backend import Backend
from jlora.serve.client import Login
from jlora.types import Done, Request, SamplingParams, TokenEvent
from jlora.validation import MAX_ENTRIES, Limits
from tests.cluster import _port as port
from tests.cluster._link import SECRET, Router, linked
from tests.cluster._links import FakeDirectory, Loop
from tests.cluster._wait import until

ENDLESS = SamplingParams(max_tokens=1 << 19)
LARGEST = (1 << 20) - 1  # the last token id of `Flood`: three bytes


class Flood:
    """An engine that gives its one request tokens as fast as it can, until it is aborted."""

    def __init__(self) -> None:
        limits = Limits(1 << 20, 1 << 20, 1 << 20)
        self.info = ReplicaInfo("base", "float32", limits, (), 16, 4096, "cpu", ("cpu:0",), Config())
        self.compiling = False
        self.failure: Future[BaseException] = running()
        self.aborted = threading.Event()
        self.tokens = 0

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        threading.Thread(target=self._play, args=(sink,), daemon=True).start()
        return done(1)

    def _play(self, sink: Sink) -> None:
        while self.tokens < 1 << 19 and not self.aborted.is_set():
            self.tokens += 1
            sink([TokenEvent("r", 0, 1 << 19, handle=1)])

    def abort(self, handle: int, moved: bool = False) -> Future[bool]:
        self.aborted.set()
        return done(True)

    def state(self) -> Future[Any]:
        return running()  # it answers never, and a message does not wait for it

    def heartbeat_age(self) -> float:
        return 0.0


class Idle(Flood):
    """An engine that never gives its request anything."""

    def _play(self, sink: Sink) -> None:
        self.aborted.wait(60)


def test_a_router_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST", 4096)
    flood: Any = Flood()
    with linked(flood) as one, grpc.insecure_channel(one.address) as channel:
        sent = threading.Event()

        def messages():
            yield link.ToReplica(hello=link.Hello(router="r", epoch=1, protocol=wire.PROTOCOL))
            yield link.ToReplica(start=wire.start(1, Request("r", (1,), ENDLESS), None))
            sent.wait(60)

        call = rpc.LinkStub(channel).Attach(messages(), metadata=SECRET.metadata)
        assert flood.aborted.wait(60), f"{flood.tokens} tokens"
        until(lambda: not port.streams(one.servicer), "the stream has ended")
        with pytest.raises(grpc.RpcError) as e:
            for _ in call:
                pass
        assert e.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # pyright: ignore[reportAttributeAccessIssue]
        sent.set()


def begins(rid: int) -> Callable[[Router], bool]:
    """Whether the replica has said that it has the request."""
    return lambda router: any(rid in message.begun for message in router.messages)


def test_a_message_that_is_too_large_ends_its_own_link_alone():
    """What its router had runs no more; `serve.max_request_mib` is 4."""
    idle: Any = Idle()
    with linked(idle) as one, one.attach() as large, one.attach("another") as other:
        large.start(1, Request("r", (1,), ENDLESS))
        other.start(2, Request("r", (LARGEST,) * (1 << 19), ENDLESS))
        large.until(begins(1))
        other.until(begins(2))
        assert not idle.aborted.is_set()
        large.start(3, Request("r", (LARGEST,) * (3 << 19), ENDLESS))
        assert large.until_ended() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert idle.aborted.wait(60)
        until(lambda: port.streams(one.servicer) == ["another"], "nothing of it is left")
        other.start(4, Request("r", (1,), ENDLESS))
        other.until(begins(4))


@pytest.mark.parametrize("mib", [ServeConfig().max_request_mib, 12.0])
def test_the_largest_request_that_goes_on_fits_into_a_message(mib: float):
    """As many prompt tokens as a client can send, and as many that are delivered as it can ask for."""
    prompt = (LARGEST,) * (int(mib * 2**20) // 3)
    done = (Done((LARGEST,) * (MAX_ENTRIES // 64)),) * 64
    request = Request("r", prompt, SamplingParams(n=64, max_tokens=MAX_ENTRIES // 64), done=done)
    message = link.ToReplica(start=wire.start(1, request, None))
    assert 3 * (len(prompt) + MAX_ENTRIES) < message.ByteSize() < largest_mib(ServeConfig(max_request_mib=mib)) * 2**20


def test_the_requests_of_a_router_that_falls_silent_end(monkeypatch: pytest.MonkeyPatch):
    """Its machine is gone, or the way to it: nothing closes the connection."""
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    idle: Any = Idle()
    with linked(idle) as one, one.attach(beat_s=0.02) as router:
        router.start(1, Request("r", (1,), ENDLESS))
        assert idle.aborted.wait(60)
        router.until_ended()
        until(lambda: not port.streams(one.servicer), "the stream has ended")


def test_a_router_of_before_may_be_silent():
    idle: Any = Idle()
    with linked(idle) as one, one.attach() as router:
        router.until(lambda router: router.messages)
        assert port.silence_s(one.servicer, "r") == math.inf


@pytest.mark.parametrize("called", ["a", "", "b"])
def test_a_second_link_of_a_router_is_refused_unless_it_is_the_same_one_again(called: str):
    """`called`: what the second one calls the replica; "" is a router of before."""
    idle: Any = Idle()
    with linked(idle) as one, one.attach(replica="a") as first:
        first.until(lambda router: router.messages)
        with one.attach(epoch=2, replica=called) as second:
            if called == "b":
                assert second.until_ended() is grpc.StatusCode.FAILED_PRECONDITION
                assert second.said.endswith("the router has attached to this replica as a") and first.ended is None
            else:
                second.until(lambda router: router.messages)
                first.until_ended()
        first.close()
        until(lambda: not port.streams(one.servicer), "both have ended")
        with one.attach(epoch=3, replica="b") as third:
            third.until(lambda router: router.messages)


def test_a_replica_at_two_addresses_is_attached_once_and_stays(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "jlora.cluster.attach")
    idle: Any = Idle()

    async def make() -> ClusterRouter:
        return ClusterRouter(FakeDirectory(), LeastLoaded(), Terms("router", Login(SECRET.token), suspect_s=5.0))

    def said(what: str) -> int:
        return sum(what in record.getMessage() for record in caplog.records)

    with linked(idle) as one, closing(Loop()) as loop:
        router = loop.run(make())
        try:
            router.place({"a": one.address, "b": one.address})
            until(lambda: said("cannot be used: FAILED_PRECONDITION") > 0, "one address is refused")
            time.sleep(2 * PAUSES_S[0] + 0.5)  # it has tried again
            assert len(router.replicas) == said("is attached") == 1 and not said("is lost")
        finally:
            router.close()


def test_what_nobody_waits_for_any_more_may_fail_unheard():
    """Found by a seed: the stream that wanted an adapter had ended before it could not be read."""
    unheard: list[Any] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        read = asyncio.Event()

        async def adopt(version: link.Version) -> None:
            await read.wait()
            raise ResourceExhausted("host memory is short")

        servicer = module.LinkServicer(Backend(), "one", SECRET, adopt)
        stream = asyncio.create_task(port.adopt(servicer, link.Version(key="x@1")))
        await asyncio.sleep(0)
        stream.cancel()
        await asyncio.wait((stream,))
        read.set()
        while port.adopting(servicer):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(play())
    assert not unheard


def test_a_stream_that_ends_while_a_message_is_made_has_nothing_more_to_tell():
    assert len(list(port.cleared_while_taken([(None, None)] * 3))) == 1


def test_the_token_opens_a_replicas_public_services_and_nothing_else_does():
    access = Access(None, SECRET.token)
    assert access.admit(Need.ADMIN, [f"Bearer {SECRET.token}"], "Adapters/LoadAdapter").admin
    for sent in ([], ["Bearer another"], [f"Bearer {SECRET.token}", f"Bearer {SECRET.token}"]):
        with pytest.raises(Unauthenticated):
            access.admit(Need.KEY, sent, "Inference/Generate")
    assert access.admit(Need.NOTHING, [], "health")
