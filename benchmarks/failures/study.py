"""R9: what a service of several replicas delivers while one of them is killed every minute.

Clients keep as many streams open as the replicas can run, first undisturbed, then with the kills. Replicas are
real processes over a device whose steps take modelled seconds. Every token is compared with the one that belongs
there, so a lost or doubled one shows. Goodput is the tokens of answers that came whole, at the second in which each
token came.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.failures.replica import token_at
from benchmarks.runner import Options
from jlora.demo import assets
from jlora.demo.cluster import pid_of, status
from jlora.errors import ConfigError
from jlora.loadgen.server import ServerProcess, exactly
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

ADAPTERS = ("", "upper", "leet", "stars")
PROMPT, OUTPUT = (32, 128), (64, 192)  # tokens
WARM_S = 5.0
SETTINGS = {
    "engine.max_step_tokens": 256, "cache.hbm_blocks": 2000, "engine.layers": "scan",
    "cluster.env.JAX_PLATFORMS": "cpu", "cluster.start_timeout_s": 300, "serve.log_level": "warning",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Replicas, streams that each can run, seconds of the kills (a third of that without), seconds between two."""

    replicas: int
    streams: int
    seconds: float
    every_s: float


FULL, QUICK = Plan(3, 8, 600.0, 60.0), Plan(2, 4, 12.0, 6.0)


@dataclass(frozen=True, slots=True, order=True)
class Pause:
    """Between two messages of an answer: how long, and when it began."""

    seconds: float
    began: float


@dataclass
class Heard:
    """What the clients of one phase have received."""

    began: float
    whole: Counter[int] = field(default_factory=Counter)  # tokens of whole answers by the second in which they came
    answers: int = 0
    wrong: int = 0  # tokens that do not belong where they came: lost or doubled ones before them
    errors: list[str] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)  # the longest one of each answer


def run(options: Options) -> None:
    """Starts the service, and plays both phases."""
    plan = plan_of(options)
    number = "" if not options.replicas else str(plan.replicas)
    records = options.records(f"failures-paced{number}", {"replicas": plan.replicas, "streams": plan.streams})
    with start(plan) as process:
        for side, rows in asyncio.run(play(process, plan)):
            for number, row in enumerate(rows):
                records.add(f"{plan.replicas} replicas", side, number, row)


def plan_of(options: Options) -> Plan:
    """What the flags ask for. Raises ConfigError."""
    full = QUICK if options.quick else FULL
    if options.replicas == 1 or options.replicas < 0:
        raise ConfigError(f"--replicas {options.replicas}: must be at least 2: one is killed, and others go on")
    replicas = options.replicas or full.replicas
    return Plan(replicas, full.streams, options.seconds or full.seconds, full.every_s)


def start(plan: Plan) -> ServerProcess:
    """The service, ready."""
    settings = [f"{key}={value}" for key, value in {**SETTINGS, "engine.max_seqs": plan.streams}.items()]
    named = [word for name in ADAPTERS if name for word in ("--adapter", f"{name}={assets.adapter_path(name)}")]
    flags = ["--model", str(assets.MODEL), "--replicas", str(plan.replicas), *named, "--set", *settings]
    return ServerProcess(flags, ("benchmarks.servers", "cluster"))


async def play(process: ServerProcess, plan: Plan) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Both phases; the rows of each side."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        await phase(channel, plan, WARM_S)
        clean = await phase(channel, plan, plan.seconds / 3)
        kills: list[dict[str, Any]] = []
        killer = asyncio.create_task(_kill(channel, plan, process.pid, kills))
        killed = await phase(channel, plan, plan.seconds)
        killer.cancel()
        (error,) = await asyncio.gather(killer, return_exceptions=True)
        if isinstance(error, Exception):
            raise error
    phases = {"clean": (clean, int(plan.seconds / 3)), "killed": (killed, int(plan.seconds))}
    rows: list[tuple[str, list[Mapping[str, Any]]]] = [("kill", list(kills))]
    for side, (heard, seconds) in phases.items():
        rows.append((side, [{"tokens": heard.whole[second]} for second in range(seconds)]))
        rows.append((f"{side} in all", [summary(heard, seconds)]))
    return rows


def summary(heard: Heard, seconds: int) -> Mapping[str, Any]:
    """A phase in one row."""
    gaps = sorted(pause.seconds for pause in heard.pauses) or [0.0]
    return {
        "goodput": sum(heard.whole[second] for second in range(seconds)) / seconds,
        "answers": heard.answers,
        "wrong_tokens": heard.wrong,
        "errors": len(heard.errors),
        "error": heard.errors[0] if heard.errors else "",
        "gap_p50_s": gaps[len(gaps) // 2],
        "gap_p99_s": gaps[int(0.99 * (len(gaps) - 1))],
        "gap_max_s": gaps[-1],
    }


async def phase(channel: grpc.aio.Channel, plan: Plan, seconds: float) -> Heard:
    """Keeps all streams busy for so long; answers that have begun end."""
    heard = Heard(time.monotonic())
    stub = rpc.InferenceStub(channel)
    vocab = (await rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest())).vocab

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() - heard.began < seconds:
            await _ask(stub, rng, vocab, heard)

    await asyncio.gather(*(client(i) for i in range(plan.replicas * plan.streams)))
    return heard


async def _ask(stub: Any, rng: random.Random, vocab: int, heard: Heard) -> None:
    """Streams one answer and checks each token by its place."""
    prompt, seed, count = rng.randint(*PROMPT), rng.getrandbits(31), rng.randint(*OUTPUT)
    ids = [rng.randrange(3, vocab) for _ in range(prompt)]
    request = exactly(count, ids, seed, model=rng.choice(ADAPTERS))
    came: Counter[int] = Counter()
    have, longest, last = 0, Pause(0.0, 0.0), time.monotonic()
    try:
        async for delta in stub.GenerateStream(request):
            now = time.monotonic()
            if have:
                longest = max(longest, Pause(now - last, last))
            last = now
            for output in delta.outputs:
                for token in output.token_ids:
                    heard.wrong += token != token_at(seed, prompt + have, vocab)
                    have += 1
                came[int(now - heard.began)] += len(output.token_ids)
    except grpc.aio.AioRpcError as e:
        heard.errors.append(f"{e.code().name}: {e.details()}")
        return
    heard.wrong += abs(count - have)
    heard.answers += 1
    heard.whole += came
    heard.pauses.append(longest)


async def is_up(channel: grpc.aio.Channel, name: str) -> None:
    """Waits until a replica takes requests."""
    while (found := (await status(channel)).get(name)) is None or found.health != "up":
        await asyncio.sleep(0.05)


async def _kill(channel: grpc.aio.Channel, plan: Plan, router: int, kills: list[dict[str, Any]]) -> None:
    """Kills one replica after another, half a period after the start and every period, and notes when it is back."""
    rng, began = random.Random(0), time.monotonic()
    for number in range(int(plan.seconds / plan.every_s)):
        await asyncio.sleep(began + (number + 0.5) * plan.every_s - time.monotonic())
        name = f"r{rng.randrange(plan.replicas)}"
        os.kill(pid_of(name, router), signal.SIGKILL)
        kills.append({"replica": name, "at_s": time.monotonic() - began, "back_s": plan.seconds})
        await asyncio.sleep(0.5)
        await is_up(channel, name)
        kills[-1]["back_s"] = time.monotonic() - began
