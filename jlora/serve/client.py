"""How a client reaches a server: TLS, an API key, and errors in one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from jlora.config import is_address
from jlora.errors import ConfigError, JloraError

MAX_MESSAGE_BYTES = 64 << 20
# No HTTP proxy: gRPC would send even what goes to this machine through the one that `http_proxy` names.
OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0))
KEY_VARIABLE = "JLORA_API_KEY"
START = "start one with `jlora serve` or `jlora cluster`"


@dataclass(frozen=True, slots=True)
class Login:
    """What a client shows, and whom it trusts.

    Attributes:
        key: an API key; "" is none.
        ca: a PEM file of the authorities that may have signed the server's certificate; "" uses no TLS.
        cert, cert_key: PEM files of the client's own certificate, for a server that asks for one.
        name: what the server's certificate must name; "": the address.
    """

    key: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""
    name: str = ""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Login:
        """Of a command line with the flags of `add_flags`."""
        key = os.environ.get(KEY_VARIABLE, "") if args.key is None else args.key
        return cls(key.strip(), args.tls_ca, args.tls_cert, args.tls_key, args.tls_name)

    def channel(self, server: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """A channel to HOST:PORT. Raises ConfigError for files that cannot be read."""
        channel = self._connected(grpc, server, options)
        return grpc.intercept_channel(channel, _WithKey(self.key)) if self.key else channel

    def aio(self, server: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """The same for the event loop that runs; calls need `metadata`. Raises ConfigError."""
        return self._connected(grpc.aio, server, options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call shows of the key."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def _connected(self, library: Any, server: str, options: Sequence[tuple[str, Any]]) -> Any:
        """`library`: `grpc` or `grpc.aio`."""
        options = [*OPTIONS, *options]
        if not self.ca:
            return library.insecure_channel(server, options=options)
        options += [("grpc.ssl_target_name_override", self.name)] if self.name else []
        credentials = grpc.ssl_channel_credentials(*(_read(path) for path in (self.ca, self.cert_key, self.cert)))
        return library.secure_channel(server, credentials, options=options)


def add_flags(add: Callable[..., Any]) -> None:
    """The flags of `Login`; `add` is a parser's `add_argument`."""
    add("--key", metavar="KEY", help=f"API key (default: ${KEY_VARIABLE}, which other users cannot see)")
    add("--tls-ca", default="", metavar="FILE", help="use TLS; a PEM file of the authorities to trust")
    add("--tls-cert", default="", metavar="FILE", help="PEM file of this client's certificate, if the server wants one")
    add("--tls-key", default="", metavar="FILE", help="PEM file of its private key")
    add("--tls-name", default="", metavar="NAME", help="what the server's certificate names, if not the address")


class _WithKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the key to every call."""

    def __init__(self, key: str):
        self._header = ("authorization", f"Bearer {key}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._keyed(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._keyed(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._keyed(client_call_details), request_iterator)

    def _keyed(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), self._header])


@contextmanager
def connect(server: str, login: Login | None = None) -> Iterator[grpc.Channel]:
    """A channel to `server`, HOST:PORT. Raises JloraError in place of grpc.RpcError."""
    if not is_address(server):
        raise ConfigError(f"{server}: must be HOST:PORT of the server's gRPC port, as in 127.0.0.1:50051")
    try:
        with (login or Login()).channel(server) as channel:
            yield channel
    except grpc.RpcError as e:
        raise JloraError(told(server, e)) from e


def told(server: str, error: grpc.RpcError) -> str:
    """The error in one line."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.UNAVAILABLE and any(word in details.lower() for word in ("handshak", "ssl", "tls")):
        return f"{server} does not speak this kind of TLS, or is not trusted: see --tls-ca ({details})"
    if code == grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return f"no server answers at {server}: give HOST:PORT of its gRPC port (50051 by default), or {START}"
    return f"{code.name}: {details}"


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
