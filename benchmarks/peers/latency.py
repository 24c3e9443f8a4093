"""R1b: one request alone, jlora against transformers + PEFT: prefill and decode.

The peer is measured through `generate` and in a bare loop over the model, and is compared by
whichever is faster. Its base is a model that PEFT never touched.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.jobs import R1, R1_QUICK, Job, prepare
from benchmarks.peers import hf
from benchmarks.peers.ours import InProcess, configure
from benchmarks.runner import Options
from jlora.loadgen.rounds import Sample, Side

HOWS = ("generate", "loop")


def run(options: Options) -> None:
    """Each prompt length with the base and with one adapter."""
    prompts, tokens = ((8, 24), 8) if options.quick else ((128, 512), 32)
    workload = prepare(R1_QUICK if options.quick else R1, options.folder("r1") / "workload")
    settings = {"workload": workload.plan.describe(), "prompts": prompts, "tokens": tokens}
    records = options.records(f"latency-{options.dtype}", settings)
    source = max(workload.jobs, key=lambda job: len(job.prompt)).prompt
    with ExitStack() as stack:
        engine = stack.enter_context(InProcess(configure(workload, options.dtype, options.settings)))
        peer = stack.enter_context(hf.Peer(options, workload)) if options.peer_python else None
        sides: list[Side] = []
        for target, adapter in (("base", None), ("adapter", next(iter(workload.adapters)))):
            for length in prompts:
                prompt = (source * (length // len(source) + 1))[:length]
                sides += _sides(engine, peer, Job(0, prompt, 1 + tokens, adapter), f"{target} {length}")
        for side in sides:
            side.run()  # neither side pays for first touches
        records.measure("rounds", sides, options.budget(15))
        if peer is not None:
            records.add("once", "versions", 0, peer.versions)


def _sides(engine: InProcess, peer: hf.Peer | None, job: Job, case: str) -> list[Side]:
    """jlora, then the peer both ways, on one case."""

    def ours() -> Sample:
        done = engine.run([job])
        return {
            "prefill_s": done.first[job.id],
            "step_s": (done.last[job.id] - done.first[job.id]) / (job.max_tokens - 1),
        }

    def theirs(how: str) -> Sample:
        assert peer is not None
        return peer.ask("alone", prompt=list(job.prompt), tokens=job.max_tokens - 1, adapter=job.adapter, how=how)

    others = [Side(f"{how} {case}", lambda how=how: theirs(how)) for how in HOWS if peer is not None]
    return [Side(f"jlora {case}", ours), *others]
