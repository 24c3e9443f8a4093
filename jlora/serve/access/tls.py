"""TLS of both ports, from files that may be replaced while the server runs.

Every handshake takes the newest certificate, and connections that are open keep theirs.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

import grpc

from jlora.config import ServeConfig
from jlora.errors import ConfigError
from jlora.ports import Threads
from jlora.serve.access.watched import Watched


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files as they are now.

    Attributes:
        context: of the HTTP port.
        grpc: the same for the gRPC port.
    """

    context: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration


class Tls:
    """Server certificates. With `serve.tls_client_ca` a client must have one that this authority has signed."""

    def __init__(self, config: ServeConfig, threads: Threads | None = None):
        """Reads the files. Raises ConfigError."""
        paths = [path for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path]
        self._mutual = bool(config.tls_client_ca)
        self._files = Watched(paths, lambda: _read(config), threads)

    @classmethod
    def of(cls, config: ServeConfig, threads: Threads) -> Tls | None:
        """None without `serve.tls_cert`."""
        return cls(config, threads) if config.tls_cert else None

    def http(self) -> ssl.SSLContext:
        """For asyncio's servers."""
        context = _Newest(ssl.PROTOCOL_TLS_SERVER)
        context.files = self._files
        return context

    def grpc(self) -> grpc.ServerCredentials:
        """For gRPC's servers."""
        given = self._files.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            before, given = given, self._files.current()
            return None if given is before else given.grpc

        # Its annotation forgets None, which says that nothing has changed.
        return grpc.dynamic_ssl_server_credentials(given.grpc, newer, self._mutual)  # pyright: ignore[reportArgumentType]


class _Newest(ssl.SSLContext):
    """Makes each connection by the context of the moment, so that its authority is the newest one too."""

    files: Watched[Certificates]

    def wrap_bio(self, *args: Any, **named: Any) -> ssl.SSLObject:
        return self.files.current().context.wrap_bio(*args, **named)


def _read(config: ServeConfig) -> Certificates:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    chain, key = _bytes("tls_cert", config.tls_cert), _bytes("tls_key", config.tls_key)
    authority = _bytes("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as e:  # SSLError is an OSError
        said = f"serve.tls_cert = {config.tls_cert!r}, serve.tls_key = {config.tls_key!r}"
        raise ConfigError(f"{said}: are no certificate and its key, in PEM ({e})") from e
    if authority is not None:
        try:
            context.load_verify_locations(cadata=authority.decode("ascii"))
        except (OSError, ValueError) as e:
            raise ConfigError(f"serve.tls_client_ca = {config.tls_client_ca!r}: has no certificate in PEM ({e})") from e
        context.verify_mode = ssl.CERT_REQUIRED
    return Certificates(context, grpc.ssl_server_certificate_configuration([(key, chain)], authority))


def _bytes(field: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as e:
        raise ConfigError(f"serve.{field} = {path!r}: {e.strerror}") from e


def _no_password() -> str:
    raise ValueError("the key has a password")
