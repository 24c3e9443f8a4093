"""A placement in whole processes: it moves adapters between replicas of a static fleet while clients ask.

The replicas' devices are modelled and paced by the wall clock, so each token is known by its place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from benchmarks.failures import replica
from benchmarks.failures.study import SETTINGS
from benchmarks.studies.cluster_real import steps_of
from jlora.demo import assets
from jlora.loadgen.server import ServerProcess, flags_of
from jlora.serve.client import Login, connect
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests.cluster._real import SECRET
from tests.cluster._wait import until

NAMES = ("upper", "leet")
CLIENTS, OUTPUT = 4, 12
MEMORY = (pb.AdapterInfo.HBM, pb.AdapterInfo.HOST)

pytestmark = pytest.mark.slow


@dataclass
class Traffic:
    """Clients that ask again and again, each in its own session, for the adapters in `names`."""

    channel: grpc.Channel
    vocab: int
    output: int
    names: Sequence[str] = NAMES
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        stub = rpc.InferenceStub(self.channel)
        for count in range(100_000):
            if self.ended.is_set():
                return
            seed, prompt = 1000 * number + count, [3 + (7 * count + i) % 200 for i in range(24)]
            request = pb.GenerateRequest(
                model=self.names[number % len(self.names)],
                token_ids=pb.TokenIds(ids=prompt),
                sampling=pb.Sampling(temperature=1.0, seed=seed),
                stopping=pb.Stopping(max_tokens=self.output, ignore_eos=True),
                session=f"s{number}",
            )
            wanted = [replica.token_at(seed, len(prompt) + i, self.vocab) for i in range(self.output)]
            try:
                told = list(stub.Generate(request, timeout=60).outputs[0].token_ids)
            except grpc.RpcError as e:
                told = [str(e)]
            self.answers += 1
            if told != wanted:
                self.failed.append(f"{told}, not {wanted}")


@dataclass
class Service:
    """Two replicas by their addresses, and a router over them with a placement every second."""

    router: ServerProcess
    replicas: Sequence[str]

    def held(self, name: str) -> set[int]:
        """The replicas that have an adapter in memory."""
        found = set()
        for number, address in enumerate(self.replicas):
            with connect(address, Login(SECRET.token)) as channel:
                listed = rpc.AdaptersStub(channel).ListAdapters(pb.ListAdaptersRequest(), timeout=30).adapters
                found |= {number for info in listed if info.name.startswith(f"{name}@") and info.tier in MEMORY}
        return found


@pytest.fixture
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """`request.param`: settings of the router."""
    token, steps = tmp_path / "token", tmp_path / "step.json"
    token.write_text(SECRET.token)
    steps_of(16).write(steps)
    common = ["--model", str(assets.MODEL), "--set", f"cluster.token_file={token}"]
    paced = ("jlora.cluster.child", str(os.getpid()), replica.__name__)
    own = {**SETTINGS, "engine.max_seqs": 8, "serve.http_port": -1}
    with ExitStack() as opened:
        replicas = []
        for _ in range(2):
            replicas.append(ServerProcess([*common, *flags_of({}, own)], paced))
            opened.callback(replicas[-1].stop)
        addresses = ",".join(one.address for one in replicas)
        adapters = {name: str(assets.adapter_path(name)) for name in NAMES}
        settings = {"engine.step_model": steps, "cluster.placement_s": 1, "serve.log_level": "warning", **request.param}
        flags = [*common, "--fleet", "static", "--addresses", addresses, *flags_of(adapters, settings)]
        router = ServerProcess(flags, ("jlora", "cluster"))
        opened.callback(router.stop)
        yield Service(router, [one.address for one in replicas])


@contextmanager
def asking(service: Service, clients: int = CLIENTS, output: int = OUTPUT) -> Iterator[Traffic]:
    """Clients ask as long as this lasts; no request fails."""
    with grpc.insecure_channel(service.router.address) as channel:
        info = rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        traffic = Traffic(channel, info.vocab, output)
        threads = [threading.Thread(target=traffic.run, args=(i,), daemon=True) for i in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield traffic
        finally:
            traffic.ended.set()
            for thread in threads:
                thread.join(60)
    assert traffic.answers >= clients and not traffic.failed, traffic.failed[:3]


def play(service: Service, traffic: Traffic, moved: Sequence[tuple[Sequence[str], dict[str, int]]]) -> None:
    """Asks for some adapters until so many replicas have each, one after another."""
    for names, copies in moved:
        traffic.names = names
        until(
            lambda copies=copies: {n: len(service.held(n)) for n in copies} == copies,
            f"replicas that have each: {copies}",
        )


@pytest.mark.parametrize("service", [{"cluster.routing": "loraserve"}], indirect=True)
def test_loraserves_placement_moves_adapters_after_their_demand(service: Service):
    hot, cold = NAMES
    first, then = (hot, hot, hot, cold), (cold, cold, cold, hot)  # more than a replica's share, so that it needs both
    with asking(service) as traffic:
        play(service, traffic, [(first, {hot: 2, cold: 1}), (then, {cold: 2})])  # the other may keep its homes


@pytest.mark.parametrize("service", [{"cluster.placement": "dlora", "cluster.routing": "first-fit"}], indirect=True)
def test_dloras_preload_brings_adapters_where_no_request_has_brought_them(service: Service):
    with asking(service) as traffic:
        play(service, traffic, [(NAMES[:1], {"upper": 2}), (NAMES, {"upper": 2, "leet": 2})])
