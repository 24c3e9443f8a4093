"""R1: tokens per second of many requests at once, jlora against transformers + PEFT."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.jobs import R1, R1_QUICK, output_tokens, prepare
from benchmarks.peers import hf
from benchmarks.peers.ours import InProcess, OverGrpc, configure
from benchmarks.runner import Options
from jlora.loadgen.rounds import Side


def run(options: Options) -> None:
    """Measures rounds, then once: the clairvoyant peer, jlora over gRPC, and whether the outputs are equal."""
    workload = prepare(R1_QUICK if options.quick else R1, options.folder("r1") / "workload")
    settings = {"workload": workload.plan.describe(), "output_tokens": output_tokens(workload.jobs)}
    records = options.records(f"throughput-{options.dtype}", settings)
    last: dict[str, Any] = {}
    with ExitStack() as stack:
        peer = stack.enter_context(hf.Peer(options, workload)) if options.peer_python else None
        batchings = hf.search(peer, workload.jobs) if peer else {}
        engine = stack.enter_context(InProcess(configure(workload, options.dtype, options.settings)))

        def ours() -> dict[str, Any]:
            last["jlora"] = engine.run(workload.jobs)
            return last["jlora"].sample

        def theirs(order: str) -> dict[str, Any]:
            assert peer is not None
            chosen = batchings[order]
            last["peft"] = peer.ask("static", batch=chosen.batch, cache=chosen.cache, order=order)
            return {"seconds": last["peft"]["seconds"], "batch": chosen.batch, "cache": chosen.cache}

        engine.run(workload.jobs[:2])  # neither side pays for first touches
        sides = [Side("jlora", ours), *([Side("peft", lambda: theirs("prompt"))] if peer else [])]
        records.measure("rounds", sides, options.budget(5))
        if peer is not None:
            records.add("once", "peft, clairvoyant", 0, theirs("output"))
            if "jlora" not in last:  # every round was finished before
                ours()
            outputs = hf.compare(peer.gap, workload.jobs, last["jlora"], last["peft"]["tokens"])
            records.add("once", "outputs", 0, outputs)
            records.add("once", "versions", 0, peer.versions)
        records.add("once", "jlora, compiles after warm-up", 0, {"compiles": engine.compiles})
    if options.grpc:
        with OverGrpc(workload, options.dtype, options.settings) as server:
            server.run(workload.jobs[:2])
            records.add("once", "jlora over gRPC", 0, server.run(workload.jobs).sample)
