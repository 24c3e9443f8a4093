"""Router and replica over mutual TLS: each shows a certificate of the service's authority."""

from __future__ import annotations

from pathlib import Path

import trustme

from jlora.cluster.attach import Terms
from jlora.cluster.launcher import login
from jlora.config import Config, ServeConfig
from jlora.serve.access.tls import Tls
from jlora.serve.client import Login
from tests.cluster._links import answer, request, service, submit, wait_for


def config_of(folder: Path) -> Config:
    """Files that every process of the service has."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    files = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_client_ca": "ca.pem"}
    return Config(serve=ServeConfig(**{name: str(folder / file) for name, file in files.items()}))  # pyright: ignore


def test_a_router_proves_itself_to_its_replicas_and_they_to_it(tmp_path: Path):
    config = config_of(tmp_path)
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
        link = none.router._dispatcher
        wait_for(lambda: link.links and all(one._epoch > 0 for one in link.links.values()))
        wait_for(lambda: all(seen.health == "down" for seen in link.books.view.values()))
        assert not none.router.replicas and not closed.epochs and not opened.epochs
