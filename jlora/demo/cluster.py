"""The demo of many replicas: base and adapters answer at once, and the replica of some of them is killed meanwhile.

The activated LoRAs are asked about a conversation with the base, all others get one text.

    python -m jlora.demo.cluster [--fleet ray|local]

The exit code is 0 if every answer is right, and requests were moved.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from jlora.demo import assets, pipeline
from jlora.demo.run import LATE, SETTINGS, TEXT, Answer, ask, line, load_late, say, transform_of
from jlora.demo.tasks import CHECKS, TASKS
from jlora.errors import JloraError
from jlora.loadgen.server import ServerProcess, flags_of
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2, jlora_pb2_grpc

REPLICAS = 2
RESTART_S = 120.0


async def status(channel: grpc.aio.Channel) -> dict[str, jlora_pb2.ReplicaStatus]:
    """The replicas behind the router, by name."""
    control = jlora_pb2_grpc.ControlStub(channel)
    info = await control.GetServerInfo(jlora_pb2.GetServerInfoRequest(), timeout=pipeline.ANSWER_S)
    return {replica.name: replica for replica in info.replicas}


def pid_of(replica: str, router: int) -> int:
    """The process of a replica among those that the router's process has started. Raises LookupError."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if b"jlora.cluster.child" in words and f"cluster.replica={replica}".encode() in words:
            found.append(int(folder.name))
    for pid in found:
        above = pid
        while above := parents.get(above, 0):
            if above == router:
                return pid
    raise LookupError(f"no process of replica {replica}")


async def kill_midway(channel: grpc.aio.Channel, answers: Sequence[Answer], router: int) -> tuple[str, int]:
    """Kills the replica with most streams once every stream has its first token; its name, and its streams."""
    while not all(answer.text for answer in answers):
        await asyncio.sleep(0.001)
    replicas = await status(channel)
    victim = max(replicas.values(), key=lambda replica: replica.sent)
    os.kill(pid_of(victim.name, router), signal.SIGKILL)
    unfinished = sum(not answer.finish for answer in answers)
    say(f"killed {victim.name} ({victim.address}) with {victim.sent} of the {unfinished} streams that still run\n")
    return victim.name, victim.sent


def asked() -> Iterator[tuple[Answer, list[Any]]]:
    """Every answer that is wanted, and the chat that asks for it."""
    for model in ("", *TASKS):
        yield Answer(model, transform_of(model)(TEXT)), [pipeline.message("user", TEXT)]
    for model, check in CHECKS.items():
        for part in pipeline.CHAT:  # the base has said each text again
            yield Answer(model, check.verdict(part)), pipeline.invocation_messages(part, part)


async def talk(address: str, router: int) -> bool:
    """Asks, kills, checks, and waits for the killed replica; whether all went as promised."""
    async with Login().aio(address) as channel:
        for replica in (await status(channel)).values():
            say(f"  {replica.name}  {replica.address}  {replica.health}")
        await load_late(channel)
        wanted = list(asked())
        answers = [answer for answer, _ in wanted]
        stub = jlora_pb2_grpc.InferenceStub(channel)
        say(f"{len(answers)} requests at once: {TEXT!r}")
        asking = [asyncio.ensure_future(ask(stub, answer, chat)) for answer, chat in wanted]
        victim, moved = await kill_midway(channel, answers, router)
        await asyncio.gather(*asking)
        say("\n".join(map(line, answers)))
        right = sum(answer.right for answer in answers)
        say(f"\n{right} of {len(answers)} answers are whole and right; {moved} went on at another replica.")
        began = time.monotonic()
        while (await status(channel)).get(victim, jlora_pb2.ReplicaStatus()).health != "up":
            if time.monotonic() - began > RESTART_S:
                say(f"{victim} has not come back")
                return False
            await asyncio.sleep(0.1)
        say(f"{victim} serves again {time.monotonic() - began:.1f} s later.")
        return right == len(answers) and moved > 0


def cluster(fleet: str) -> ServerProcess:
    """A service of the embedded model."""
    adapters = {name: str(assets.adapter_path(name)) for name in (*TASKS, *CHECKS) if name != LATE}
    quiet = {"serve.log_level": "warning"}
    settings = {**SETTINGS, **quiet, "cluster.env.JAX_PLATFORMS": "cpu", "cluster.resources.CPU": 0.5}
    model = ["--model", str(assets.MODEL), "--served-model-name", "jlora-demo"]
    replicas = ["--fleet", fleet, "--replicas", str(REPLICAS)]
    return ServerProcess([*model, *replicas, *flags_of(adapters, settings)], ("jlora", "cluster"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description="Serve the embedded model from two replicas, and kill one.")
    parser.add_argument("--fleet", choices=["ray", "local"], default="ray", help="who runs the replicas")
    fleet = parser.parse_args(argv).fleet
    try:
        say(f"Starting {REPLICAS} replicas of jlora's embedded model (fleet {fleet}) ...")
        with cluster(fleet) as process:
            right = asyncio.run(talk(process.address, process.pid))
    except (RuntimeError, LookupError, JloraError, grpc.aio.AioRpcError) as e:
        details = e.details() if isinstance(e, grpc.aio.AioRpcError) else e
        print(f"jlora demo: {details}", file=sys.stderr)
        return 1
    say("The service has stopped." if right else "Something is wrong.")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
