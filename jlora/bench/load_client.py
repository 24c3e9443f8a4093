"""Replays a trace against a running gRPC server, from one asyncio client.

Turns go when `Script` says that they are due, open loop or closed, each as a stream of its own; what
a session asks next holds the answer that the server really gave. Times count from when a turn was
*due*, so a client or a server that falls behind cannot hide it. Nothing is retried: a request that
fails is kept with its status, and its session goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.sim.script import HISTORY, Script
from jlora.sim.trace import Trace, Turn

HISTORY_AT_ONCE = 16  # turns of the history under way together
OK = "OK"
INCOMPLETE = "INCOMPLETE"  # no gRPC status: the stream ended well, with another number of tokens than asked for


@dataclass(slots=True)
class Call:
    """One request as it went. Times are seconds from the start of the replay.

    Attributes:
        due: when the trace wanted it; sent: when the client got to it.
        first, last: its first and last token; NaN if there was none.
        status: name of the gRPC status code, or `INCOMPLETE`; detail: what went wrong, if something did.
        usage, timing: as the server says.
    """

    turn: Turn
    model: str
    due: float
    sent: float
    first: float = math.nan
    last: float = math.nan
    ended: float = math.nan
    tokens: list[int] = field(default_factory=list)
    status: str = OK
    detail: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    timing: pb.Timing = field(default_factory=pb.Timing)

    @property
    def ok(self) -> bool:
        """Whether all of its answer came."""
        return self.status == OK

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token."""
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """Mean seconds between its later tokens; NaN if there is only one."""
        later = len(self.tokens) - 1
        return (self.last - self.first) / later if later > 0 else math.nan

    @property
    def latency(self) -> float:
        """Seconds from when it was due to its end."""
        return self.ended - self.due


@dataclass(frozen=True, slots=True)
class Pace:
    """How a trace is played: so many times as fast, each request at most `timeout_s` long."""

    speed: float = 1.0
    timeout_s: float = 600.0


class Client:
    """One pass of a trace over one channel.

    Args:
        models: the server's name for each adapter of the trace.
    """

    def __init__(self, stub: rpc.InferenceStub, trace: Trace, models: Sequence[str], pace: Pace):
        self._stub = stub
        self._models = models
        self._pace = pace
        self._script = Script(trace.turns, pace.speed)
        self._calls: list[Call] = []
        self._start = 0.0
        self._live = 0
        self._woken = asyncio.Event()  # an answer came: more may be due

    async def run(self, tick: Callable[[], object] = lambda: None) -> list[Call]:
        """Computes the history, then plays; returns the calls of the trace proper as they ended.

        `tick` is called after each of them.

        Raises:
            RuntimeError: the history could not be computed.
        """
        await self._history()
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while len(self._script) or self._live:
                self._woken.clear()
                for due, turn in self._script.take(self._now()):
                    self._live += 1
                    group.create_task(self._play(due, turn, tick))
                await self._until_due()
        return self._calls

    async def _until_due(self) -> None:
        """Waits for the next due time or the next answer."""
        due = self._script.next_due()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(due - self._now(), 0.0)):
                await self._woken.wait()

    async def _play(self, due: float, turn: Turn, tick: Callable[[], object]) -> None:
        """One turn of the trace proper."""
        call = await self._ask(turn, due)
        self._calls.append(call)
        self._script.answered(turn, call.tokens, call.ended)
        tick()
        self._live -= 1
        self._woken.set()

    async def _history(self) -> None:
        """What was said before time 0, as fast as it goes and in its order."""
        while past := [turn for _, turn in self._script.take(HISTORY)]:
            for begin in range(0, len(past), HISTORY_AT_ONCE):
                part = past[begin : begin + HISTORY_AT_ONCE]
                calls = await asyncio.gather(*(self._ask(turn, 0.0) for turn in part))
                for call in calls:
                    if not call.ok:
                        raise RuntimeError(f"the trace's history failed: {call.status}: {call.detail}")
                    self._script.answered(call.turn, call.tokens, 2 * HISTORY)

    async def _ask(self, turn: Turn, due: float) -> Call:
        model = "" if turn.adapter is None else self._models[turn.adapter]
        request = pb.GenerateRequest(
            model=model,
            token_ids=pb.TokenIds(ids=self._script.prompt(turn)),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=turn.output, ignore_eos=True),
        )
        call = Call(turn, model, due, self._now())
        try:
            async for delta in self._stub.GenerateStream(request, timeout=self._pace.timeout_s):
                self._take(call, delta)
            if len(call.tokens) != turn.output:
                call.status, call.detail = INCOMPLETE, f"{len(call.tokens)} of {turn.output} tokens came"
        except grpc.aio.AioRpcError as e:
            call.status, call.detail = e.code().name, (e.details() or "").partition("\n")[0]
        call.ended = self._now()
        return call

    def _take(self, call: Call, delta: pb.GenerateResponse) -> None:
        now = self._now()
        for output in delta.outputs:
            if output.token_ids:
                call.first = now if math.isnan(call.first) else call.first
                call.last = now
                call.tokens += output.token_ids
        if delta.HasField("usage"):
            call.usage.CopyFrom(delta.usage)
            call.timing.CopyFrom(delta.timing)

    def _now(self) -> float:
        return time.perf_counter() - self._start


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself: what a trace must fit, and what goes into the results.

    Attributes:
        adapters: their names in order, each with its pool blocks.
        activated: those that a prompt must invoke (activated LoRAs).
    """

    address: str
    info: pb.ServerInfo
    adapters: Mapping[str, int]
    activated: frozenset[str] = frozenset()

    def describe(self) -> Mapping[str, object]:
        """Plain values for a results file."""
        names = ("version", "model", "platform", "tp", "dtype", "max_model_len", "block_tokens", "blocks")
        plain = {name: getattr(self.info, name) for name in names}
        return {**plain, "devices": list(self.info.devices), "config": dict(self.info.config)}


async def look(address: str, timeout_s: float = 10.0) -> Server:
    """Asks a server what it serves.

    Raises:
        RuntimeError: nothing answers there.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            info = await rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)
            listed = await rpc.AdaptersStub(channel).ListAdapters(pb.ListAdaptersRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as e:
            raise RuntimeError(f"no jlora server at {address}: {e.code().name}: {e.details()}") from e
    activated = frozenset(adapter.name for adapter in listed.adapters if adapter.alora_invocation_tokens)
    return Server(address, info, {adapter.name: adapter.blocks for adapter in listed.adapters}, activated)
