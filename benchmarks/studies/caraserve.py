"""`jlora bench caraserve`: CaraServe's cold starts (its Figures 10, 13, 14), simulated on an A10."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.runner import Options
from benchmarks.studies.traffic import Request, turns_of, work_of, zipf
from jlora.config import EngineConfig
from jlora.engine.cold_start import Cold, predict
from jlora.sim.hardware import CHIPS, GROUPS, HOST, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, simulate

PROJECTIONS = ("q", "k", "v")
A10 = Hardware(CHIPS["a10"], 1, MODELS["llama-2-7b"], projections=PROJECTIONS)
H200 = Hardware(CHIPS["h200"], 1, MODELS["llama-3-8b"], projections=PROJECTIONS)
LINK_GBPS = 5.0  # makes a rank-64 adapter on q, k and v take 20 ms: tens of milliseconds, as in the paper's Figure 3
RESIDENT = 24
SIDES = ("cached", "blocking", "wait", "stream", "cpu", "auto")
LINKS, RANKS, PROMPTS = (0.5, 1, 2, 5, 10, 25, 50), (8, 16, 32, 64, 128), (16, 32, 64, 128, 256, 512, 1024, 2048)
DISKS_MBPS = (50, 500)


@dataclass(frozen=True, slots=True)
class Case:
    """One figure. `adapters` 0: every request has another one.

    `paper`: its increase of TTFT (on demand, CPU); () where it tells none.
    """

    name: str
    rate: float
    rank: int
    adapters: int
    paper: tuple[float, ...]


CASES = (
    Case("Figure 10", 9.0, 64, 0, (4.12, 0.22)),
    Case("Figure 13, rank 32", 9.0, 32, 0, (0.88, 0.36)),
    Case("Figure 13, 6 req/s", 6.0, 64, 0, (0.42, 0.01)),
    Case("Figure 14, 128 adapters", 1.5, 64, 128, (0.31, 0.09)),
    Case("Figure 14, 256 adapters", 3.6, 64, 256, ()),
    Case("Figure 14, 512 adapters", 7.7, 64, 512, (0.39, 0.07)),
)


def traffic(case: Case, seconds: float, resident: int = 0) -> Work:
    """Poisson arrivals with lengths like Alpaca's: about 45 tokens, and 60 of answer. `resident`: so many adapters."""
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(1 / case.rate, round(case.rate * seconds)))

    def requests() -> Iterator[Request]:
        for index, at in enumerate(times):
            adapter = int(rng.choice(case.adapters, p=zipf(case.adapters, 1.1))) if case.adapters else index
            prompt, output = (int(np.clip(rng.lognormal(*law), 4, 400)) for law in ((3.6, 0.6), (3.8, 0.8)))
            yield at, prompt, output, adapter % resident if resident else adapter

    count = case.adapters or len(times)
    return work_of(case.name, turns_of(rng, requests()), [case.rank] * count, A10)


def scenario(side: str) -> Scenario:
    """How a side starts cold."""
    start = "stream" if side == "cached" else "wait" if side == "blocking" else side
    engine = EngineConfig(max_seqs=32, max_step_tokens=1024, max_queue=1 << 20, cold_start=start)
    return Scenario(A10, host_gb=400.0, link_gbps=LINK_GBPS, engine=engine, blocking=side == "blocking")


def play(case: Case, seconds: float) -> dict[str, dict[str, float]]:
    """The summary of each side. `cached` has as many adapters as stay on the device, whatever the case asks for."""
    works = {side: traffic(case, seconds, RESIDENT if side == "cached" else 0) for side in SIDES}
    return {side: simulate(scenario(side), works[side], "jlora")["summary"] for side in SIDES}


def best(hardware: Hardware, gbps: float, rank: int, prompt: int) -> dict[str, float]:
    """Predicted seconds to the first token of a request alone, by the way of starting, from host memory."""
    size, bps = hardware.adapter_blocks(rank), gbps * 1e9
    copy_s = size * hardware.layout.block_bytes / bps
    return predict(Cold(prompt, size, hardware.places, copy_s, copy_s, GROUPS), hardware.costs(HOST, bps))


def reading_s(hardware: Hardware, mbps: float, rank: int) -> float:
    """Seconds in which a disk reads an adapter. No way starts before: the copy and the help need all of it."""
    return hardware.adapter_blocks(rank) * hardware.layout.block_bytes / (mbps * 1e6)


def run(options: Options) -> None:
    """Plays every figure, and predicts the map of link, rank and prompt, from host memory and from disks."""
    seconds = options.seconds or (20.0 if options.quick else 300.0)
    (options.out / "caraserve-simulated.jsonl").unlink(missing_ok=True)
    records = options.records("caraserve-simulated", {"seconds": seconds, "link_gbps": LINK_GBPS})
    for case in CASES[:1] if options.quick else CASES:
        for side, summary in play(case, seconds).items():
            kept = {key: summary[key] for key in ("ttft_s", "ttft_p99_s", "tpot_s")}
            records.add(case.name, side, 0, {"kind": "figure", "paper": list(case.paper), **kept})
    for hardware, gbps, rank, prompt in itertools.product((A10, H200), LINKS, RANKS, PROMPTS):
        cell = {"kind": "map", "chip": hardware.chip.name, "gbps": gbps, "rank": rank, "prompt": prompt}
        name = f"{hardware.chip.name} {gbps:g} GB/s rank {rank} prompt {prompt}"
        found = best(hardware, gbps, rank, prompt)
        records.add(name, "predicted", 0, {**cell, **found})
        for mbps in DISKS_MBPS:
            read_s = reading_s(hardware, mbps, rank)
            more = {"kind": "disk", "mbps": mbps, "read_s": read_s}
            more |= {way: read_s + seconds for way, seconds in found.items()}
            records.add(f"{name} disk {mbps} MB/s", "predicted", 0, {**cell, **more})
