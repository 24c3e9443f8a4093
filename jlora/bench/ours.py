"""jlora's side of a benchmark: jobs through the engine in this process, or through gRPC."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from jlora import config as configuration
from jlora.bench.server import ServerProcess, flags_of
from jlora.bench.workload import Job, Workload
from jlora.config import Config
from jlora.engine.service import Service
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.types import Request, SamplingParams, TokenEvent


@dataclass(slots=True)
class Run:
    """One pass over some jobs.

    Attributes:
        seconds: from the first submit to the last token.
        tokens: job id -> output token ids.
        first, last: job id -> seconds from the start to its first and last token.
    """

    seconds: float
    tokens: dict[int, list[int]] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)


def configure(workload: Workload, dtype: str, settings: Mapping[str, Any] | None = None) -> Config:
    """The configuration that serves a workload; `settings` are `section.key` overrides."""
    adapters = {f"adapters.paths.{name}": path for name, path in workload.adapters.items()}
    model = {"model.path": str(workload.model), "model.name": workload.plan.spec.name, "model.dtype": dtype}
    return configuration.load(None, {**model, **adapters, **(settings or {})})


class InProcess:
    """The engine without a front: what a step really costs."""

    def __init__(self, config: Config, progress: bool = True):
        self.service = Service.start(config, progress=progress)
        self._runs = 0

    def run(self, jobs: Sequence[Job]) -> Run:
        """All jobs at once; nothing is read from or left in the prefix cache."""
        self._runs += 1
        events: list[tuple[float, TokenEvent]] = []
        ended = threading.Semaphore(0)

        def sink(new: list[TokenEvent]) -> None:
            now = time.perf_counter()
            events.extend((now, event) for event in new)
            if new[-1].finish_reason:
                ended.release()

        requests = [self._request(job) for job in jobs]
        start = time.perf_counter()
        for request in requests:
            self.service.submit(request, sink)
        for _ in jobs:
            ended.acquire()
        run = Run(time.perf_counter() - start)
        for at, event in events:
            job = int(event.request_id.rpartition("-")[2])
            if event.token_id is not None:
                run.tokens.setdefault(job, []).append(event.token_id)
                run.first.setdefault(job, at - start)
                run.last[job] = at - start
        return run

    def stop(self) -> None:
        """Ends the engine."""
        self.service.stop()

    def _request(self, job: Job) -> Request:
        sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        return Request(f"{self._runs}-{job.id}", job.prompt, sampling, job.adapter, bypass_prefix_cache=True)


class OverGrpc:
    """A server in a process of its own, called by one asyncio client."""

    def __init__(self, workload: Workload, dtype: str, settings: Mapping[str, Any] | None = None):
        base = ["--model", str(workload.model), "--dtype", dtype, "--served-model-name", workload.plan.spec.name]
        self._server = ServerProcess([*base, *flags_of(workload.adapters, settings or {})])

    def run(self, jobs: Sequence[Job]) -> Run:
        """All jobs at once, each a unary call."""
        return asyncio.run(self._run(jobs))

    def stop(self) -> None:
        """Ends the server as an operator would."""
        self._server.stop()

    async def _run(self, jobs: Sequence[Job]) -> Run:
        async with grpc.aio.insecure_channel(self._server.address) as channel:
            stub = rpc.InferenceStub(channel)
            await channel.channel_ready()
            requests = [self._request(job) for job in jobs]
            start = time.perf_counter()
            answers = await asyncio.gather(*(stub.Generate(request) for request in requests))
            run = Run(time.perf_counter() - start)
        for job, answer in zip(jobs, answers, strict=True):
            run.tokens[job.id] = list(answer.outputs[0].token_ids)
            run.first[job.id] = answer.timing.ttft_s
        return run

    @staticmethod
    def _request(job: Job) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=job.adapter or "",
            token_ids=pb.TokenIds(ids=job.prompt),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=job.max_tokens, ignore_eos=True),
            bypass_prefix_cache=True,
        )
