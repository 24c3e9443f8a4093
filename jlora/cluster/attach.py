"""The router's end of the link to one replica: attaches, reads, watches, and attaches again.

A stream ends with an error, or because it is silent for too long: a stopped process and a broken network send
nothing, and gRPC's own keepalive takes up to a minute to notice. Each attachment has a channel of its own, so that
none waits for a connection that is dead, and a larger epoch, so that the replica drops what an earlier one began.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from jlora.cluster import wire
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.requests import Broken
from jlora.cluster.view import Health, ReplicaView
from jlora.errors import FailedPrecondition
from jlora.gaps import Gaps
from jlora.ports import Clock
from jlora.replica import ReplicaInfo
from jlora.serve.client import Login

log = logging.getLogger(__name__)

HELLO_S = 5.0  # until a replica has answered the first message
PAUSES_S = (0.1, 2.0)  # before attaching again: it starts with the first, and doubles up to the last
LONGEST = 3.0  # a replica is lost if it is silent for so many times its longest pause of the last minute
BEAT_S = 1.0  # longest pause between two messages to a replica, which ends the requests of a silent router
# A replica that speaks and has read nothing new for so long hears nothing: a network may lose what goes one way. Long,
# because what it says has waited too if the router is behind.
DEAF_S = 5.0
COMPILING_S = 10.0  # of silence while a step compiles
LATE_S = 0.25  # if nothing ran for longer, this process stood still: the time is not the replica's silence
# A connection of its own for each channel, and at once.
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))
GIVEN_UP = "it was given up"
TLS = ("ssl", "handshake", "verification check")  # words by which gRPC reports a certificate that it rejects
EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a router attaches.

    Attributes:
        router: its name. Each router has its own, and another one after a restart.
        suspect_s: seconds of silence, at least, before a replica counts as hung.
        most_sends: messages that may wait for a replica which reads none.
        clock: of deadlines too (`Request.deadline`).
    """

    router: str
    login: Login = Login()
    suspect_s: float = 0.5
    most_sends: int = 16_384
    clock: Clock = time.monotonic


class Receiver(Protocol):
    """Receives what happens on a link. All methods run on the event loop, and must not block."""

    def check(self, attached: Attached) -> None:
        """A replica has answered; its `info` is known. Raises Broken if it may not be used: that ends the stream."""
        ...

    def begun(self, attached: Attached) -> None:
        """The replica takes requests from now on."""
        ...

    def received(self, attached: Attached, message: link.FromReplica) -> None:
        """A message after the first one. Raises Broken if it does not follow the protocol; that ends the stream."""
        ...

    def lost(self, attached: Attached, why: str) -> None:
        """The stream has ended: the replica is gone, or it ends this router's requests itself."""
        ...


@dataclass(slots=True)
class _Heard:
    """What one stream has told."""

    health: Health = "loading"
    state: link.State = field(default_factory=link.State)
    tiers: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    at: float = 0.0  # of the last message
    stepped: float = 0.0  # of the last message with a step
    gaps: Gaps = field(default_factory=Gaps)
    written: int = 1  # messages, the hello among them
    unread: tuple[int, float] | None = None  # the first that it is not known to have read, and since when

    def write(self, now: float) -> None:
        """One more message is on its way."""
        self.written += 1
        self.unread = self.unread or (self.written, now)

    def forgive(self, late: float) -> None:
        """The router itself stood still for so long."""
        self.at += late
        if self.unread:
            self.unread = self.unread[0], self.unread[1] + late

    def take(self, state: link.State, now: float) -> None:
        """A state, `now`."""
        steps = state.steps - self.state.steps
        if steps > 0:
            if self.stepped and state.running:
                mean = (now - self.stepped) / steps
                self.step_s += 0.2 * (mean - self.step_s) if self.step_s else mean
            self.stepped = now
        self.state = state
        self.health = "draining" if state.draining else "up"
        if not 0 < state.read < self.written:  # all of them, or it does not count
            self.unread = None
        elif self.unread and state.read >= self.unread[0]:
            self.unread = state.read + 1, now
        if state.adapters:  # views of before keep theirs
            self.tiers, self.ranks = dict(self.tiers), dict(self.ranks)
        for entry in state.adapters:
            if entry.tier:
                self.tiers[entry.key], self.ranks[entry.key] = entry.tier, entry.rank
            else:
                self.tiers.pop(entry.key, None)
                self.ranks.pop(entry.key, None)


class Attached:
    """The link to one replica, from `start` to `stop`. For the event loop's thread only."""

    def __init__(self, name: str, address: str, terms: Terms, receiver: Receiver):
        self.name = name
        self.address = address
        self.info: ReplicaInfo | None = None  # of the last attachment
        self.channel: grpc.aio.Channel | None = None  # while attached
        self._terms = terms
        self._receiver = receiver
        self._epoch = 0
        self._pause = PAUSES_S[0]
        self._said = ""  # to the log: why it cannot be used
        self._heard = _Heard()
        self._up = False  # the receiver was told that it is attached
        self._beaten = 0.0  # when the last empty message was sent
        self._ran = terms.clock()  # the last look or message
        self._sends: deque[link.ToReplica] = deque()
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stream: asyncio.Task[str] | None = None

    def start(self) -> None:
        """Attaches as soon as the replica answers, and whenever it does again."""
        self._task = asyncio.create_task(self._run(), name=f"link {self.name}")

    def stop(self, closing: bool = False) -> asyncio.Task[None]:
        """Ends the stream; the receiver hears at once that it is lost. What is left of it ends soon: await that.

        `closing`: because the router stops, and not because the replica is no longer of the service.
        """
        assert self._task is not None
        self._task.cancel()
        if closing:
            self._end("the router stops", "down", logging.INFO)
        else:
            self._end("it has left the service", "down")
        return self._task

    def send(self, message: link.ToReplica) -> None:
        """Sends a message of this attachment, soon and in order. Without one it goes nowhere."""
        if not self._up:
            return
        self._sends.append(message)
        self._more.set()
        if len(self._sends) > self._terms.most_sends:
            self.give_up("it reads nothing")

    def view(self) -> ReplicaView:
        """What its last message said."""
        heard = self._heard
        state = heard.state
        return ReplicaView(
            self.name,
            heard.health,
            running=state.running,
            waiting=state.waiting,
            free_blocks=state.free_blocks,
            blocks=state.blocks,
            host_blocks=state.host_blocks,
            tiers=heard.tiers,
            ranks=heard.ranks,
            step_s=heard.step_s,
            peer_bps=max(0.0, state.peer_bps),  # 0 for nan
            path_bps=max(0.0, state.path_bps),
        )

    @property
    def programs_left(self) -> int:
        """Shapes of steps that it still compiles, as its last message said; 0 while it is away."""
        return self._heard.state.programs_left if self._up else 0

    def look(self, now: float) -> None:
        """Gives the stream up if the replica was silent for too long, or its engine stands still.

        Otherwise it sends a heartbeat when one is due.

        Raises RuntimeError if nothing attaches it any more.
        """
        if self._task is not None and self._task.done():
            raise RuntimeError(f"the link to replica {self.name} has ended by itself")
        self._forgive(now)
        if not self._up:
            return
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            self.send(link.ToReplica())
        heard = self._heard
        silent, bound = now - heard.at, max(self._terms.suspect_s, LONGEST * heard.gaps.longest())
        if heard.state.compiling:
            bound = max(bound, COMPILING_S)
        patience = self.info.config.serve.heartbeat_s if self.info is not None else math.inf
        if silent > bound:
            self.give_up(f"no message for {silent:.2f} s")
        elif heard.unread and now - heard.unread[1] > max(DEAF_S, 2 * bound + BEAT_S):
            self.give_up(f"it has read no message for {now - heard.unread[1]:.2f} s")
        elif heard.state.age_s > patience and not heard.state.compiling:
            self.give_up(f"its engine has stood for {heard.state.age_s:.1f} s")

    def _forgive(self, now: float) -> None:
        """Time in which this process did not run is no silence of the replica's, whatever runs first after it."""
        late, self._ran = now - self._ran, now
        if late > LATE_S:
            self._heard.forgive(late)

    async def _run(self) -> None:
        try:
            while True:
                self._stream = asyncio.create_task(self._attach(), name=f"stream {self.name}")
                await asyncio.wait((self._stream,))
                why = _why(self._stream)
                if not self._up and why not in (self._said, GIVEN_UP) and not _starts(why):
                    log.warning("replica %s at %s cannot be used: %s", self.name, self.address, why)
                    self._said = why
                self._end(why, "down")
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, PAUSES_S[1])
        finally:
            if self._stream is not None:
                self._stream.cancel()
                await asyncio.wait((self._stream,))

    async def _attach(self) -> str:
        """One attachment; why it has ended."""
        async with self._terms.login.aio(self.address, OPTIONS) as channel:
            call: Any = rpc.LinkStub(channel).Attach(metadata=self._terms.login.metadata)
            # Also beyond those of an earlier link of this router to the address. The clock of the wall may go back.
            self._epoch = max(self._epoch + 1, int(1e9 * self._terms.clock()))
            hello = link.Hello(router=self._terms.router, epoch=self._epoch, protocol=wire.PROTOCOL, beat_s=BEAT_S)
            hello.replica = self.name
            async with asyncio.timeout(HELLO_S):
                await call.write(link.ToReplica(hello=hello))
                first = await call.read()
            if first is EOF or not first.HasField("hello"):
                raise Broken("the stream does not begin with its hello")
            wire.check_protocol(first.hello.protocol, f"replica {self.name}")
            self.info = wire.info(first.hello.info)
            self._begin(channel, first)
            writing = asyncio.create_task(self._write(call))
            try:
                while (message := await call.read()) is not EOF:
                    self._hear(message)
            finally:
                writing.cancel()
        return "the replica has ended the stream"

    def _begin(self, channel: grpc.aio.Channel, first: link.FromReplica) -> None:
        self._receiver.check(self)  # before it counts as attached
        now = self._terms.clock()
        self._sends.clear()
        self._ran = now
        self._heard = _Heard(health="up", at=now, gaps=Gaps(self._terms.clock))
        self._heard.take(first.state, now)
        self.channel, self._up = channel, True
        log.info("replica %s at %s is attached", self.name, self.address)
        self._receiver.begun(self)

    def _hear(self, message: link.FromReplica) -> None:
        if not self._up:  # it has been given up meanwhile
            return
        now, heard = self._terms.clock(), self._heard
        self._forgive(now)
        heard.gaps.note(now - heard.at)
        heard.at = now
        if message.HasField("state"):
            heard.take(message.state, now)
        self._receiver.received(self, message)
        if heard.unread is None:  # not before: one that cannot be used, or hears nothing, is left in peace
            self._pause = PAUSES_S[0]

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                while self._sends:
                    self._heard.write(self._terms.clock())
                    await call.write(self._sends.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns why

    @property
    def draining(self) -> bool:
        """Whether its last message said so."""
        return self._heard.state.draining

    def give_up(self, why: str) -> None:
        """Ends the stream now: its requests go on elsewhere before it has been closed."""
        self._end(why, "suspect")
        if self._stream is not None:
            self._stream.cancel()

    def _end(self, why: str, health: Health, level: int = logging.WARNING) -> None:
        self._heard.health, self.channel = health, None
        if self._up:
            self._up = False
            self._said = why
            log.log(level, "replica %s at %s is lost: %s", self.name, self.address, why)
            self._receiver.lost(self, why)


def _starts(why: str) -> bool:
    """Whether nobody answers yet, as while a replica starts."""
    return why.startswith("UNAVAILABLE") and not any(word in why.lower() for word in TLS)


def _why(ended: asyncio.Task[str]) -> str:
    """Why a stream has ended; a bug of ours is logged."""
    if ended.cancelled():
        return GIVEN_UP
    error = ended.exception()
    if error is None:
        return ended.result()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    if isinstance(error, TimeoutError):
        return f"no hello within {HELLO_S:g} s"
    if not isinstance(error, Broken | FailedPrecondition | ValueError):
        log.error("the link has failed", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return str(error)
