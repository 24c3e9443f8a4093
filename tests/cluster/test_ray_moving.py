"""A placement and the balance over replicas on a Ray of this machine: while clients ask, adapters and requests move.

The replicas' devices are modelled and paced by the wall clock, so each token is known by its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from benchmarks.failures.study import SETTINGS
from benchmarks.studies.cluster_real import steps_of
from jlora.demo import assets
from jlora.loadgen.server import ServerProcess, flags_of
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests.cluster._real import SECRET
from tests.cluster._wait import until
from tests.cluster.test_placing_processes import NAMES, Service, asking, play
from tests.cluster.test_ray import ray_starts

pytestmark = [pytest.mark.ray, pytest.mark.slow]
__all__ = ["ray_starts"]  # a fixture that every test here uses

# One replica gets all requests, and runs two of them at a time.
MOVING = {"cluster.routing": "first-fit", "cluster.placement": "dlora", "cluster.placement_s": 1,
          "cluster.balance": "dlora", "cluster.balance_s": 0.1, "engine.max_seqs": 2}  # fmt: skip


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    token, steps = tmp_path / "token", tmp_path / "step.json"
    token.write_text(SECRET.token)
    steps_of(16).write(steps)
    settings = {
        **SETTINGS, **MOVING, "cluster.token_file": token, "cluster.resources.CPU": 0.25, "engine.step_model": steps
    }  # fmt: skip
    adapters = {name: str(assets.adapter_path(name)) for name in NAMES}
    flags = ["--model", str(assets.MODEL), "--replicas", "2", "--fleet", "ray", "--http-port", "0"]
    router = ServerProcess([*flags, *flags_of(adapters, settings)], ("benchmarks.servers", "cluster"))
    try:
        with grpc.insecure_channel(router.address) as channel:
            info = rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        yield Service(router, [replica.address for replica in info.replicas])
    finally:
        router.stop()


def moves(service: Service) -> float:
    text = httpx.get(f"http://{service.router.http}/metrics", timeout=30).text
    return next(s.value for family in parse(text) for s in family.samples if s.name == "jlora_router_moves_total")


def test_adapters_and_requests_move_while_clients_ask_and_every_answer_is_right(service: Service):
    assert len(service.replicas) == 2
    with asking(service, clients=12, output=60) as traffic:
        play(service, traffic, [(NAMES[:1], {"upper": 2}), (NAMES, {"upper": 2, "leet": 2})])
        until(lambda: moves(service) > 0, "requests have moved")
