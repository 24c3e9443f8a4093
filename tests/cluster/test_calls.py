"""A controller's calls at replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from jlora.cluster.calls import Calls
from jlora.errors import Unavailable
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests.cluster._relay import Relay


@dataclass
class Slow(rpc.AdaptersServicer):
    """A replica whose loads wait for `read`."""

    asked: threading.Event = field(default_factory=threading.Event)
    read: threading.Event = field(default_factory=threading.Event)

    def LoadAdapter(self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext) -> pb.AdapterInfo:
        self.asked.set()
        self.read.wait(60)
        return pb.AdapterInfo(name=request.name, uid=1)

    @contextmanager
    def served(self) -> Iterator[str]:
        """Its address."""
        server = grpc.server(ThreadPoolExecutor(4))
        rpc.add_AdaptersServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.read.set()
            server.stop(0).wait()


@pytest.mark.slow
def test_a_load_fails_soon_when_its_connection_is_gone_without_a_word():
    """The replica's link, another connection, shows that it is there: nothing else would end the wait."""
    replica = Slow()
    with replica.served() as address, closing(Relay(address)) as relay, closing(Calls()) as calls:
        load = calls.load(relay.address, pb.LoadAdapterRequest(name="a@1", path="/a"))
        assert replica.asked.wait(20)
        relay.stop("up")
        relay.stop("down")
        began = time.monotonic()
        with pytest.raises(Unavailable, match=relay.address):
            load.result(lambda: time.monotonic() - began < 60)
        assert time.monotonic() - began < 30
