"""R2: jlora's gRPC server against a llama.cpp server, same weights, prompts and threads.

    8 clients     each with an adapter of its own, one request after the other
    1 client      one adapter, one request after the other

Both servers stand the whole time and are asked in turn by the same threads of this process. Greedy
outputs of both are compared; where the first different tokens are rated alike by llama.cpp, it is a tie.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import grpc

from jlora.bench import llama, machine, rounds
from jlora.bench.ours import Run
from jlora.bench.peers import compare_outputs
from jlora.bench.rounds import Budget, Journal, Sample, Side
from jlora.bench.server import ServerProcess, flags_of
from jlora.bench.workload import LLAMA_100M, R1_QUICK, Job, Plan, Workload, output_tokens, prepare
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

R2 = Plan(LLAMA_100M, requests=32, prompt_tokens=(16, 512), output_tokens=(8, 256))
R2_QUICK = replace(R1_QUICK, requests=6)
CASES = {"clients": "one client per adapter", "alone": "one client"}


class Client(Protocol):
    """Asks one server for one job after the other."""

    def answer(self, job: Job) -> list[int]:
        """Output token ids."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """How the comparison is run; `settings` are jlora `section.key` overrides."""

    plan: Plan
    peer: llama.Peer
    budget: Budget
    work: Path
    settings: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """What makes two runs comparable."""
        return {
            "workload": self.plan.describe(),
            "dtype": "float32",
            "settings": dict(self.settings),
            "threads": self.peer.threads,
            "versions": machine.versions(),
        }


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
        request = pb.GenerateRequest(
            model=job.adapter or "",
            token_ids=pb.TokenIds(ids=job.prompt),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=job.max_tokens, min_tokens=job.max_tokens),
            bypass_prefix_cache=True,
        )
        return list(self._stub.Generate(request, timeout=llama.REQUEST_S).outputs[0].token_ids)


def run(setup: Setup) -> dict[str, Any]:
    """Measures, checks outputs, and returns what goes into the results file."""
    workload = prepare(setup.plan, setup.work / "workload")
    files = setup.peer.files(workload, setup.work / "gguf")
    cases = {"clients": by_adapter(workload.jobs), "alone": by_adapter(workload.jobs)[:1]}
    journal = Journal(setup.work / "llama.jsonl", setup.describe())
    last: dict[str, Run] = {}
    with ExitStack() as stack:
        slots, context = len(cases["clients"]), setup.plan.spec.max_len
        theirs = llama.LlamaServer(setup.peer, files, slots, context, setup.work / "llama-server.log")
        stack.callback(theirs.stop)
        ours = ServerProcess(_flags(workload, setup))
        stack.callback(ours.stop)
        connect = {"jlora": lambda: GrpcClient(ours.address), "llama.cpp": theirs.connect}

        def measure(server: str, case: str) -> Sample:
            done = last[f"{server} {case}"] = play(connect[server], cases[case])
            return {"seconds": done.seconds}

        for server in connect:
            play(connect[server], [jobs[:1] for jobs in cases["clients"]])  # neither pays for first touches
        names = [(server, case) for case in cases for server in connect]
        sides = [Side(f"{server} {case}", lambda s=server, c=case: measure(s, c)) for server, case in names]
        done = rounds.interleave(sides, journal, setup.budget, "R2")
        for server, case in names:
            if f"{server} {case}" not in last:  # every round came from the journal
                measure(server, case)
        outputs = {case: _compared(theirs, cases[case], case, last) for case in cases}
        version = theirs.version()
    tokens = {case: sum(map(output_tokens, jobs)) for case, jobs in cases.items()}
    return {
        "settings": setup.describe(),
        "peer": {"versions": {"llama.cpp": version}},
        "rounds": done,
        "summary": [{**summarise(done, case, tokens[case]), "outputs": outputs[case]} for case in cases],
    }


def by_adapter(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs of each adapter: one client's work."""
    clients: dict[str | None, list[Job]] = {}
    for job in jobs:
        clients.setdefault(job.adapter, []).append(job)
    return list(clients.values())


def play(connect: Callable[[], AbstractContextManager[Client]], clients: Sequence[Sequence[Job]]) -> Run:
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


def summarise(done: Sequence[Mapping[str, Sample]], case: str, tokens: int) -> dict[str, Any]:
    """Tokens per second of both, the ratio inside a round, each against itself."""
    ours, theirs = f"jlora {case}", f"llama.cpp {case}"
    return {
        "case": CASES[case],
        "rounds": len(done),
        "output_tokens": tokens,
        "jlora_tokens_per_s": tokens / rounds.spread([r[ours]["seconds"] for r in done]).median,
        "llama_tokens_per_s": tokens / rounds.spread([r[theirs]["seconds"] for r in done]).median,
        "ratio": asdict(rounds.speed_ratio(done, ours, theirs)),
        "jlora_control": rounds.control(done, ours),
        "llama_control": rounds.control(done, theirs),
    }


def _compared(
    theirs: llama.LlamaServer, clients: Sequence[Sequence[Job]], case: str, last: Mapping[str, Run]
) -> dict[str, Any]:
    """Both servers' last answers to a case's jobs."""
    told = {str(job): tokens for job, tokens in last[f"llama.cpp {case}"].tokens.items()}
    return compare_outputs(theirs.gap, [job for jobs in clients for job in jobs], last[f"jlora {case}"], told)


def _flags(workload: Workload, setup: Setup) -> list[str]:
    base = ["--model", str(workload.model), "--dtype", "float32", "--served-model-name", setup.plan.spec.name]
    return [*base, *flags_of(workload.adapters, setup.settings)]
