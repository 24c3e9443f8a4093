"""What a link holds for a router that reads nothing, and what a replica's token opens."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from jlora.cluster import link as module
from jlora.cluster import wire
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.config import Config
from jlora.engine.futures import done, running
from jlora.errors import Unauthenticated
from jlora.replica import ReplicaInfo, Sink
from jlora.serve.access.access import Access
from jlora.serve.access.caller import Need
from jlora.types import Request, SamplingParams, TokenEvent
from jlora.validation import Limits
from tests.cluster._link import SECRET, linked
from tests.cluster._wait import until

ENDLESS = SamplingParams(max_tokens=1 << 19)


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

    def abort(self, handle: int) -> Future[bool]:
        self.aborted.set()
        return done(True)

    def state(self) -> Future[Any]:
        return running()  # it answers never, and a message does not wait for it

    def heartbeat_age(self) -> float:
        return 0.0


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
        until(lambda: not one.servicer._streams, "the stream has ended")
        with pytest.raises(grpc.RpcError) as e:
            for _ in call:
                pass
        assert e.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # pyright: ignore[reportAttributeAccessIssue]
        sent.set()


def test_the_token_opens_a_replicas_public_services_and_nothing_else_does():
    access = Access(None, SECRET.token)
    assert access.admit(Need.ADMIN, [f"Bearer {SECRET.token}"], "Adapters/LoadAdapter").admin
    for sent in ([], ["Bearer another"], [f"Bearer {SECRET.token}", f"Bearer {SECRET.token}"]):
        with pytest.raises(Unauthenticated):
            access.admit(Need.KEY, sent, "Inference/Generate")
    assert access.admit(Need.NOTHING, [], "health")
