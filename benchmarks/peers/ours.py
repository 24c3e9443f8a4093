"""jlora's side of a comparison: all jobs at once through a replica in this process, or through gRPC."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.jobs import Job, Workload
from jlora import config as configuration
from jlora.config import Config
from jlora.engine.local import LocalReplica
from jlora.loadgen.server import ServerProcess, exactly, flags_of, look
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.types import Request, SamplingParams, Timing, TokenEvent, Usage


@dataclass(slots=True)
class Run:
    """One pass over some jobs, by job id.

    Attributes:
        seconds: from the first submit to the last token.
        tokens: output token ids; first, last: seconds from the start to the first and last token.
        usage, timing: as the replica reports them (in this process only).
    """

    seconds: float
    tokens: dict[int, list[int]] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    timing: dict[int, Timing] = field(default_factory=dict)

    @property
    def sample(self) -> dict[str, float]:
        """For the records."""
        return {"seconds": self.seconds, "ttft_mean_s": sum(self.first.values()) / len(self.first)}


def configure(workload: Workload, dtype: str, settings: Mapping[str, Any]) -> Config:
    """The configuration that serves a workload; `settings` are `section.key` overrides."""
    adapters = {f"adapters.paths.{name}": path for name, path in workload.adapters.items()}
    model = {"model.path": str(workload.model), "model.name": workload.plan.spec.name, "model.dtype": dtype}
    return configuration.load(None, {**model, **adapters, **settings})


class InProcess:
    """A replica without a front: what a step really costs."""

    def __init__(self, config: Config):
        self.replica = LocalReplica.start(config, progress=True)
        self.replica.warm().result()
        self._runs = 0

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.replica.close()

    @property
    def compiles(self) -> int:
        """Programs compiled after warm-up."""
        return self.replica.state().result().stats.compiles_after_warmup

    def run(self, jobs: Sequence[Job], bypass: bool = True, tenant: str = "") -> Run:
        """All jobs at once.

        Args:
            bypass: read nothing from the prefix cache and leave nothing there.
        """
        self._runs += 1
        events: list[tuple[float, TokenEvent]] = []
        ended = threading.Semaphore(0)

        def sink(new: list[TokenEvent]) -> None:
            now = time.perf_counter()
            events.extend((now, event) for event in new)
            if new[-1].finish_reason:
                ended.release()

        requests = [self._request(job, bypass, tenant) for job in jobs]
        start = time.perf_counter()
        for future in [self.replica.submit(request, sink) for request in requests]:
            future.result()
        for _ in jobs:
            ended.acquire()
        run = Run(time.perf_counter() - start)
        for at, event in events:
            job = int(event.request_id.rpartition("-")[2])
            if event.token_id is not None:
                run.tokens.setdefault(job, []).append(event.token_id)
                run.first.setdefault(job, at - start)
                run.last[job] = at - start
            if event.usage is not None and event.timing is not None:
                run.usage[job], run.timing[job] = event.usage, event.timing
        return run

    def _request(self, job: Job, bypass: bool, tenant: str) -> Request:
        sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        name = f"{tenant}-{self._runs}-{job.id}"
        return Request(name, job.prompt, sampling, job.adapter, tenant=tenant, bypass_prefix_cache=bypass)


class OverGrpc:
    """A server in a process of its own, called by one asyncio client; entered, all its programs are compiled."""

    def __init__(self, workload: Workload, dtype: str, settings: Mapping[str, Any]):
        base = ["--model", str(workload.model), "--dtype", dtype, "--served-model-name", workload.plan.spec.name]
        self.server = ServerProcess([*base, *flags_of(workload.adapters, settings)])

    def __enter__(self) -> OverGrpc:
        asyncio.run(look(self.server.address))
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    def info(self) -> pb.ServerInfo:
        """What the server says of itself."""
        with grpc.insecure_channel(self.server.address) as channel:
            return rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=60)

    def run(self, jobs: Sequence[Job]) -> Run:
        """All jobs at once, each a unary call."""
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: Sequence[Job]) -> Run:
        async with grpc.aio.insecure_channel(self.server.address) as channel:
            stub = rpc.InferenceStub(channel)
            await channel.channel_ready()
            requests = [request_of(job, ignore_eos=True) for job in jobs]
            start = time.perf_counter()
            answers = await asyncio.gather(*(stub.Generate(request) for request in requests))
            run = Run(time.perf_counter() - start)
        for job, answer in zip(jobs, answers, strict=True):
            run.tokens[job.id] = list(answer.outputs[0].token_ids)
            run.first[job.id] = answer.timing.ttft_s
        return run


def request_of(job: Job, ignore_eos: bool) -> pb.GenerateRequest:
    """A greedy request for exactly the job's tokens; end tokens count as any other (`ignore_eos`) or are banned."""
    request = exactly(job.max_tokens, job.prompt, model=job.adapter or "", bypass_prefix_cache=True)
    if not ignore_eos:
        request.stopping.ignore_eos, request.stopping.min_tokens = False, job.max_tokens
    return request
