"""Serves a controller to further routers: `jlora.cluster.v1.Directory`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import grpc

from jlora.cluster.controller import Controller
from jlora.cluster.demand import Told
from jlora.cluster.directory import Version
from jlora.cluster.proto import directory_pb2 as directory
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.cluster.registry import info_of
from jlora.cluster.secret import Secret
from jlora.cluster.table import Change
from jlora.replica import Load
from jlora.serve import convert
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.status import status_of
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

# Where requests go: version key -> address of a replica -> part. None: no table says so.
Placed = Callable[[], Mapping[str, Mapping[str, float]] | None]

MOST = 1000  # entries in one message
BEAT_S = 1.0  # between two messages, at most: a router takes a longer silence for the end
SILENT_S = 10.0  # without an answer to any of them: no connection closes when a router stops or its machine is gone


class DirectoryServicer(rpc.DirectoryServicer):
    """For one event loop; whoever has the service's token may call."""

    def __init__(self, controller: Controller, secret: Secret, placed: Placed = lambda: None):
        self._controller = controller
        self._secret = secret
        self._placed = placed
        self._over = False
        self._watched: set[asyncio.Event] = set()  # what wakes each follower's stream

    def end(self) -> None:
        """Ends the streams of all that follow: they come back to the next controller."""
        self._over = True
        for changed in self._watched:
            changed.set()

    async def Watch(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[directory.Table]:
        await self._secret.check(context)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def told() -> None:
            loop.call_soon_threadsafe(changed.set)

        end = self._controller.table.watch(told)
        reading = asyncio.create_task(self._read(request_iterator))
        reading.add_done_callback(lambda _: changed.set())
        self._watched.add(changed)
        try:
            epoch, told_places = 0, None
            while not (reading.done() or self._over):
                changed.clear()
                change = self._controller.table.since(epoch)
                if change.epoch != epoch:
                    for message in self._messages(change):
                        yield message
                    epoch = change.epoch
                if (places := self._placed()) is not None and places != told_places:
                    for message in _placements(places, epoch):
                        yield message
                    told_places = places
                try:
                    await asyncio.wait_for(changed.wait(), BEAT_S)
                except TimeoutError:
                    yield directory.Table(epoch=epoch)
        finally:
            end()
            self._watched.discard(changed)
            reading.cancel()

    async def _read(self, received: AsyncIterator[directory.Using]) -> None:
        """What the router's requests use and have taken, until it goes or is silent."""
        uses, stream = self._controller.uses, object()
        try:
            while (using := await _next(received)) is not None:
                for one in using.served:
                    ended = one.ended or (one.requests if one.output else 0)  # an older router tells of ends alone
                    self._controller.told(one.name, Told(one.requests, one.prompt, ended, one.output))
                if using.leaves:
                    return uses.leaves(using.router)
                uses.saw(stream, using.router, using.epoch, using.keys)
        finally:
            uses.left(stream)

    def _messages(self, change: Change) -> Iterator[directory.Table]:
        versions = list(change.versions)
        for first in range(0, max(1, len(versions)), MOST):
            last = first + MOST >= len(versions)
            yield directory.Table(
                epoch=change.epoch,
                whole=change.whole and not first,
                more=not last,
                entries=[self._entry(version) for version in itertools.islice(versions, first, first + MOST)],
                gone=change.gone if last else (),
            )

    def _entry(self, version: Version) -> directory.Entry:
        row = self._controller.registry.find(version.name)
        if row is None or row.uid != version.number:  # the next change says so
            return directory.Entry(info=pb.AdapterInfo(name=version.name, uid=version.number), path=version.path)
        info = convert.adapter_info(info_of(row), summary=True)
        info.alora_invocation_tokens.extend(row.alora_tokens)
        return directory.Entry(info=info, path=row.path)

    async def Load(self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterInfo:
        load = Load(request.name, request.path, request.pinned, request.replace, request.lazy)
        return await self._answer(context, lambda: self._controller.load(load))

    async def Unload(self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterInfo:
        return await self._answer(context, lambda: self._controller.unload(request.name))

    async def Pin(self, request: pb.PinAdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterInfo:
        return await self._answer(context, lambda: self._controller.pin(request.name, request.pinned))

    async def Get(self, request: pb.GetAdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterInfo:
        return await self._answer(context, lambda: self._controller.adapter(request.name))

    async def _answer(self, context: grpc.aio.ServicerContext, ask: Any) -> pb.AdapterInfo:
        await self._secret.check(context)
        try:
            future: Future[AdapterInfo] = ask()
            answer: Awaitable[AdapterInfo] = asyncio.wrap_future(future)
            return convert.adapter_info(await answer)
        except Exception as e:
            code, details = status_of(e, "Directory")
            await context.abort(code, details)


async def _next(received: AsyncIterator[directory.Using]) -> directory.Using | None:
    """The router's next message; None if there is none any more."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await anext(received, None)
    except TimeoutError:
        log.warning("a router that follows this controller has said nothing for %g s", SILENT_S)
        return None


def _placements(places: Mapping[str, Mapping[str, float]], epoch: int) -> Iterator[directory.Table]:
    """The whole placement."""
    entries = [directory.Places(key=key, parts=parts) for key, parts in places.items()]
    for first in range(0, max(1, len(entries)), MOST):
        more = first + MOST < len(entries)
        yield directory.Table(epoch=epoch, more=more, placed=True, places=entries[first : first + MOST])
