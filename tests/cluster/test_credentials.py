"""No call to a replica or to a controller is served without the cluster's token, whichever service it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from jlora.cluster.directory_server import DirectoryServicer
from jlora.cluster.link import LinkServicer
from jlora.cluster.peer import PeerServicer
from jlora.cluster.proto import directory_pb2, directory_pb2_grpc, link_pb2, link_pb2_grpc
from jlora.cluster.secret import Secret
from jlora.config import ServeConfig
from jlora.errors import Unavailable
from jlora.serve.access.access import Access
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.server import GrpcServer
from tests.cluster._links import Loop

CODE = grpc.StatusCode
SECRET = Secret("the token of these tests")
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (link_pb2, directory_pb2, pb)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


class Away:
    """A controller, or an engine, of which nothing can be asked yet."""

    def __getattr__(self, name: str) -> Any:
        raise Unavailable("is loading")

    def __call__(self) -> Any:
        raise Unavailable("is loading")


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    """To a process with every service that routers and replicas have, which is still loading."""
    away: Any = Away()

    def add(backend: Backend, server: grpc.aio.Server) -> None:
        link_pb2_grpc.add_LinkServicer_to_server(LinkServicer(backend, "one", SECRET), server)
        link_pb2_grpc.add_PeerServicer_to_server(PeerServicer(away, SECRET, away), server)
        directory_pb2_grpc.add_DirectoryServicer_to_server(DirectoryServicer(away, SECRET), server)

    async def start() -> tuple[GrpcServer, int]:
        server = GrpcServer(Backend(access=Access(None, SECRET.token)), ServeConfig(), services=[add])
        port = server.bind("127.0.0.1", 0)
        await server.start()
        return server, port

    loop = Loop()
    server, port = loop.run(start())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    loop.run(server.stop(0))
    loop.close()


def verdict(channel: grpc.Channel, method: str, *authorization: str) -> grpc.StatusCode:
    """How a call with an empty message ends."""
    metadata = [("authorization", value) for value in authorization]
    return channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20).code()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_needs_the_token(channel: grpc.Channel, method: str):
    right = f"Bearer {SECRET.token}"
    for wrong in ((), ("",), (SECRET.token,), (right + "x",), (right[:-1],), (right, right)):
        assert verdict(channel, method, *wrong) is CODE.UNAUTHENTICATED, wrong
    assert verdict(channel, method, right) is not CODE.UNAUTHENTICATED  # how far it comes then is another test's


def test_all_services_of_a_cluster_are_asked():
    assert {method.split("/")[1].rpartition(".")[2] for method in METHODS} == {
        "Link", "Peer", "Directory", "Inference", "Adapters", "Control",
    }  # fmt: skip
