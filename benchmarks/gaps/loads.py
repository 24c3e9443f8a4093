"""The longest gap between tokens of running streams while large adapters load one after the other."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.clients import status_of
from benchmarks.gaps.streams import ANSWER_S, LOOK_S, WINDOW_S, Monitor, Streams, calm, during
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_adapter, write_model
from jlora.loadgen.rounds import Sample
from jlora.loadgen.server import flags_of
from jlora.model.spec import ModelSpec
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc


@dataclass(frozen=True, slots=True)
class Plan:
    """A model, the rank of its adapters, blocks of 16 tokens, streams, their tokens, seconds of each phase, a pause."""

    spec: ModelSpec
    rank: int
    blocks: int
    streams: int
    tokens: int
    seconds: float
    pause_s: float = WINDOW_S + LOOK_S


# An adapter on q, k, v and o has 245,760 bytes for each rank; a block 393,216.
FULL = Plan(dataclasses.replace(LLAMA_100M, max_len=256), 1250, 1900, 32, 200, 20.0)
QUICK = Plan(TINY, 64, 400, 4, 100, 0.5, 0.1)


def write(folder: Path, plan: Plan = FULL) -> None:
    """The files, unless they are there."""
    write_model(folder / "model", plan.spec, 0)
    for i in range(2):
        write_adapter(folder / f"large{i}", plan.spec, plan.rank, i)


def flags(folder: Path, plan: Plan = FULL) -> list[str]:
    """Of the server."""
    settings = {
        "adapters.max_rank": 2048, "cache.block_tokens": 16, "cache.hbm_blocks": plan.blocks,
        "cache.host_blocks": plan.blocks, "engine.max_seqs": plan.streams, "engine.max_step_tokens": 64,
        "engine.layers": "scan", "serve.log_level": "warning",
    }  # fmt: skip
    return ["--model", str(folder / "model"), *flags_of({}, settings)]


async def measure(address: str, folder: Path, pid: int, plan: Plan = FULL) -> dict[str, Sample]:
    """The server idle but for its streams, and while adapters load; `pid` is the server's."""
    streams, monitor = Streams(address, plan.streams, plan.tokens), Monitor(address, pid)
    while (await monitor.info()).programs_left:
        await asyncio.sleep(0.2)
    async with grpc.aio.insecure_channel(address) as channel, streams.running():
        found = {}
        for name, phase in {
            "idle": asyncio.sleep(plan.seconds, Counter()),
            "large adapters": _load(rpc.AdaptersStub(channel), folder, plan.seconds),
        }.items():
            await calm(streams, plan.pause_s)
            attack = asyncio.ensure_future(phase)
            found[name] = {**await during(streams, monitor, attack), "answers": dict(await attack)}
    await monitor.close()
    return found


async def _load(stub: rpc.AdaptersStub, folder: Path, seconds: float) -> Counter[str]:
    """Loads one, then the other, and so on; each leaves before the next comes."""
    ends, end, number = Counter[str](), time.monotonic() + seconds, 0
    while time.monotonic() < end or not ends:
        asked = pb.LoadAdapterRequest(name="large", path=str((folder / f"large{number % 2}").resolve()))
        status = await status_of(stub.LoadAdapter(asked, timeout=ANSWER_S))
        if status == "OK":
            status = await status_of(stub.UnloadAdapter(pb.UnloadAdapterRequest(name="large"), timeout=ANSWER_S))
        ends[status] += 1
        number += 1
    return ends
