"""A whole service over mutual TLS: its files reach every process, and only a client with a certificate is served."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests import _make
from tests.cluster import _processes
from tests.cluster._processes import Stream, service
from tests.cluster._wait import until
from tests.cluster.test_link_tls import config_of

pytestmark = pytest.mark.slow
FILES = ("tls_cert", "tls_key", "tls_client_ca")


def test_a_router_and_its_replicas_serve_over_mutual_tls(tmp_path: Path, tiny_adapters: dict[str, Path]):
    model = tmp_path / "model"
    _make.make_model(model, max_len=512)
    serve = config_of(tmp_path).serve
    ca, key, cert = (Path(file).read_bytes() for file in (serve.tls_client_ca, serve.tls_key, serve.tls_cert))
    adapters = {"small": tiny_adapters["small"]}
    asked = _processes.requests(list(adapters), 12)
    expected = _processes.undisturbed(model, adapters, asked)
    flags = ["--replicas", "2", "--set", *(f"serve.{name}={getattr(serve, name)}" for name in FILES)]
    with service(model, adapters, *flags, credentials=grpc.ssl_channel_credentials(ca, key, cert)) as running:
        until(lambda: running.up() == {"r0", "r1"}, "both replicas are up")
        assert [stream.result() for stream in [Stream(running.inference, one) for one in asked]] == expected
        with grpc.secure_channel(running.address, grpc.ssl_channel_credentials(ca)) as unproven:
            stream = Stream(_processes.rpc.InferenceStub(unproven), asked[0])
            with pytest.raises(grpc.RpcError):
                stream.result()
            assert isinstance(stream.error, grpc.Call) and stream.error.code() is grpc.StatusCode.UNAVAILABLE
