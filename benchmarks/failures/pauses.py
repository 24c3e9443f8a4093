"""F1: how long answers pause when their replica is killed, and when it stands still (SIGSTOP).

As R9 (`benchmarks.failures.study`), with two replicas of 32 streams each. A signal falls every few seconds once both
replicas are up: SIGKILL and SIGSTOP in turn. A stopped replica goes on after `STOPPED_S`, when its requests have moved.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from benchmarks.failures.study import Heard, Plan, is_up, phase, start, summary
from benchmarks.runner import Options
from jlora.demo.cluster import pid_of, status
from jlora.loadgen.server import ServerProcess

FULL, QUICK = Plan(2, 32, 400.0, 10.0), Plan(2, 4, 50.0, 10.0)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
STOPPED_S = 3.0
GONE_S = 0.5  # after which the router knows that a killed replica is gone
BACK_S = 60.0  # a guard against hanging
WAY_S = 0.06  # until messages that were on their way, and the step under way, have come
CLEAN_S = 0.1  # of the seconds, before the signals


def run(options: Options) -> None:
    """Starts the service, and sends the signals."""
    plan = QUICK if options.quick else FULL
    plan = Plan(plan.replicas, plan.streams, options.seconds or plan.seconds, plan.every_s)
    records = options.records(
        "pauses-paced", {"replicas": plan.replicas, "streams": plan.streams, "stopped_s": STOPPED_S}
    )
    with start(plan) as process:
        for side, rows in asyncio.run(play(process, plan)):
            for number, row in enumerate(rows):
                records.add("signals", side, number, row)


async def play(process: ServerProcess, plan: Plan) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """A row for each signal, and one for each phase."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        clean = await phase(channel, plan, CLEAN_S * plan.seconds)
        sent: list[dict[str, Any]] = []
        disturber = asyncio.create_task(_disturb(channel, plan, process.pid, sent))
        disturbed = await phase(channel, plan, plan.seconds)
        await disturber  # its errors come here
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in sent:
        told = {**row, **_pauses(disturbed, row["at_s"]), "at_s": row["at_s"] - disturbed.began}
        rows.setdefault(told.pop("signal"), []).append(told)
    rows["clean in all"] = [summary(clean, int(CLEAN_S * plan.seconds))]
    rows["disturbed in all"] = [summary(disturbed, int(plan.seconds))]
    return list(rows.items())


def _pauses(heard: Heard, at: float) -> Mapping[str, float]:
    """The longest one that spans this moment."""
    found = (p.seconds for p in heard.pauses if p.began - WAY_S <= at <= p.began + p.seconds)
    return {"pause_max_s": max(found, default=0.0)}


async def _disturb(channel: grpc.aio.Channel, plan: Plan, router: int, sent: list[dict[str, Any]]) -> None:
    """Sends the signals; the last one early enough that its answers end within the phase."""
    rng, began = random.Random(0), time.monotonic()
    for number in range(int(plan.seconds / plan.every_s)):
        await asyncio.sleep(max(0.0, began + (number + 0.5) * plan.every_s - time.monotonic()))
        if time.monotonic() - began > plan.seconds - plan.every_s / 2:
            return
        name, what = f"r{rng.randrange(plan.replicas)}", SIGNALS[number % len(SIGNALS)]
        pid, running = pid_of(name, router), (await status(channel))[name].sent
        at = time.monotonic()
        os.kill(pid, what)
        if what is signal.SIGSTOP:
            try:
                await asyncio.sleep(STOPPED_S)
            finally:
                os.kill(pid, signal.SIGCONT)
        else:
            await asyncio.sleep(GONE_S)
        went_on = time.monotonic()
        await asyncio.wait_for(is_up(channel, name), BACK_S)
        back = time.monotonic() - (went_on if what is signal.SIGSTOP else at)
        sent.append({"signal": what.name, "replica": name, "at_s": at, "streams": running, "back_s": back})
