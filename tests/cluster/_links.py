"""Scripted replicas: real gRPC streams on real sockets, without an engine.

A token is a function of seed, completion and position, as it is in the engine, so that an answer must be the same
whatever happens to its attempts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc

from jlora.cluster import wire
from jlora.cluster.attach import Terms
from jlora.cluster.directory import Version
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.router import Router
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.routing.policy import Policy
from jlora.config import Config
from jlora.engine.futures import done, failed
from jlora.errors import NotFound
from jlora.replica import Load, ReplicaInfo
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as jlora
from jlora.types import AdapterInfo, Done, Request, SamplingParams, Timing, TokenEvent, Usage
from jlora.validation import Limits

T = TypeVar("T")

VOCAB = 400
STEP_S = 0.002
INFO = ReplicaInfo(
    "base", "float32", Limits(VOCAB, 4096, 4096), (2,), 16, 4096, "cpu", ("cpu:0",),
    replace(Config(), engine=replace(Config().engine, max_seqs=8, max_queue=64)),
)  # fmt: skip


def token_of(request: Request, index: int, position: int) -> int:
    """What the model says."""
    return ((request.sampling.seed or 0) * 7 + index * 131 + position * 17 + len(request.prompt)) % VOCAB


def answer(request: Request, index: int = 0) -> list[int]:
    """The tokens of a completion that nothing disturbs."""
    return [token_of(request, index, i) for i in range(request.sampling.max_tokens or 1)]


@dataclass
class _Running:
    start: link.Start
    request: Request
    done: list[Done]


@dataclass
class FakeReplica(rpc.LinkServicer, jlora.ControlServicer, jlora.InferenceServicer):
    """Serves `Link`, and what a router asks of `Control` and `Inference`. Tests set its fields from any thread.

    Attributes:
        hung: sends nothing and reads nothing.
        deaf: reads nothing.
        silent: the engine does not move, but the process says so.
        double: sends each token twice, and those of the step before once more.
        refuse: errors for the next requests, with `elsewhere`.
        dies_after: the stream breaks after so many tokens in all; -1 is never.
        tells: acknowledges requests by `begun`.
        answers: what the router asks of `Control`; `asked` counts.
        digest: of the weights of which it says that its tokens are made.
        holds: adapter versions that it says to have in its host tier.
    """

    name: str
    info: ReplicaInfo = INFO
    hung: bool = False
    deaf: bool = False
    age_s: float = 0.0
    double: bool = False
    draining: bool = False
    compiling: bool = False
    programs_left: int = 0
    dies_after: int = -1
    tells: bool = True
    paused: bool = False
    answers: bool = True
    digest: str = ""
    holds: list[str] = field(default_factory=list)
    asked: int = 0
    refuse: list[tuple[Exception, bool]] = field(default_factory=list)
    address: str = ""
    epochs: list[int] = field(default_factory=list)
    started: list[link.Start] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)  # of these, those that go on elsewhere
    stopped: list[link.Stop] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    hinted: list[str] = field(default_factory=list)
    metadata: list[tuple[str, str]] = field(default_factory=list)
    running: dict[int, _Running] = field(default_factory=dict)
    steps: int = 0

    credentials: grpc.ServerCredentials | None = None
    protocol: int = wire.PROTOCOL
    newer: bytes = b""  # fields that a later version has, with every message

    async def serve(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        rpc.add_LinkServicer_to_server(self, self._server)
        jlora.add_ControlServicer_to_server(self, self._server)
        jlora.add_InferenceServicer_to_server(self, self._server)
        if self.credentials is not None:
            port = self._server.add_secure_port(f"127.0.0.1:{port}", self.credentials)
        else:
            port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def kill(self) -> None:
        await self._server.stop(0)

    async def Attach(
        self, messages: AsyncIterator[link.ToReplica], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[link.FromReplica]:
        while self.hung:
            await asyncio.sleep(STEP_S)
        self.metadata = [(k, str(v)) for k, v in context.invocation_metadata() or ()]
        hello = (await anext(messages)).hello
        self.epochs.append(hello.epoch)
        running: dict[int, _Running] = {}
        self.running = running
        read = [1]
        out = link.FromReplica()
        reader = asyncio.create_task(self._read(messages, running, out, read))
        try:
            hello = link.HelloBack(replica=self.name, info=wire.info_bytes(self.info), protocol=self.protocol)
            yield link.FromReplica(hello=link.HelloBack.FromString(hello.SerializeToString() + self.newer))
            last: list[link.Token] = []
            while True:
                await asyncio.sleep(STEP_S)
                while self.hung:
                    await asyncio.sleep(STEP_S)
                message = link.FromReplica.FromString(out.SerializeToString())
                out.Clear()
                tokens = [] if self.paused else self._step(running)
                message.tokens.extend([*last, *tokens, *tokens] if self.double else tokens)
                last = tokens
                if self.dies_after == 0:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "it dies")
                message.state.CopyFrom(self._state(running, read[0]))
                yield link.FromReplica.FromString(message.SerializeToString() + self.newer)
        finally:
            reader.cancel()

    async def _read(
        self,
        messages: AsyncIterator[link.ToReplica],
        running: dict[int, _Running],
        out: link.FromReplica,
        read: list[int],
    ) -> None:
        async for message in messages:
            while self.deaf:
                await asyncio.sleep(STEP_S)
            read[0] += 1
            what = message.WhichOneof("what")
            if what == "start":
                start = message.start
                self.started.append(start)
                if self.refuse:
                    error, elsewhere = self.refuse.pop(0)
                    out.failures.append(wire.failure(start.rid, error, elsewhere))
                    continue
                request = wire.request(start, f"r{start.rid}")
                completions = list(request.done) or [Done()] * request.sampling.n
                running[start.rid] = _Running(start, request, completions)
                if self.tells:
                    out.begun.append(start.rid)
            elif what == "cancel":
                self.cancelled.append(message.cancel.rid)
                self.moved += [message.cancel.rid] if message.cancel.moved else []
                running.pop(message.cancel.rid, None)
            elif what == "fetch":
                self.fetched.append(message.fetch.adapter.key)
            elif what == "stop":
                stop = message.stop
                self.stopped.append(stop)
                entry = running.get(stop.rid)
                if entry is not None and not entry.done[stop.index].ended:
                    entry.done[stop.index] = Done(entry.done[stop.index].tokens, True)
                    usage = Usage(len(entry.request.prompt), 0, stop.outputs)
                    event = TokenEvent("", stop.index, None, finish_reason="stop", usage=usage, timing=Timing())
                    out.tokens.append(wire.token(stop.rid, stop.outputs, event))

    def _step(self, running: dict[int, _Running]) -> list[link.Token]:
        tokens = []
        self.steps += bool(running)
        for rid, entry in list(running.items()):
            most = entry.request.sampling.max_tokens or 1
            for index, had in enumerate(entry.done):
                if had.ended:
                    continue
                if self.dies_after == 0:
                    return []
                self.dies_after -= self.dies_after > 0
                position = len(had.tokens)
                token, ended = token_of(entry.request, index, position), position + 1 == most
                event = TokenEvent(
                    "", index, token,
                    finish_reason="length" if ended else None,
                    usage=Usage(len(entry.request.prompt), 1, position + 1) if ended else None,
                    timing=Timing(ttft=0.001) if ended else None,
                )  # fmt: skip
                entry.done[index] = Done((*had.tokens, token), ended)
                tokens.append(wire.token(rid, position, event))
                tokens[-1].digest = self.digest
            if all(had.ended for had in entry.done):
                del running[rid]
        return tokens

    def _state(self, running: dict[int, _Running], read: int) -> link.State:
        return link.State(
            steps=self.steps, running=len(running), free_blocks=90, blocks=100, draining=self.draining,
            compiling=self.compiling, age_s=self.age_s, programs_left=self.programs_left,
            read=read,
            adapters=[link.Residency(key=key, tier="HOST", rank=8) for key in self.holds],
        )  # fmt: skip

    async def Prefetch(self, request: pb.GenerateRequest, context: Any) -> pb.PrefetchResponse:
        self.hinted.append(request.request_id)
        return pb.PrefetchResponse(adapter_resident=True)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        self.asked += 1
        while not self.answers:
            await asyncio.sleep(STEP_S)
        return pb.ServerInfo(steps=self.steps, running=len(self.running), host_s_per_step=0.5, longest_engine_gap_s=0.1)

    async def GetCacheState(self, request: pb.GetCacheStateRequest, context: Any) -> pb.CacheState:
        return pb.CacheState(policy="jlora", hbm=pb.TierState(total=100, free=90), kv_hit_tokens=5)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Any) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(blocks=7)

    async def Profile(self, request: pb.ProfileRequest, context: Any) -> pb.ProfileResponse:
        return pb.ProfileResponse(name="trace", steps=request.steps)


@dataclass
class FakeDirectory:
    """Versions in a dict; counts the requests that use each."""

    versions: dict[str, Version] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    members: Any = None
    fetches: int = 0

    def follow(self, members: Any) -> None:
        self.members = members

    def current(self, name: str) -> Version:
        if name not in self.versions:
            raise NotFound(f"model = {name!r}: is unknown", list(self.versions))
        return self.versions[name]

    def peers(self, version: Version, near: str) -> tuple[str, ...]:
        return ()

    def begin(self, version: Version) -> None:
        self.uses[version.key] = self.uses.get(version.key, 0) + 1

    def asked(self, version: Version, prompt: int) -> None: ...

    def end(self, version: Version, output: int = 0) -> None:
        self.uses[version.key] -= 1

    def load(self, load: Load) -> Any:
        return failed(NotFound("a double loads nothing"))

    def unload(self, name: str) -> Any:
        return failed(NotFound(name))

    def pin(self, name: str, pinned: bool) -> Any:
        return failed(NotFound(name))

    def adapters(self, after: str = "", most: int | None = None) -> Any:
        return done([_info(self.versions[name]) for name in sorted(self.versions) if name > after][:most])

    def adapter(self, name: str) -> Any:
        return done(_info(self.current(name)))


def _info(version: Version) -> AdapterInfo:
    return AdapterInfo(
        version.name, version.number, version.digest, 4, {}, ("q",), 0, 0, "HOST", False, 0, 0, 0, -1.0, 0.0
    )  # fmt: skip


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@dataclass
class Service:
    """A router over scripted replicas."""

    loop: Loop
    router: Router
    directory: FakeDirectory
    replicas: list[FakeReplica]

    def place(self, *replicas: FakeReplica) -> None:
        self.router.place({replica.name: replica.address for replica in replicas})

    def add(self, name: str, **fields: Any) -> FakeReplica:
        made = FakeReplica(name, **fields)
        self.loop.run(made.serve())
        self.replicas.append(made)
        return made

    def kill(self, replica: FakeReplica) -> None:
        self.loop.run(replica.kill())


@contextmanager
def service(count: int, terms: Terms | None = None, policy: Policy | None = None, **fields: Any) -> Iterator[Service]:
    """Replicas r0, r1, ... and a router that is attached to all; stops them at the end."""
    loop, directory = Loop(), FakeDirectory()

    async def make() -> Router:
        chosen = LeastLoaded() if policy is None else policy  # one without sessions yet is empty
        return Router(directory, chosen, terms or Terms("router", suspect_s=1.0), seed=3)

    router = loop.run(make())
    made = Service(loop, router, directory, [])
    try:
        for i in range(count):
            made.add(f"r{i}", **fields)
        made.place(*made.replicas)
        wait_for(lambda: len(router.replicas) == count)
        yield made
    finally:
        router.close()
        for replica in made.replicas:
            made.kill(replica)
        loop.close()


def wait_for(true: Any, timeout_s: float = 20.0) -> None:
    """Polls until `true()`; fails after `timeout_s`."""
    event = threading.Event()
    for _ in range(int(timeout_s / 0.002)):
        if true():
            return
        event.wait(0.002)
    raise AssertionError(f"not within {timeout_s} s")


@dataclass
class Client:
    """Receives the events of one request."""

    events: list[TokenEvent] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    n: int = 1

    def __call__(self, events: list[TokenEvent]) -> None:
        self.events += events
        self.batches.append(len(events))
        if sum(e.finish_reason is not None for e in self.events) == self.n:
            self.ended.set()

    def tokens(self, index: int = 0) -> list[int]:
        return [e.token_id for e in self.events if e.index == index and e.token_id is not None]

    def wait(self) -> Client:
        assert self.ended.wait(20), f"{len(self.events)} events, and no end"
        return self

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]


def request(id: str = "r", max_tokens: int = 50, n: int = 1, **fields: Any) -> Request:
    """A request with a seed."""
    return Request(id, (1, 2, 3), SamplingParams(max_tokens=max_tokens, n=n, seed=fields.pop("seed", 11)), **fields)


def submit(service: Service, asked: Request) -> Client:
    """Submits it and waits until a replica has it."""
    client = Client(n=asked.sampling.n)
    service.router.submit(asked, client).result(20)
    return client
