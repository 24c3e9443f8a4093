"""R2: jlora's gRPC server against a llama.cpp server, same weights, prompts and threads.

    8 clients     each with an adapter of its own, one request after the other
    1 client      one adapter, one request after the other

Both servers stand the whole time and are asked in turn by the same threads of this process. Greedy
outputs of both are compared; where the first different tokens are rated alike by llama.cpp, it is a tie.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Protocol

import grpc

from benchmarks.jobs import R1_QUICK, Job, Plan, Workload, output_tokens, prepare
from benchmarks.peers import llama_server
from benchmarks.peers.hf import compare
from benchmarks.peers.ours import OverGrpc, Run, request_of
from benchmarks.runner import Options
from jlora import machine
from jlora.loadgen.checkpoints import LLAMA_100M
from jlora.loadgen.rounds import Sample, Side
from jlora.serve.proto import jlora_pb2_grpc as rpc

R2 = Plan(LLAMA_100M, requests=32, prompt_tokens=(16, 512), output_tokens=(8, 256))
R2_QUICK = replace(R1_QUICK, requests=6)


class Client(Protocol):
    """Asks one server for one job after the other."""

    def answer(self, job: Job) -> list[int]:
        """Output token ids."""
        ...


Connect = Callable[[], AbstractContextManager[Client]]


class GrpcClient:
    """One connection to jlora's server."""

    def __init__(self, address: str):
        self._channel = grpc.insecure_channel(address)
        self._stub = rpc.InferenceStub(self._channel)

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def answer(self, job: Job) -> list[int]:
        """Output token ids; end tokens are banned, as llama.cpp does it."""
        answer = self._stub.Generate(request_of(job, ignore_eos=False), timeout=llama_server.REQUEST_S)
        return list(answer.outputs[0].token_ids)


def run(options: Options) -> None:
    """Measures rounds of both cases, then compares the last answers; jlora alone where there is no llama.cpp."""
    plan, home = (R2_QUICK if options.quick else R2), options.folder("r2")
    workload = prepare(plan, home / "workload")
    cases = {"clients": by_adapter(workload.jobs), "alone": by_adapter(workload.jobs)[:1]}
    tokens = {case: sum(map(output_tokens, jobs)) for case, jobs in cases.items()}
    records = options.records("llama-float32", {"workload": plan.describe(), "output_tokens": tokens})
    last: dict[str, Run] = {}
    with ExitStack() as stack:
        theirs = _llama(options, workload, len(cases["clients"]))
        ours = stack.enter_context(OverGrpc(workload, "float32", options.settings))
        connect: dict[str, Connect] = {"jlora": lambda: GrpcClient(ours.server.address)}
        if theirs is not None:
            connect["llama.cpp"] = stack.enter_context(theirs).connect

        def ask(server: str, case: str) -> Sample:
            done = last[f"{server} {case}"] = play(connect[server], cases[case])
            return {"seconds": done.seconds}

        for server in connect:
            play(connect[server], [jobs[:1] for jobs in cases["clients"]])  # neither pays for first touches
        names = [(server, case) for case in cases for server in connect]
        sides = [Side(f"{server} {case}", lambda s=server, c=case: ask(s, c)) for server, case in names]
        records.measure("rounds", sides, options.budget(5))
        if theirs is None:
            return
        for server, case in names:
            if f"{server} {case}" not in last:  # every round was finished before
                ask(server, case)
        for case, clients in cases.items():
            told = {str(job): tokens for job, tokens in last[f"llama.cpp {case}"].tokens.items()}
            jobs = [job for client in clients for job in client]
            outputs: dict[str, Any] = compare(theirs.gap, jobs, last[f"jlora {case}"], told)
            records.add("once", f"outputs {case}", 0, outputs)
        records.add("once", "versions", 0, {"llama.cpp": theirs.version()})


def _llama(options: Options, workload: Workload, slots: int) -> llama_server.LlamaServer | None:
    """The user's llama.cpp with the workload's weights."""
    if not options.llama_server:
        return None
    home = options.folder("r2")
    peer = llama_server.Peer(options.llama_server, options.llama_convert, machine.threads())
    files = peer.files(workload, home / "gguf")
    return llama_server.LlamaServer(peer, files, slots, workload.plan.spec.max_len, home / "llama-server.log")


def by_adapter(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs of each adapter: one client's work."""
    clients: dict[str | None, list[Job]] = {}
    for job in jobs:
        clients.setdefault(job.adapter, []).append(job)
    return list(clients.values())


def play(connect: Connect, clients: Sequence[Sequence[Job]]) -> Run:
    """All clients at once, each with a thread and a connection of its own; timed from when all are connected."""
    tokens: dict[int, list[int]] = {}
    ready = threading.Barrier(len(clients) + 1)

    def ask(jobs: Sequence[Job]) -> None:
        with connect() as client:
            ready.wait()
            for job in jobs:
                tokens[job.id] = client.answer(job)

    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(ask, jobs) for jobs in clients]
        ready.wait()
        start = time.perf_counter()
        for future in futures:
            future.result()
        return Run(time.perf_counter() - start, tokens)
