"""R1: tokens per second of many requests at once, jlora against transformers + PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jlora.bench import machine, ours, peers, rounds
from jlora.bench.rounds import Budget, Journal, Sample, Side
from jlora.bench.workload import Plan, Workload, output_tokens, prepare


@dataclass(frozen=True, slots=True)
class Setup:
    """How one comparison is run.

    Attributes:
        peer_python: an interpreter with torch, transformers and peft; "" measures jlora alone.
        work: where weights and the journal are kept between runs.
        settings: jlora `section.key` overrides.
        grpc: also run jlora once behind its gRPC server, in a process of its own.
    """

    plan: Plan
    dtype: str
    budget: Budget
    work: Path
    peer_python: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    grpc: bool = True

    def describe(self) -> dict[str, Any]:
        """What makes two runs comparable: the head of the journal and part of the results."""
        return {
            "workload": self.plan.describe(),
            "dtype": self.dtype,
            "settings": dict(self.settings),
            "threads": machine.threads(),
            "versions": machine.versions(),
        }


def run(setup: Setup) -> dict[str, Any]:
    """Measures, checks outputs, and returns what goes into the results file."""
    workload = prepare(setup.plan, setup.work / "workload")
    journal = Journal(setup.work / f"throughput-{setup.dtype}.jsonl", setup.describe())
    result: dict[str, Any] = {"settings": setup.describe()}
    peer = _start_peer(setup, workload, result)
    try:
        batchings = _search(peer, workload, result)
        engine = ours.InProcess(ours.configure(workload, setup.dtype, setup.settings))
        try:
            engine.run(workload.jobs[:2])  # neither side pays for first touches
            _measure(setup, workload, engine, peer, batchings, journal, result)
            stats = engine.service.stats()
            result["compiles_after_warmup"] = stats.compiles_after_warmup
        finally:
            engine.stop()
        if setup.grpc:
            result["grpc"] = _over_grpc(setup, workload)
    finally:
        if peer is not None:
            peer.stop()
    result["summary"] = summarise(result, output_tokens(workload.jobs))
    return result


def _start_peer(setup: Setup, workload: Workload, result: dict[str, Any]) -> peers.Peer | None:
    if not setup.peer_python:
        return None
    peer = peers.Peer(setup.peer_python)
    directory = str(workload.directory.resolve())
    result["peer"] = peer.ask("load", directory=directory, dtype=setup.dtype, threads=machine.threads())
    return peer


def _search(peer: peers.Peer | None, workload: Workload, result: dict[str, Any]) -> dict[str, peers.Batching]:
    if peer is None:
        return {}
    best, probes = peers.search(peer, workload.jobs)
    result["peer_batching"] = {order: asdict(batching) for order, batching in best.items()}
    result["peer_probes"] = probes
    return best


def _measure(
    setup: Setup,
    workload: Workload,
    engine: ours.InProcess,
    peer: peers.Peer | None,
    batchings: Mapping[str, peers.Batching],
    journal: Journal,
    result: dict[str, Any],
) -> None:
    """The rounds, the clairvoyant run beside them, and the comparison of outputs."""
    last: dict[str, Any] = {}

    def run_jlora() -> Sample:
        last["jlora"] = engine.run(workload.jobs)
        return {"seconds": last["jlora"].seconds, "ttft_mean_s": _mean(last["jlora"].first.values())}

    def run_peer(order: str) -> Sample:
        chosen = batchings[order]
        assert peer is not None
        last["peft"] = peer.ask("static", batch=chosen.batch, cache=chosen.cache, order=order)
        return {"seconds": last["peft"]["seconds"]}

    sides = [Side("jlora", run_jlora)]
    if peer is not None:
        sides.append(Side("peft", lambda: run_peer("prompt")))
    result["rounds"] = rounds.interleave(sides, journal, setup.budget, f"R1 {setup.dtype}")
    if peer is not None:
        result["clairvoyant"] = run_peer("output")
        if "jlora" not in last:  # every round came from the journal
            run_jlora()
        result["outputs"] = peers.compare_outputs(peer.gap, workload.jobs, last["jlora"], last["peft"]["tokens"])


def _over_grpc(setup: Setup, workload: Workload) -> Sample:
    server = ours.OverGrpc(workload, setup.dtype, setup.settings)
    try:
        server.run(workload.jobs[:2])
        return {"seconds": server.run(workload.jobs).seconds}
    finally:
        server.stop()


def summarise(result: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Medians, ratios and controls of the rounds; tokens are the output tokens of one round."""
    done = result["rounds"]
    ours_s = rounds.spread([r["jlora"]["seconds"] for r in done])
    summary: dict[str, Any] = {
        "rounds": len(done),
        "output_tokens": tokens,
        "jlora_tokens_per_s": tokens / ours_s.median,
        "jlora_control": rounds.control(done, "jlora"),
    }
    if "grpc" in result:
        summary["grpc_tokens_per_s"] = tokens / result["grpc"]["seconds"]
    if "peer" in result:
        theirs_s = rounds.spread([r["peft"]["seconds"] for r in done])
        summary["peft_tokens_per_s"] = tokens / theirs_s.median
        summary["peft_control"] = rounds.control(done, "peft")
        summary["ratio"] = asdict(rounds.speed_ratio(done, "jlora", "peft"))
        summary["ratio_to_clairvoyant"] = result["clairvoyant"]["seconds"] / ours_s.median
    controls = [summary[key] for key in ("jlora_control", "peft_control") if key in summary]
    summary["steady"] = all(rounds.is_steady(c) for c in controls)
    return summary


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)
