"""A router: many replicas as one `jlora.replica.Replica`, so that every front stands on it unchanged.

What a command means at a router:

requests    go to one replica and on to others (`dispatch`); ids, the queue's bound and seeds are the router's own
adapters    are those of the service: the directory answers
state       sums over the replicas that answer within `ASK_S`, and what waits here; counters since the router hears them
owners      KV by adapter, summed as the state is; cells are a replica's own, and its own page shows them
flush_cache all replicas; the blocks freed are summed
profile     all replicas at once, or the one that is named; the answer says what each has written
drain       waits for the router's own requests; the replicas go on
heartbeat   how long no replica has been up

Several routers may share the replicas. Each has its own requests, and the replicas end them when its links close.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import grpc

from jlora.cluster import merged, wire
from jlora.cluster.attach import Attached, Terms
from jlora.cluster.balancing import Balancing
from jlora.cluster.directory import Directory
from jlora.cluster.dispatch import Dispatcher
from jlora.cluster.prompts import ask_of
from jlora.cluster.routing.policy import Policy
from jlora.cluster.routing.ways import Ways
from jlora.engine.futures import done, failed, running, settle
from jlora.errors import AlreadyExists, FailedPrecondition, NotFound, Unavailable
from jlora.replica import Load, Replica, ReplicaInfo, ReplicaState, RouterStats, Sink
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.types import AdapterInfo, Owners, PrefetchResult, ProfileResult, Request

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.05  # between two looks: far less than `attach.LATE_S`, after which a pause is this process's own
ASK_S = 2.0  # for a replica's state
PROFILE_S = 90.0  # for a trace, whose longest is 60 s
CLOSE_S = 5.0  # for the links to close
# How a call to a replica fails; one whose link is given up meanwhile is cancelled with its channel.
LOST = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError)


class Router(Replica):
    """Create it on the event loop that runs its links; any thread may call the methods of `Replica`."""

    def __init__(
        self, directory: Directory, policy: Policy, terms: Terms, seed: int | str = 0, balance_s: float = 0.0,
        ways: Ways | None = None,
    ):  # fmt: skip
        """`balance_s`: between two plans of moves, 0 for none. `ways`: how long adapters take to reach a device."""
        self._loop = asyncio.get_running_loop()
        self._directory = directory
        self._terms = terms
        self._dispatcher = Dispatcher(directory, policy, terms, random.Random(seed))
        directory.follow(self._dispatcher.members)
        self._counted = merged.Counted(terms.clock())
        self._draining = self._closed = False
        self._failure: Future[BaseException] = running()
        self._drains: list[Future[bool]] = []
        self._ready = asyncio.Event()
        self.balancing = Balancing(self._dispatcher, balance_s, ways=ways)
        self._tasks = [self._start("router", self._tick())]
        if balance_s:
            self._tasks.append(self._start("balance", self.balancing.run()))

    # -- the service ------------------------------------------------------------------------------

    def place(self, addresses: Mapping[str, str]) -> None:
        """The addresses of the replicas from now on, by name. Any thread may call; it returns at once."""
        self._post(lambda: None if self._closed else self._dispatcher.place(dict(addresses)))

    async def ready(self, rest_s: float = 0.0) -> None:
        """Waits until a replica is attached for the first time; then at most `rest_s` for the others."""
        await self._ready.wait()
        until = self._terms.clock() + rest_s
        while len(self.replicas) < len(self._dispatcher.links) and self._terms.clock() < until:
            await asyncio.sleep(TICK_S)

    @property
    def replicas(self) -> list[Attached]:
        """The replicas that are attached now. For the event loop's thread."""
        return self._dispatcher.attached

    @property
    def info(self) -> ReplicaInfo:
        info = self._dispatcher.info
        if info is None:
            raise Unavailable("no replica has been attached yet")
        return info

    # -- requests ---------------------------------------------------------------------------------

    def check(self, request: Request) -> Future[None]:
        def look() -> None:
            self._dispatcher.version(request)

        return self._call(look)

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        dispatcher, name = self._dispatcher, (request.tenant, request.id)
        submitted: Future[int] = Future()
        if dispatcher.names.setdefault(name, submitted) is not submitted:
            return failed(AlreadyExists(f"request_id {request.id!r} is in use by a live request"))

        def admit() -> None:
            try:
                if self._draining:
                    raise Unavailable("the server is draining and takes no new requests")
                if submitted.cancelled():
                    raise Unavailable("its caller has gone")
                dispatcher.admit(request, sink, submitted)
            except Exception as e:
                dispatcher.names.pop(name, None)
                if submitted.set_running_or_notify_cancel():
                    submitted.set_exception(e)

        def answered(ended: Future[int]) -> None:
            if ended.cancelled():
                self._post(lambda: dispatcher.abort_named(name, submitted))

        self._post(admit)
        submitted.add_done_callback(answered)
        return submitted

    def abort(self, handle: int, moved: bool = False) -> Future[bool]:
        return self._call(lambda: self._dispatcher.abort(handle))

    def abort_named(self, request_id: str, tenant: str = "") -> Future[bool]:
        live = self._dispatcher.names.get((tenant, request_id))
        if live is not None:  # its submission, if it has not run, runs first
            self._post(lambda: self._dispatcher.abort_named((tenant, request_id), live))
        return done(live is not None)

    def stop(self, handle: int, index: int, outputs: int) -> Future[None]:
        return self._call(lambda: self._dispatcher.stop(handle, index, outputs))

    def prefetch(self, request: Request) -> Future[PrefetchResult]:
        return self._run(self._prefetch(request))

    async def _prefetch(self, request: Request) -> PrefetchResult:
        """Hints the replica that would have the request now. One that does not know the adapter yet does nothing."""
        dispatcher, prompts = self._dispatcher, self._dispatcher.prompts
        version = dispatcher.version(request)
        cached = prompts.cached(prompts.chain(request, version))
        chosen = dispatcher.choice.peek(ask_of(request, version, cached, dispatcher.pace.outputs))
        if chosen is None or chosen.channel is None:
            return PrefetchResult(False, 0, 0)
        message = wire.generate(request)
        message.model = "" if version is None else version.key
        try:
            call = rpc.InferenceStub(chosen.channel).Prefetch
            told = await call(message, timeout=ASK_S, metadata=self._terms.login.metadata)
        except LOST as e:
            log.debug("prefetch at %s: %s", chosen.name, _why(e))
            return PrefetchResult(False, 0, 0)
        return PrefetchResult(told.adapter_resident, told.cached_tokens, told.coming_bytes)

    # -- adapters ---------------------------------------------------------------------------------

    def load_adapter(
        self, name: str, path: str, pinned: bool = False, replace: bool = False, lazy: bool = False
    ) -> Future[AdapterInfo]:
        return self._directory.load(Load(name, path, pinned, replace, lazy))

    def unload_adapter(self, name: str) -> Future[AdapterInfo]:
        return self._directory.unload(name)

    def pin_adapter(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        return self._directory.pin(name, pinned)

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        return self._directory.adapters(after, most)

    def adapter(self, name: str) -> Future[AdapterInfo]:
        return self._directory.adapter(name)

    def check_adapter(self, name: str) -> None:
        self._directory.current(name)

    # -- all replicas -----------------------------------------------------------------------------

    def state(self) -> Future[ReplicaState]:
        return self._run(self._state())

    async def _state(self) -> ReplicaState:
        async def look(channel: grpc.aio.Channel) -> merged.Told:
            control: Any = rpc.ControlStub(channel)
            how = {"timeout": ASK_S, "metadata": self._terms.login.metadata}
            return await asyncio.gather(
                control.GetServerInfo(pb.GetServerInfoRequest(), **how),
                control.GetCacheState(pb.GetCacheStateRequest(), **how),
            )

        asked = self._terms.clock()
        told = await self._each(look)
        view, links = self._dispatcher.books.view, self._dispatcher.links.values()
        members = [merged.member(one, view[one.name]) for one in links]
        moves = self.balancing
        stats = RouterStats(
            moves.moved, self._dispatcher.resumed, self._directory.fetches, moves.solve_s, moves.candidates
        )
        self._counted.hear(told, asked, self._terms.clock())
        waiting = [routed.open for routed in self._dispatcher.table.waiting()]
        policy = self.info.config.cache.policy
        return merged.state(list(told.values()), members, policy, stats, self._counted, waiting)

    def owners(self) -> Future[Owners]:
        return self._run(self._owners())

    async def _owners(self) -> Owners:
        how = {"timeout": ASK_S, "metadata": self._terms.login.metadata}

        async def look(channel: grpc.aio.Channel) -> merged.Owned:
            asked = pb.GetCacheStateRequest(with_kv=True)
            cache = await rpc.ControlStub(channel).GetCacheState(asked, **how)
            keys: dict[int, str] = {}
            token = "" if cache.kv else None
            while token is not None:
                page = pb.ListAdaptersRequest(page_token=token, view=pb.ListAdaptersRequest.SUMMARY)
                told = await rpc.AdaptersStub(channel).ListAdapters(page, **how)
                keys |= {info.uid: info.name for info in told.adapters}
                token = told.next_page_token or None
            return cache, keys

        attached = len(self.replicas)
        return merged.owners(list((await self._each(look)).values()), attached)

    def flush_cache(self) -> Future[int]:
        return self._run(self._flush())

    async def _flush(self) -> int:
        metadata = self._terms.login.metadata
        message = pb.FlushCacheRequest()
        told = await self._each(lambda c: rpc.ControlStub(c).FlushCache(message, timeout=ASK_S, metadata=metadata))
        return sum(answer.blocks for answer in told.values())

    def profile(self, steps: int, replica: str = "") -> Future[ProfileResult]:
        return self._run(self._profile(steps, replica))

    async def _profile(self, steps: int, replica: str) -> ProfileResult:
        metadata, message = self._terms.login.metadata, pb.ProfileRequest(steps=steps)
        how = {"timeout": PROFILE_S, "metadata": metadata}
        told = await self._each(lambda c: rpc.ControlStub(c).Profile(message, **how), only=replica)
        if not told:
            raise FailedPrecondition("no replica begins a trace (the log says why): is serve.profile_dir set there?")
        names = ", ".join(f"{name}:{made.name}" for name, made in sorted(told.items()))
        return ProfileResult(names, min(made.steps for made in told.values()))

    async def _each(self, ask: Callable[[Any], Awaitable[T]], only: str = "") -> dict[str, T]:
        """The answers of the attached replicas by name, without those that fail. Raises NotFound for `only`."""
        asked = {one.name: one.channel for one in self.replicas if one.channel is not None}
        if only and only not in asked:
            raise NotFound(f"replica = {only[:60]!r}: attached are {', '.join(sorted(asked)) or 'none'}")
        asked = {only: asked[only]} if only else asked
        told = await asyncio.gather(*(ask(channel) for channel in asked.values()), return_exceptions=True)
        answers = {}
        for name, answer in zip(asked, told, strict=True):
            if isinstance(answer, LOST):
                log.warning("replica %s refuses, or does not answer: %s", name, _why(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers[name] = answer
        return answers

    # -- life -------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None) -> Future[bool]:
        self._draining = True
        drained: Future[bool] = running()

        def begin() -> None:
            self._drains.append(drained)
            if timeout_s is not None:
                self._loop.call_later(timeout_s, self._drained, drained)

        self._post(begin)
        return drained

    def _drained(self, drained: Future[bool]) -> None:
        if drained in self._drains:
            self._drains.remove(drained)
            drained.set_result(not self._dispatcher.names)

    def heartbeat_age(self) -> float:
        return max(0.0, self._terms.clock() - self._dispatcher.up_at - 2 * TICK_S)

    @property
    def compiling(self) -> bool:
        return False

    @property
    def programs_left(self) -> int:
        return sum(one.programs_left for one in list(self._dispatcher.links.values()))

    @property
    def failure(self) -> Future[BaseException]:
        return self._failure

    def close(self) -> None:
        """Not from the event loop's own thread: see `aclose`."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result(CLOSE_S)

    async def aclose(self) -> None:
        """Ends live requests and the links. A second call does nothing."""
        self._draining, first, self._closed = True, not self._closed, True
        if not first:
            return
        self._dispatcher.end_all(Unavailable("the server has stopped"))
        ending = [one.stop(closing=True) for one in self._dispatcher.links.values()]
        self._dispatcher.links.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *ending, return_exceptions=True)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it until `aclose`; its end before that is the router's failure."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._closed or self._failure.done():
            return
        error = None if task.cancelled() else task.exception()
        error = error or RuntimeError(f"the task {task.get_name()!r} has ended")
        log.critical("the router has failed", exc_info=error)
        self._failure.set_result(error)

    async def _tick(self) -> None:
        while True:
            self._dispatcher.tick()
            if self._dispatcher.info is not None:
                self._ready.set()
            if not self._dispatcher.names:
                for drained in list(self._drains):
                    self._drained(drained)
            await asyncio.sleep(TICK_S)

    # -- threads ----------------------------------------------------------------------------------

    def _post(self, command: Callable[[], object]) -> None:
        """Runs `command` on the loop's thread, soon and in order."""
        self._loop.call_soon_threadsafe(command)

    def _call(self, command: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._post(partial(settle, answer, command))
        return answer

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return "its link has ended"
