"""The replica's end of a link: the requests of one router come in on a stream, and all their tokens go out on it.

The engine's thread puts a step's events into one buffer of the stream, then wakes the event loop, which takes
whatever has come and sends it as one message: a step's tokens, and the state behind it. A replica that drains,
stops or fails gives its requests up: the router goes on with them elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from jlora.adapters.registry import Record
from jlora.cluster import wire
from jlora.cluster.fetches import Fetches, PathsAlone
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.secret import Secret
from jlora.cluster.tiers import Records, Tiers
from jlora.engine.futures import result_of
from jlora.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    JloraError,
    NotFound,
    ResourceExhausted,
    ShortOfMemory,
    Unavailable,
)
from jlora.replica import Replica, ReplicaState
from jlora.serve.backend import Backend
from jlora.serve.status import opaque, status_of
from jlora.types import Request, TokenEvent
from jlora.validation import validate

log = logging.getLogger(__name__)

IDLE_S = 0.1  # longest pause between two messages of an idle replica
HELLO_S = 10.0  # until a router has said who it is
BEATS = 10  # heartbeats that a router may miss before it counts as gone
LOOK_S = 0.5  # between two checks of that
MOST = 1 << 16  # batches of events that a router may leave unread
SLICE = 2048  # batches of events in one message
SCORES = 64  # a thread converts events with more log-probabilities of a prompt, the event loop all others
MOST_SCORES = 1 << 16  # a message with more takes no further event: each has up to 250 bytes, and gRPC has a limit
EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]

# Makes an adapter version known to this replica.
Adopt = Callable[[link.Version], Awaitable[None]]
# What the engine's thread tells: events of a request, that it is queued (None), or why it is not.
Told = list[TokenEvent] | Exception | None


@dataclass(slots=True, eq=False)
class _Live:
    """A request of a stream, from its `Start` to its last event."""

    rid: int
    request: Request
    version: link.Version | None  # of its adapter, as long as it may have to be adopted
    positions: list[int]  # of each completion's next token
    open: int
    handle: int | None = None  # the replica's, once it is queued
    gone: bool = False  # nobody waits for it any more
    moved: bool = False  # because another replica serves it
    record: Record | None = None  # of its adapter, until the router has been told the digest
    stops: list[link.Stop] = field(default_factory=list)  # that wait until it is queued


class LinkServicer(rpc.LinkServicer):
    """Serves `jlora.cluster.v1.Link` over a backend. For one event loop."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        secret: Secret,
        adopt: Adopt | None = None,
        records: Records = lambda: (),
        fetches: Fetches | None = None,
    ):
        """`name` is the replica's, whose adapters `records` are.

        `adopt` brings in a version that it does not know; None: from its path.
        """
        self._records = records
        self._fetches = fetches or PathsAlone()
        self._backend = backend
        self._name = name
        self._secret = secret
        self._adopt = adopt or self._register
        self._adopting: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, Stream] = {}  # by router

    async def Attach(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        del request_iterator  # the stream reads through the context
        await self._secret.check(context)
        stream = None
        try:
            stream = self._stream(await _hello(context), context)
            await stream.run(link.HelloBack(replica=self._name, protocol=wire.PROTOCOL, info=stream.info))
        except JloraError as e:
            code, details = status_of(e, "Link/Attach")
            await context.abort(code, details)
        finally:
            if stream is not None:
                stream.end()
                if self._streams.get(stream.router) is stream:
                    del self._streams[stream.router]

    def _stream(self, hello: link.Hello, context: grpc.aio.ServicerContext) -> Stream:
        """The router's stream from now on; an earlier one ends. Raises FailedPrecondition, Unavailable."""
        if not hello.router:
            raise InvalidArgument("hello: router is empty, must be the router's name")
        wire.check_protocol(hello.protocol, f"router {hello.router[:64]}")
        stream = Stream(hello, self._backend, context, self._adopted, self._records, self._fetches)
        earlier = self._streams.get(hello.router)
        if earlier is not None:
            if earlier.called and hello.replica not in ("", earlier.called):  # one would end the other, for ever
                raise FailedPrecondition(f"hello: the router has attached to this replica as {earlier.called[:64]}")
            if earlier.epoch >= hello.epoch:
                raise FailedPrecondition(f"hello: epoch = {hello.epoch}: the router has attached with {earlier.epoch}")
            earlier.end()
        self._streams[hello.router] = stream
        return stream

    async def _adopted(self, version: link.Version) -> None:
        """Returns when the version is known. Requests that want it at the same time share one attempt."""
        task = self._adopting.get(version.key)
        if task is None:
            task = self._adopting[version.key] = asyncio.create_task(self._call_adopt(version))
            task.add_done_callback(partial(self._has_adopted, version.key))
        await asyncio.shield(task)

    def _has_adopted(self, key: str, task: asyncio.Task[None]) -> None:
        """All requests that wanted it may have gone: then only the log hears of an error."""
        del self._adopting[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("adapter %s is not adopted: %s", key, error)

    async def _call_adopt(self, version: link.Version) -> None:
        try:
            await self._adopt(version)
        except AlreadyExists:
            log.debug("adapter %s is known already", version.key)

    async def _register(self, version: link.Version) -> None:
        """By its path: the engine reads it when its first request runs."""
        await asyncio.wrap_future(self._backend.loaded.load_adapter(version.key, version.path, lazy=True))


async def _hello(context: grpc.aio.ServicerContext) -> link.Hello:
    try:
        async with asyncio.timeout(HELLO_S):
            first = await context.read()
    except TimeoutError:
        raise InvalidArgument(f"hello: has not come within {HELLO_S:g} s") from None
    if first is EOF or not first.HasField("hello"):
        raise InvalidArgument("hello: must be the first message")
    return first.hello


class Stream:
    """One router's stream. `_put` and `_submitted` run on the engine's thread, all else on the event loop's."""

    def __init__(
        self,
        hello: link.Hello,
        backend: Backend,
        context: grpc.aio.ServicerContext,
        adopted: Adopt,
        records: Records,
        fetches: Fetches,
    ):
        self.router, self.epoch, self.called = hello.router, hello.epoch, hello.replica
        self._replica: Replica = backend.loaded
        self.info = wire.info_bytes(self._replica.info)
        self._backend = backend
        self._context = context
        self._adopted = adopted
        self._fetches = fetches
        self._live: dict[int, _Live] = {}
        self._told: deque[tuple[_Live, Told]] = deque()
        self._refused: list[link.Failure] = []
        self._loop = asyncio.get_running_loop()
        self._tiers = Tiers(records, self._loop.time)
        self._wake = asyncio.Event()
        self._woken = False  # a wake-up is under way
        self._over = False
        self._patience: asyncio.Timeout | None = None  # of the write under way
        self._numbers = 0  # states made
        self._read_count = 1  # messages read, the hello among them
        self._state: ReplicaState | None = None
        self._replica.state().add_done_callback(self._see)
        self._tasks: set[asyncio.Task[None]] = set()
        self._silence_s = BEATS * hello.beat_s if hello.beat_s > 0 else math.inf
        self._heard = self._looked = self._loop.time()

    async def run(self, hello: link.HelloBack) -> None:
        """Talks to the router until either side ends the stream."""
        await self._write(link.FromReplica(hello=hello))
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._wake.set())
        self._look()
        try:
            while not (self._over or reading.done()):
                idle = await self._idle()
                if idle or self._told or self._refused:
                    await self._write(await self._message(idle))
            if reading.done():
                reading.result()
        finally:
            reading.cancel()

    async def _idle(self) -> bool:
        """Waits until there is something to send. True after a pause: an idle message says that the process lives."""
        if self._told:  # more than one message held
            return False
        try:
            async with asyncio.timeout(IDLE_S):
                await self._wake.wait()
        except TimeoutError:
            return True
        self._wake.clear()
        self._woken = False
        return False

    def _look(self) -> None:
        """Ends what the stream began if the router is silent: no connection closes when its machine is gone.

        Time in which this process stood still does not count.
        """
        now = self._loop.time()
        late, self._looked = now - self._looked, now
        if late > 2 * LOOK_S:
            self._heard += late
        if self._over:
            return
        if now - self._heard > self._silence_s:
            log.warning("router %s has said nothing for %.1f s: its requests end", self.router, now - self._heard)
            self.end()
        else:
            self._loop.call_later(LOOK_S, self._look)

    def end(self) -> None:
        """Ends what the stream began, and the stream."""
        self._over = True
        for live in list(self._live.values()):
            self._give_up(live)
        for task in self._tasks:
            task.cancel()
        self._told.clear()
        self._wake.set()

    async def _write(self, message: link.FromReplica) -> None:
        stall_s = self._replica.info.config.serve.stall_s
        try:
            async with asyncio.timeout(stall_s) as self._patience:
                self._check_unread()
                await self._context.write(message)
        except TimeoutError:
            self._check_unread()
            raise ResourceExhausted(f"the router has read nothing for serve.stall_s = {stall_s:g} s") from None
        finally:
            self._patience = None

    def _check_unread(self) -> None:
        if len(self._told) > MOST:
            raise ResourceExhausted(f"the router has left more than {MOST} messages of the engine unread")

    def _overflow(self) -> None:
        """The write under way, if there is one, takes too long."""
        if self._patience is not None and len(self._told) > MOST:
            self._patience.reschedule(self._loop.time())

    # -- from the router ----------------------------------------------------------------------

    async def _read(self) -> None:
        while (message := await self._context.read()) is not EOF:
            self._heard = self._loop.time()
            self._read_count += 1
            match message.WhichOneof("what"):
                case "start":
                    self._start(message.start)
                case "fetch":
                    self._keep(self._fetch(message.fetch))
                case "cancel":
                    if (live := self._live.get(message.cancel.rid)) is not None:
                        self._give_up(live, message.cancel.moved)
                case "stop":
                    if (live := self._live.get(message.stop.rid)) is not None:
                        live.stops.append(message.stop)
                        self._stop(live)

    def _start(self, start: link.Start) -> None:
        if start.rid in self._live:
            raise InvalidArgument(f"start: rid = {start.rid} is in use")
        try:
            if self._backend.draining:
                raise Unavailable("the replica drains")
            draft = wire.request(start, f"{start.rid}@{self.router}.{self.epoch}"[:256], self._loop.time())
            request = validate(draft, self._replica.info.limits)
        except Exception as e:  # one request's fault, whatever it is
            self._refuse(start.rid, e)
            return
        positions = [len(done.tokens) for done in request.done] or [0] * request.sampling.n
        version = start.adapter if start.HasField("adapter") else None
        if version is not None:
            self._fetches.heard(version)
        live = self._live[start.rid] = _Live(start.rid, request, version, positions, len(request.open))
        self._submit(live)

    def _submit(self, live: _Live) -> None:
        submitted = self._replica.submit(live.request, partial(self._put, live))
        submitted.add_done_callback(partial(self._submitted, live))

    def _stop(self, live: _Live) -> None:
        """Passes stops on; one for what an earlier attempt has delivered may come before the request is queued."""
        while live.handle is not None and live.stops:
            stop = live.stops.pop()
            self._replica.stop(live.handle, stop.index, stop.outputs)

    def _give_up(self, live: _Live, moved: bool = False) -> None:
        """Nobody waits for the request any more. Its submission may be under way: `_submitted` looks."""
        live.gone, live.moved = True, moved
        self._live.pop(live.rid, None)
        if live.handle is not None:
            self._replica.abort(live.handle, moved)

    def _refuse(self, rid: int, error: Exception) -> None:
        """The request has ended with an error, or never begun. Another replica may serve what this one cannot now."""
        if isinstance(error, MemoryError):
            error = ShortOfMemory("the replica has too little memory now; try again later")
        if not isinstance(error, JloraError):
            error = RuntimeError(opaque(error, "Link/Attach"))
        self._refused.append(wire.failure(rid, error, elsewhere=isinstance(error, Unavailable)))
        self._wake.set()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside the stream, and ends with it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, fetch: link.Fetch) -> None:
        """Brings an adapter version in. Whatever fails, its first request will tell."""
        hint = Request(fetch.adapter.key, tuple(fetch.prompt), adapter=fetch.adapter.key)
        self._fetches.heard(fetch.adapter)
        try:
            try:
                await asyncio.wrap_future(self._replica.prefetch(hint))
            except NotFound:
                await self._adopted(fetch.adapter)
                await asyncio.wrap_future(self._replica.prefetch(hint))
        except JloraError as e:
            log.debug("adapter %s does not come ahead: %s", hint.adapter, e)

    async def _adopt(self, live: _Live, version: link.Version) -> None:
        """Makes the adapter's version known, then submits the request again."""
        try:
            await self._adopted(version)
        except Exception as e:
            if self._live.pop(live.rid, None) is not None:
                self._refuse(live.rid, e)
        else:
            if not live.gone:
                self._submit(live)

    # -- from the engine's thread ---------------------------------------------------------------

    def _put(self, live: _Live, events: list[TokenEvent]) -> None:
        if not live.gone:
            self._tell(live, events)

    def _submitted(self, live: _Live, submitted: Future[int]) -> None:
        try:
            live.handle = result_of(submitted)
        except Exception as e:
            self._tell(live, e)
            return
        if live.gone:
            self._replica.abort(live.handle, live.moved)
        self._tell(live, None)

    def _tell(self, live: _Live, what: Told) -> None:
        self._told.append((live, what))
        if len(self._told) == MOST + 1 and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._overflow)
        if not self._woken:  # a snapshot comes when the step's other events are here, too
            self._woken = True
            self._replica.state().add_done_callback(self._stepped)

    def _stepped(self, asked: Future[ReplicaState]) -> None:
        self._see(asked)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _see(self, asked: Future[ReplicaState]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._state = asked.result()

    # -- to the router --------------------------------------------------------------------------

    async def _message(self, idle: bool) -> link.FromReplica:
        """What has come since the last one, as far as one message holds it."""
        message, scored = link.FromReplica(), 0
        for live, what in self._take():
            if live.gone:
                continue
            if what is None:
                live.version, live.record = None, self._tiers.record(live.request.adapter)
                self._stop(live)
                message.begun.append(live.rid)
            elif isinstance(what, Exception):
                self._not_begun(live, what)
            else:
                await self._tokens(message, live, what)
                scored += sum(len(event.prompt_logprobs or ()) for event in what)
            if scored > MOST_SCORES:
                break
        if self._backend.draining:
            for live in list(self._live.values()):
                self._give_up(live)
                self._refuse(live.rid, Unavailable("the replica drains"))
        message.failures.extend(self._refused)
        self._refused.clear()
        message.state.CopyFrom(self._now(idle))  # last: `_converted` may have sent states meanwhile
        return message

    def _take(self) -> Iterator[tuple[_Live, Told]]:
        for _ in range(SLICE):
            if not self._told:  # also if the stream has ended meanwhile
                return
            yield self._told.popleft()

    def _not_begun(self, live: _Live, error: Exception) -> None:
        version, live.version = live.version, None  # it is adopted once
        if isinstance(error, NotFound) and version is not None:
            self._keep(self._adopt(live, version))
            return
        del self._live[live.rid]
        self._refuse(live.rid, error)

    async def _tokens(self, message: link.FromReplica, live: _Live, events: list[TokenEvent]) -> None:
        for event in events:
            if event.error is not None:
                self._live.pop(live.rid, None)
                live.gone = True
                self._refuse(live.rid, event.error)
                return
            position = live.positions[event.index]
            if event.prompt_logprobs is not None and len(event.prompt_logprobs) > SCORES:
                message.tokens.append(await self._converted(asyncio.to_thread(wire.token, live.rid, position, event)))
            else:
                message.tokens.append(wire.token(live.rid, position, event))
            if live.record is not None:
                message.tokens[-1].digest, live.record = live.record.digest, None
            live.positions[event.index] += event.token_id is not None
            live.open -= event.finish_reason is not None
        if not live.open:
            self._live.pop(live.rid, None)

    async def _converted(self, working: Awaitable[link.Token]) -> link.Token:
        """What takes a while. The router hears meanwhile that this process lives: it would take the requests away."""
        work = asyncio.ensure_future(working)
        while not (await asyncio.wait({work}, timeout=IDLE_S))[0]:
            await self._write(link.FromReplica(state=self._now(idle=True)))
        return work.result()

    def _now(self, idle: bool) -> link.State:
        """The replica as its last snapshot shows it. A step under way does not hold it up."""
        if idle:
            self._replica.state().add_done_callback(self._see)  # most likely it is there for the next message
        self._numbers += 1
        replica = self._replica
        state = link.State(
            number=self._numbers,
            read=self._read_count,
            draining=self._backend.draining,
            compiling=replica.compiling,
            age_s=replica.heartbeat_age(),
        )
        if self._state is not None:
            stats, cache = self._state.stats, self._state.cache
            state.steps, state.running, state.waiting = stats.steps, stats.running, stats.waiting
            state.programs_left = stats.programs_left
            state.free_blocks, state.blocks, state.host_blocks = cache.hbm.free, cache.hbm.total, cache.host.total
        state.adapters.extend(self._tiers.changes())
        state.peer_bps, state.path_bps = self._fetches.rates
        return state
