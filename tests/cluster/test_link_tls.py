"""Router and replica over mutual TLS: each shows a certificate of the service's authority."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme

from jlora.cluster.attach import Terms
from jlora.cluster.directory_server import DirectoryServicer
from jlora.cluster.launcher import login
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.secret import Secret
from jlora.config import ClusterConfig, Config, ServeConfig
from jlora.errors import NotFound, Unavailable
from jlora.ports import OsThreads
from jlora.serve.access.tls import Tls
from jlora.serve.client import Login
from tests.cluster import _port as port
from tests.cluster import _service
from tests.cluster._links import Loop, answer, request, service, submit, wait_for

NAMED = "replicas.example"


def config_of(folder: Path, name: str = "127.0.0.1") -> Config:
    """Files that every process of the service has, whose certificate is of this name alone."""
    authority = trustme.CA()
    made = authority.issue_cert(name)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    files = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_client_ca": "ca.pem"}
    serve = ServeConfig(**{key: str(folder / file) for key, file in files.items()})  # pyright: ignore
    return Config(serve=serve, cluster=ClusterConfig(tls_name=name if name == NAMED else ""))


@pytest.mark.parametrize("name", ["127.0.0.1", NAMED])
def test_a_router_proves_itself_to_its_replicas_and_they_to_it(tmp_path: Path, name: str):
    config = config_of(tmp_path, name)
    mutual = Terms("router", login(config, "secret"))
    with service(1, mutual, credentials=Tls(config.serve).grpc()) as one:
        asked = request(max_tokens=5)
        assert submit(one, asked).wait().tokens() == answer(asked)
        state = one.router.state().result(20)
        assert state.cache.hbm.total == 100


def test_a_router_without_a_certificate_is_not_attached(tmp_path: Path):
    config = config_of(tmp_path)
    with service(0, Terms("router", Login("secret", ca=config.serve.tls_client_ca))) as none:
        closed = none.add("r0", credentials=Tls(config.serve).grpc())
        opened = none.add("r1")
        none.place(closed, opened)
        link = port.dispatcher(none.router)
        wait_for(lambda: link.links and all(port.attempts(one) for one in link.links.values()))
        wait_for(lambda: all(seen.health == "down" for seen in link.books.view.values()))
        assert not none.router.replicas and not closed.epochs and not opened.epochs


def test_a_replica_whose_certificate_does_not_do_is_in_the_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It has another name than its address. One that nobody serves yet is not."""
    config = config_of(tmp_path, NAMED)
    with service(0, Terms("router", login(replace(config, cluster=ClusterConfig()), "secret"))) as none:
        named, away = none.add("r0", credentials=Tls(config.serve).grpc()), none.add("r1")
        none.loop.run(away.kill())
        none.place(named, away)
        link = port.dispatcher(none.router)
        wait_for(lambda: len(link.links) == 2 and all(port.pause_s(one) > 0.5 for one in link.links.values()))
    (said,) = [line.getMessage() for line in caplog.records if "cannot be used" in line.getMessage()]
    assert "replica r0" in said and "Hostname Verification Check failed" in said


@pytest.mark.parametrize("name", ["127.0.0.1", NAMED])
def test_a_further_router_follows_its_controller_over_mutual_tls(tmp_path: Path, name: str):
    config, loop = config_of(tmp_path, name), Loop()

    async def serve(servicer: DirectoryServicer) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        rpc.add_DirectoryServicer_to_server(servicer, server)
        number = server.add_secure_port("127.0.0.1:0", Tls(config.serve).grpc())
        await server.start()
        return server, number

    with _service.service([]) as made:
        server, number = loop.run(serve(DirectoryServicer(made.controller, Secret("the token of these tests"))))
        proven = login(config, "the token of these tests")
        plain = Login(proven.key, ca=config.serve.tls_client_ca)
        known, unknown = (RemoteDirectory(f"127.0.0.1:{number}", "r2", one, OsThreads()) for one in (proven, plain))
        for remote in (known, unknown):
            remote.start()
        wait_for(lambda: port.epoch(known))
        with pytest.raises(NotFound):
            known.current("x")
        with pytest.raises(NotFound):
            known.unload("x").result(20)
        with pytest.raises(Unavailable):
            unknown.unload("x").result(20)
        with pytest.raises(Unavailable, match="has not answered yet"):
            unknown.current("x")
        for remote in (known, unknown):
            remote.close()
        loop.run(server.stop(0))
    loop.close()
