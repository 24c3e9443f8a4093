"""F2: the router is killed under its streams, and another one takes its place, over replicas that stay.

Replicas are real processes over a paced device. The next router starts with the same adapters, and its clients send
the same requests again, under the same ids: a replica that still had one of them would refuse it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.failures import replica
from benchmarks.failures.replica import token_at
from benchmarks.failures.study import ADAPTERS, SETTINGS
from benchmarks.faults.client import Client, Figures
from jlora.demo import assets
from jlora.loadgen.server import ServerProcess, exactly, flags_of
from jlora.serve.client import Login, connect
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

REPLICAS, STREAMS = 2, 32
SHORT, LONG = 8, 400  # tokens of an answer
TOKEN = "the-token-of-this-study"
STEPS = 2 + 1  # with a lost client's work; one more may begin between a look at the counter and the signal
MAP_S = 2.0  # until a new router knows where adapters are
PATIENCE_S = 60.0
MEMORY = (pb.AdapterInfo.HBM, pb.AdapterInfo.HOST)


async def kills(count: int) -> Figures:
    """Kills a router again and again."""
    ends: Counter[str] = Counter()
    worst = {"map_s": 0.0, "idle_s": 0.0, "steps_after": 0.0}
    with tempfile.TemporaryDirectory() as folder, replicas(Path(folder)) as (served, flags):
        for number in range(count):
            life = Life(served, await asyncio.to_thread(ServerProcess, flags, ("jlora", "cluster")))
            try:
                found = {"map_s": await life.known() if number else 0.0}  # the first router reads the adapters
                ends += await life.answers()
                ends += await life.killed(found)
            finally:
                life.router.signal(signal.SIGKILL)
            worst = {name: max(value, found[name]) for name, value in worst.items()}
    wanted = {"whole": count * STREAMS, "UNAVAILABLE": count * STREAMS}
    holds = ends == wanted and worst["steps_after"] <= STEPS and worst["map_s"] <= MAP_S
    return {"injected": count, **ends, **{f"{name}_max": value for name, value in worst.items()}, "holds": holds}


@contextmanager
def replicas(folder: Path) -> Iterator[tuple[list[rpc.ControlStub], list[str]]]:
    """Replicas that wait for routers, and the flags of a router."""
    token = folder / "token"
    token.write_text(TOKEN)
    common = ["--model", str(assets.MODEL), "--set", f"cluster.token_file={token}"]
    own = flags_of({}, {**SETTINGS, "engine.max_seqs": STREAMS, "serve.http_port": -1})
    with ExitStack() as opened:
        addresses, controls = [], []
        for _ in range(REPLICAS):
            process = ServerProcess([*common, *own], ("jlora.cluster.child", str(os.getpid()), replica.__name__))
            opened.callback(process.stop)
            addresses.append(process.address)
            controls.append(rpc.ControlStub(opened.enter_context(connect(process.address, Login(TOKEN)))))
        fleet = ["--fleet", "static", "--addresses", ",".join(addresses)]
        adapters = {name: str(assets.adapter_path(name)) for name in ADAPTERS if name}
        table = {"adapters.registry": folder / "adapters.db"}  # or the next router would load all adapters anew
        yield controls, [*common, *fleet, *flags_of(adapters, {"serve.log_level": "warning", **table})]


class Life:
    """One router's life."""

    def __init__(self, replicas: list[rpc.ControlStub], router: ServerProcess):
        self.replicas, self.router, self.client = replicas, router, Client(router.address)

    async def known(self) -> float:
        """Seconds until the router knows that its replicas have all adapters in memory."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S:
            listed = (await self.client.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=PATIENCE_S)).adapters
            if sum(info.tier in MEMORY for info in listed) == len(ADAPTERS) - 1:
                break
            await asyncio.sleep(0.01)
        return time.monotonic() - began

    async def answers(self) -> Counter[str]:
        """How short answers end: "whole" with the right tokens."""
        vocab = (await self.client.info()).vocab
        asked = [_request(i, SHORT) for i in range(STREAMS)]
        given = await asyncio.gather(*map(self.client.answer, asked))
        return Counter(_verdict(one, *answer, vocab) for one, answer in zip(asked, given, strict=True))

    async def killed(self, found: dict[str, float]) -> Counter[str]:
        """Kills the router once every stream runs; `found` gets what the replicas did then. How the streams ended."""
        calls = [self.client.inference.GenerateStream(_request(i, LONG)) for i in range(STREAMS)]
        await asyncio.gather(*(call.read() for call in calls))
        steps = [one.steps for one in self._infos()]
        self.router.signal(signal.SIGKILL)
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S and any(one.live_requests for one in self._infos()):
            await asyncio.sleep(0.005)
        found["idle_s"] = time.monotonic() - began
        found["steps_after"] = max(now.steps - then for now, then in zip(self._infos(), steps, strict=True))
        ends = Counter([(await call.code()).name for call in calls])
        await self.client.channel.close()
        await asyncio.to_thread(self.router.wait, PATIENCE_S)
        return ends

    def _infos(self) -> list[pb.ServerInfo]:
        return [one.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_S) for one in self.replicas]


def _request(number: int, tokens: int) -> pb.GenerateRequest:
    """The same id at every router."""
    model = ADAPTERS[number % len(ADAPTERS)]
    return exactly(tokens, range(3, 20 + number), number, model=model, request_id=f"r{number}")


def _verdict(asked: pb.GenerateRequest, status: str, tokens: Sequence[int], vocab: int) -> str:
    begin, seed = len(asked.token_ids.ids), asked.sampling.seed
    if status != "OK":
        return status
    return "whole" if list(tokens) == [token_at(seed, begin + i, vocab) for i in range(SHORT)] else "wrong"
