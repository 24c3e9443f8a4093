"""TLS and mutual TLS on both ports, with certificates that change while the server runs."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from jlora import cli
from jlora.config import ServeConfig, load
from jlora.errors import ConfigError, JloraError
from jlora.serve.access import keys, watched
from jlora.serve.access.access import Access
from jlora.serve.access.tls import Tls
from jlora.serve.backend import Backend
from jlora.serve.client import KEY_VARIABLE, Login, connect
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests.serve._server import Served, serving, wait_until

HOST = "127.0.0.1"


class Files:
    """A server's certificate, signed by an authority of its own, and a client's."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.authority, self.clients = trustme.CA(), trustme.CA()
        self.renew()
        self.clients.cert_pem.write_to_path(self.path("clients.pem"))
        client = self.clients.issue_cert("client@example.org")
        client.private_key_pem.write_to_path(self.path("client.key"))
        client.cert_chain_pems[0].write_to_path(self.path("client.pem"))

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def renew(self) -> None:
        """A new authority and a new certificate in the place of the old ones."""
        self.authority = trustme.CA()
        made = self.authority.issue_cert(HOST, "localhost")
        self.authority.cert_pem.write_to_path(self.path("ca.pem"))
        made.private_key_pem.write_to_path(self.path("key.pem"))
        made.cert_chain_pems[0].write_to_path(self.path("cert.pem"))

    def config(self, **others: str) -> ServeConfig:
        return ServeConfig(heartbeat_s=60.0, tls_cert=self.path("cert.pem"), tls_key=self.path("key.pem"), **others)  # type: ignore[arg-type]

    def login(self, mutual: bool = False, **others: str) -> Login:
        own = {"cert": self.path("client.pem"), "cert_key": self.path("client.key")} if mutual else {}
        return Login(ca=self.path("ca.pem"), **own, **others)

    def context(self, mutual: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path("ca.pem"))
        if mutual:
            context.load_cert_chain(self.path("client.pem"), self.path("client.key"))
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are looked at all the time."""
    monkeypatch.setattr(watched, "LOOK_S", 0.01)
    yield


def over_grpc(running: Served, login: Login) -> pb.ServerInfo:
    with connect(running.address, login) as channel:
        return rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=20)


def over_http(running: Served, context: ssl.SSLContext) -> int:
    with httpx.Client(verify=context, timeout=20) as http:
        return http.get(running.http.replace("http:", "https:") + "/version").status_code


def works(call: Callable[[], object]) -> bool:
    """Whether the call gets through."""
    try:
        call()
    except (JloraError, httpx.HTTPError):
        return False
    return True


def test_both_ports_speak_tls_and_nothing_else(served: Served, files: Files):
    with serving(Backend(served.replica, served.backend.tokenizer), files.config()) as running:
        assert over_grpc(running, files.login()).model == "base"
        assert over_http(running, files.context()) == 200
        with pytest.raises(JloraError), connect(running.address) as channel:
            rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
        with pytest.raises(httpx.HTTPError):
            httpx.get(running.http + "/version", timeout=20)
        (files.directory / "stranger").mkdir()
        stranger = Files(files.directory / "stranger")
        with pytest.raises(JloraError, match="--tls-ca"):
            over_grpc(running, stranger.login())


def test_a_new_certificate_is_used_from_the_next_connection_on(served: Served, files: Files, soon: None):
    with serving(Backend(served.replica, served.backend.tokenizer), files.config()) as running:
        old_login, old_context = files.login(), files.context()
        with connect(running.address, old_login) as open_channel:
            stub = rpc.ControlStub(open_channel)
            stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
            Path(files.path("cert.pem")).write_text("half a certificate")
            assert over_http(running, old_context) == 200, "the old one stays"
            assert over_grpc(running, old_login).model == "base"
            files.renew()
            wait_until(lambda: works(lambda: over_http(running, files.context())))
            wait_until(lambda: works(lambda: over_grpc(running, files.login())))
            stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)  # its connection lives on
        with pytest.raises(httpx.ConnectError):
            over_http(running, old_context)


def test_a_client_without_a_certificate_is_refused_where_one_is_asked_for(served: Served, files: Files, soon: None):
    config = files.config(tls_client_ca=files.path("clients.pem"))
    with serving(Backend(served.replica, served.backend.tokenizer), config) as running:
        assert over_grpc(running, files.login(mutual=True)).model == "base"
        assert over_http(running, files.context(mutual=True)) == 200
        with pytest.raises(JloraError):
            over_grpc(running, files.login())
        with pytest.raises(httpx.HTTPError):
            over_http(running, files.context())
        trustme.CA().cert_pem.write_to_path(files.path("clients.pem"))  # another authority from now on
        wait_until(lambda: not works(lambda: over_grpc(running, files.login(mutual=True))))
        wait_until(lambda: not works(lambda: over_http(running, files.context(mutual=True))))


def test_the_commands_take_a_key_and_an_authority(
    served: Served, files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    key, entry = keys.new("acme", "viewer", ["*"])
    Path(files.path("keys.toml")).write_text(entry)
    config = files.config(keys=files.path("keys.toml"))
    backend = Backend(served.replica, served.backend.tokenizer, access=Access(config))
    with serving(backend, config) as running:
        generate = ["generate", "--server", running.address, "--max-tokens", "3", "Hello"]
        assert cli.main([*generate, "--tls-ca", files.path("ca.pem")]) == 1
        assert "UNAUTHENTICATED" in capsys.readouterr().err
        assert cli.main([*generate, "--tls-ca", files.path("ca.pem"), "--key", key]) == 0
        monkeypatch.setenv(KEY_VARIABLE, key)
        assert cli.main([*generate, "--tls-ca", files.path("ca.pem")]) == 0
        assert cli.main(["top", running.address, "--once", "--tls-ca", files.path("ca.pem")]) == 0
        assert "requests" in capsys.readouterr().out
        assert cli.main(["health", running.address, "--tls-ca", files.path("ca.pem")]) == 0
        assert cli.main(["health", running.address]) == 1, "it speaks no TLS"
        assert cli.main([*generate, "--tls-ca", "none.pem"]) == 1
        assert "none.pem: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tls_cert": "none"}, "serve.tls_cert = 'none': No such file"),
        ({"tls_key": "client.key"}, "no certificate and its key"),
        ({"tls_cert": "key.pem"}, "no certificate and its key"),
        ({"tls_client_ca": "client.key"}, "serve.tls_client_ca"),
    ],
)
def test_files_that_do_not_fit_are_one_clear_error(files: Files, monkeypatch, fields: dict[str, str], said: str):
    monkeypatch.chdir(files.directory)
    config = ServeConfig(**{"tls_cert": "cert.pem", "tls_key": "key.pem", **fields})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said) as e:
        Tls(config)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("key", ["serve.tls_cert", "serve.tls_key", "serve.tls_client_ca"])
def test_the_settings_of_tls_belong_together(key: str):
    with pytest.raises(ConfigError, match="serve.tls_cert"):
        load(None, {key: "x"})


def test_credentials_are_not_shown(served: Served, files: Files):
    with serving(Backend(served.replica, served.backend.tokenizer), files.config()) as running:
        shown = over_grpc(running, files.login()).config
    assert not any(name.startswith(("serve.tls", "serve.keys", "adapters.roots")) for name in shown)
