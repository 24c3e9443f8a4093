"""R1b: one request alone, jlora against transformers + PEFT: prefill and decode.

The peer is measured both through `generate` and in a bare loop over the model; it is
compared by whichever is faster. Its base is a model that PEFT never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jlora.bench import machine, ours, peers, rounds
from jlora.bench.rounds import Journal, Sample, Side
from jlora.bench.throughput import Setup
from jlora.bench.workload import Job, prepare

HOWS = ("generate", "loop")


def run(setup: Setup, prompts: Sequence[int], tokens: int) -> dict[str, Any]:
    """Each prompt length with the base and with one adapter; `tokens` decode steps each."""
    workload = prepare(setup.plan, setup.work / "workload")
    settings = {**setup.describe(), "prompts": list(prompts), "tokens": tokens}
    journal = Journal(setup.work / f"latency-{setup.dtype}.jsonl", settings)
    result: dict[str, Any] = {"settings": settings}
    source = max(workload.jobs, key=lambda job: len(job.prompt)).prompt
    adapter = next(iter(workload.adapters), None)
    targets = {"base": None, **({"adapter": adapter} if adapter else {})}
    engine = ours.InProcess(ours.configure(workload, setup.dtype, setup.settings))
    peer = peers.Peer(setup.peer_python) if setup.peer_python else None
    try:
        sides: list[Side] = []
        if peer is not None:
            directory = str(workload.directory.resolve())
            result["peer"] = peer.ask("load", directory=directory, dtype=setup.dtype, threads=machine.threads())
        for target, name in targets.items():
            for length in prompts:
                prompt = (source * (length // len(source) + 1))[:length]
                sides += _sides(engine, peer, Job(0, prompt, 1 + tokens, name), f"{target} {length}")
        for side in sides:
            side.run()  # neither side pays for first touches
        result["rounds"] = rounds.interleave(sides, journal, setup.budget, f"R1b {setup.dtype}")
    finally:
        engine.stop()
        if peer is not None:
            peer.stop()
    result["summary"] = summarise(result["rounds"], [f"{t} {n}" for t in targets for n in prompts])
    return result


def _sides(engine: ours.InProcess, peer: peers.Peer | None, job: Job, case: str) -> list[Side]:
    """jlora, then the peer both ways, on one case."""

    def run_jlora() -> Sample:
        done = engine.run([job])
        return {
            "prefill_s": done.first[job.id],
            "step_s": (done.last[job.id] - done.first[job.id]) / (job.max_tokens - 1),
        }

    def run_peer(how: str) -> Sample:
        assert peer is not None
        return peer.ask("alone", prompt=list(job.prompt), tokens=job.max_tokens - 1, adapter=job.adapter, how=how)

    sides = [Side(f"jlora {case}", run_jlora)]
    if peer is not None:
        sides += [Side(f"{how} {case}", lambda how=how: run_peer(how)) for how in HOWS]
    return sides


def summarise(done: Sequence[Mapping[str, Sample]], cases: Sequence[str]) -> list[dict[str, Any]]:
    """Per case and metric: medians, the ratio to the peer's faster way, the control."""
    rows = []
    for case in cases:
        for key in ("prefill_s", "step_s"):
            jlora = f"jlora {case}"
            row: dict[str, Any] = {
                "case": case,
                "metric": key,
                "rounds": len(done),
                "jlora_s": rounds.spread([r[jlora][key] for r in done]).median,
                "jlora_control": rounds.control(done, jlora, key),
            }
            ways = {how: [r[f"{how} {case}"][key] for r in done] for how in HOWS if f"{how} {case}" in done[0]}
            if ways:
                best = min(ways, key=lambda how: rounds.spread(ways[how]).median)
                row["peer_s"] = rounds.spread(ways[best]).median
                row["peer_way"] = best
                row["peer_control"] = rounds.control(done, f"{best} {case}", key)
                row["ratio"] = asdict(rounds.speed_ratio(done, jlora, f"{best} {case}", key))
            rows.append(row)
    return rows
