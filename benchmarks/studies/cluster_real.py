"""`jlora bench cluster-real`: the simulator's TTFT and TPOT beside those of real replicas, for three routing policies.

`jlora cluster` runs replicas that are processes of their own; router, links, engines and caches are the product's. Only
the device is modelled, paced by the wall clock (`benchmarks.failures.replica`). One file of step times (`STEPS`) is
what the device takes, what the router's policy predicts from, and what the simulator plays, so a difference is what the
simulator leaves out: processes, sockets, Python, the load generator itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from benchmarks.failures.study import SETTINGS
from benchmarks.runner import Options
from jlora.config import EngineConfig
from jlora.demo import assets
from jlora.engine.plan import ROW
from jlora.loadgen import sample
from jlora.loadgen.player import Pace, Player
from jlora.loadgen.server import GrpcTarget, Server, ServerProcess, flags_of, look
from jlora.model.config_json import spec_from_json
from jlora.sim.hardware import Hardware
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import Service, simulate_service
from jlora.sim.trace import Trace, facts
from jlora.sim.workloads import Load, play
from jlora.sim.workloads.kinds import KINDS
from jlora.step_model import FittedSteps, Help, Launches

ADAPTERS = ("upper", "leet", "stars", "reverse", "rot13", "piglatin")
ROUTES = ("round-robin", "sticky", "jlora")
FLEETS = ("ray", "local")  # actors of a Ray of this machine, and processes that the router starts itself
STREAMS, BLOCKS, STEP_TOKENS = 8, 2000, 256  # of a replica
SHRINK = 2  # of the lengths: the model's context is 1024 tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """Replicas, requests per second of one, and seconds of the trace."""

    replicas: int
    rate: float
    seconds: float
    routes: tuple[str, ...] = ROUTES
    fleets: tuple[str, ...] = FLEETS


LIGHT, FULL = Plan(3, 4.0, 45.0), Plan(3, 9.0, 45.0, fleets=("local",))  # the second one's requests queue
QUICK = Plan(2, 2.0, 3.0, ROUTES[-1:])


def run(options: Options) -> None:
    """Measures each policy on a service of its own, and then predicts it."""
    plans = [
        replace(plan, replicas=options.cluster or plan.replicas, seconds=options.seconds or plan.seconds)
        for plan in ((QUICK,) if options.quick else (LIGHT, FULL))
    ]
    records = options.records("cluster-real-paced", {"streams": STREAMS})
    options.work.mkdir(parents=True, exist_ok=True)
    for plan in plans:
        for route in plan.routes:
            if not records.has(cell=route, rate=plan.rate):
                for side, row in compared(plan, route, options.work / "step-paced.json").items():
                    records.add(
                        route, side, 0, {"replicas": plan.replicas, "rate": plan.rate, "seconds": plan.seconds, **row}
                    )


def compared(plan: Plan, route: str, path: Path) -> dict[str, dict[str, Any]]:
    """What each fleet did and what the simulator predicts. `path`: of the file of step times, which it writes."""
    rows = dict[str, dict[str, Any]]()
    for fleet in plan.fleets:
        steps_of(16).write(path)
        with start(plan, route, fleet, path) as process:
            server = asyncio.run(look(process.address))
            steps_of(server.info.block_tokens).write(path)
            trace = trace_of(plan, server)
            rows[fleet] = asyncio.run(played(server, trace))
    rows["predicted"] = predicted(plan, route, server, trace, FittedSteps.read(path))
    return rows


def steps_of(block_tokens: int) -> FittedSteps:
    """A step of 20 ms, about a 7B model's, in the form that `jlora doctor fit` writes."""
    spec = spec_from_json(assets.MODEL, "demo", "float32")
    rows = {n: n * ROW * 50e-6 for n in range(1, STEP_TOKENS // ROW + 1)}
    decode = Launches({n: 0.018 + 20e-6 * n for n in range(1, STREAMS + 1)}, context_s=20e-9, token_s=1e-7)
    prompt = Launches(rows, pair_s=1e-10, token_s=1e-7)
    return FittedSteps(
        "jlora-step-model-2", "paced", 1, spec, block_tokens, BLOCKS, ROW, 1.0, 2e9, 0.0, "", 0.002, decode, prompt,
        Help((0.0, 0.0), (0.0, 0.0)),
    )  # fmt: skip


def start(plan: Plan, route: str, fleet: str, steps: Path) -> ServerProcess:
    """The service, ready."""
    settings = {
        **SETTINGS, "engine.max_seqs": STREAMS, "engine.max_step_tokens": STEP_TOKENS, "cache.hbm_blocks": BLOCKS,
        "cluster.routing": route, "engine.step_model": str(steps.resolve()), "cluster.resources.CPU": 0.25,
    }  # fmt: skip
    flags = ["--model", str(assets.MODEL), "--replicas", str(plan.replicas), "--fleet", fleet]
    adapters = {name: str(assets.adapter_path(name)) for name in ADAPTERS}
    return ServerProcess([*flags, *flags_of(adapters, settings)], ("benchmarks.servers", "cluster"))


def trace_of(plan: Plan, server: Server) -> Trace:
    """Conversations within the server's context."""
    info = server.info
    return play(
        KINDS["sessions"].source,
        Load(plan.rate * plan.replicas, plan.seconds, len(ADAPTERS), SHRINK, info.vocab, info.max_model_len, seed=1),
    )


async def played(server: Server, trace: Trace) -> dict[str, Any]:
    """The trace in real time."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        player = Player(GrpcTarget(channel), trace, ADAPTERS, Pace())
        await player.history()
        calls = await player.play()
    failed = [call for call in calls if not call.ok]
    late = max((call.sent - call.due for call in calls), default=0.0)
    ttft, tpot = ([getattr(call, name) for call in calls if call.ok] for name in ("ttft", "tpot"))
    return {"requests": len(calls), "failed": len(failed), "late_most_s": late, **spread(ttft, tpot)}


def predicted(plan: Plan, route: str, server: Server, trace: Trace, steps: FittedSteps) -> dict[str, Any]:
    """The same trace in the simulator."""
    hardware = Hardware.fitted(steps)
    sizes = tuple(server.adapters[name] for name in ADAPTERS)
    work = Work(trace, sizes, facts(trace, steps.block_tokens, sizes))
    engine = EngineConfig(max_seqs=STREAMS, max_step_tokens=STEP_TOKENS, max_queue=1 << 20)
    scenario = Scenario(hardware, host_gb=4.0, engine=engine, step=steps)
    service = Service(plan.replicas, (8,) * len(ADAPTERS))
    result = simulate_service(scenario, service, work, "jlora", route)
    columns = result["requests"]["columns"]
    rows = [row for row in result["requests"]["rows"] if row[columns.index("output")] is not None]
    ttft = [row[columns.index("ttft_s")] for row in rows]
    tpot = [row[columns.index("tpot_s")] for row in rows if row[columns.index("output")] > 1]
    return {"requests": result["summary"]["requests"], "failed": result["summary"]["unfinished"], **spread(ttft, tpot)}


def spread(ttft: Sequence[float], tpot: Sequence[float]) -> Mapping[str, float]:
    """Means and quantiles."""
    told = {}
    for name, values in (("ttft", sample.spread(ttft)), ("tpot", sample.spread(tpot))):
        told |= {f"{name}_s": values["mean"], **{f"{name}_p{q}_s": values[f"p{q}"] for q in (50, 90, 99)}}
    return told
