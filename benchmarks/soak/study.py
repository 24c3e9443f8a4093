"""One server under all that users do, for an hour: does it grow, slow down, or answer wrongly?

`--minutes` of load with 256 requests in flight on one server, or with `--cluster N` on a router with N replicas.
Adapters come, are replaced and go; clients cancel, read slowly or not at all, and ask for what is refused; over
gRPC and HTTP, with the keys of four tenants. `--leak` runs a server that keeps some bytes of every request: the same
verdict must fail. The exit code says whether the verdict is the expected one.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import Records
from benchmarks.runner import Options
from benchmarks.soak import verdict, watch
from benchmarks.soak.clients import MODELS, STALL_S, Clients, Heard, Server
from benchmarks.soak.verdict import Finding, Limits, Run, Sample
from jlora.demo import assets
from jlora.demo.cluster import pid_of
from jlora.errors import ConfigError
from jlora.loadgen.server import ServerProcess, flags_of
from jlora.serve.access import keys

TENANTS = 4
SAMPLES = 240  # of a run
# A tier takes memory when its blocks are used first: the tiers are so small that they are full after the warm-up.
SETTINGS = {
    "engine.max_seqs": 64, "engine.max_step_tokens": 256, "engine.layers": "scan", "cache.hbm_blocks": 1200,
    "cache.host_blocks": 800, "serve.log_level": "warning", "serve.stall_s": STALL_S, "model.name": "model",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests in flight, seconds of load, texts, bytes that a leaking server keeps of a request, and the limits."""

    streams: int
    seconds: float
    texts: int
    leak: int
    limits: Limits


def run(options: Options) -> None:
    """Raises RuntimeError if the verdict is not the expected one."""
    plan = Plan(256, 60 * options.minutes, 6, 1 << 12, Limits())
    if options.quick:  # its limit is 4 MiB/s, and a slow machine may serve but two requests in a second
        plan = Plan(24, 6.0, 2, 1 << 22, verdict.QUICK)
    if options.leak and options.cluster:
        raise ConfigError("--leak: only one server leaks; leave --cluster out")
    small = {"cache.hbm_blocks": 300, "cache.host_blocks": 200} if options.quick else {}
    settings = {**SETTINGS, **small, **options.settings}
    name = "soak-leak" if options.leak else f"soak-cluster{options.cluster}" if options.cluster else "soak-serve"
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")  # so that each run begins its file anew
    records = options.records(
        name, {"plan": asdict(plan), "server": settings, "cluster": options.cluster, "began": began}
    )
    folder = options.folder("soak")
    folder.mkdir(parents=True, exist_ok=True)
    server, process = _start(options, folder, settings, plan)
    with process:
        names = {"router": process.pid} if options.cluster else {"server": process.pid}
        names |= {f"r{i}": pid_of(f"r{i}", process.pid) for i in range(options.cluster)}
        found = asyncio.run(_soak(server, names, plan, records))
    for finding in found:
        print(f"{'holds' if finding.holds else 'FAILS'}  {finding.what}: {finding.value:.4g}, limit {finding.limit:g}")
    if all(finding.holds for finding in found) == options.leak:
        raise RuntimeError("the leak was not found" if options.leak else "the soak has failed")


def _start(options: Options, folder: Path, settings: Mapping[str, Any], plan: Plan) -> tuple[Server, ServerProcess]:
    made = [keys.new(f"tenant{i}", "user", ["*"]) for i in range(TENANTS)] + [keys.new("operator", "admin", ["*"])]
    (folder / "keys.toml").write_text("\n".join(entry for _, entry in made))
    adapters = {name: str(assets.adapter_path(name)) for name in MODELS if name}
    flags = ["--model", str(assets.MODEL), "--http-port", "0", "--keys", str(folder / "keys.toml")]
    command = ("jlora.serve",)
    if options.cluster:
        command = ("jlora", "cluster")
        settings = {**settings, "cluster.replicas": options.cluster, "cluster.fleet": "local"}
    elif options.leak:
        command = ("benchmarks.servers", "leaking", str(plan.leak))
    process = ServerProcess([*flags, *flags_of(adapters, settings)], command)
    return Server(process.address, process.http, [key for key, _ in made[:-1]], made[-1][0]), process


async def _soak(server: Server, names: Mapping[str, int], plan: Plan, records: Records) -> list[Finding]:
    clients = Clients(server, plan.texts)
    try:
        while (await clients.info()).programs_left:
            await asyncio.sleep(0.5)
        await clients.learn()
        samples: list[Sample] = []
        watching = asyncio.create_task(_watch(names, plan.seconds, samples))
        heard = await clients.run(plan.streams, plan.seconds)
        await watching
        counts = await _left(clients, heard)
    finally:
        await clients.close()
    seen = Run(plan.seconds, samples, heard.ttft, counts)
    found = verdict.judge(seen, plan.limits)
    _keep(records, seen, heard, found)
    return found


async def _watch(names: Mapping[str, int], seconds: float, samples: list[Sample]) -> None:
    began = time.monotonic()
    while (at := time.monotonic() - began) < seconds:
        samples += watch.look(at, names)
        await asyncio.sleep(max(0.1, seconds / SAMPLES))


async def _left(clients: Clients, heard: Heard) -> Mapping[str, int]:
    """What must be 0; the server has a minute for what clients have left behind."""
    for _ in range(600):
        info, cache = await clients.info(), await clients.cache()
        if not info.live_requests and not cache.hbm.running_kv:
            break
        await asyncio.sleep(0.1)
    return {
        "wrong answers": len(heard.wrong),
        "unexpected errors": len(heard.unexpected),
        "compilations after the start": info.compiles_after_warmup,
        "requests left at the end": info.live_requests,
        "blocks of requests left at the end": cache.hbm.running_kv,
    }


def _keep(records: Records, seen: Run, heard: Heard, found: list[Finding]) -> None:
    for number, sample in enumerate(seen.samples):
        records.add("samples", sample.process, number, asdict(sample))
    for number in range(verdict.PARTS):
        begin, end = seen.part(number)
        values = {f"p{p}_s": verdict.ttft(seen, number, p) for p in (50, 99)}
        streams = sum(begin <= at < end for at, _ in heard.ttft)
        records.add("ttft", "streams", number, {"begin_s": begin, "end_s": end, "streams": streams, **values})
    for kind, count in sorted(heard.ends.items()):
        records.add("ends", kind, 0, {"count": count})
    for what in (*heard.wrong[:20], *heard.unexpected[:20]):
        records.add("trouble", what[:300], 0, {})
    for number, finding in enumerate(found):
        records.add("verdict", finding.what, number, {**asdict(finding), "holds": finding.holds})
