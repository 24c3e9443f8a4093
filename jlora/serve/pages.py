"""The adapters of a server in pages, so that no answer outgrows a client's default limit of 4 MiB."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from jlora.adapters.names import check_length
from jlora.errors import InvalidArgument
from jlora.replica import Replica
from jlora.serve import convert
from jlora.serve.access.caller import Caller
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.types import AdapterInfo

MOST = 1000  # adapters of a page
PAGE_BYTES = 3 << 20  # a page ends before the adapter that passes this
CHUNK = 128  # adapters that the engine describes between two steps
PER_TURN = 8  # adapters that become messages in one turn of the event loop
AT_ONCE = 2  # pages that a server makes at a time
FIRST_S, AGAIN_S = 2.0, 0.05  # that a scrape waits for its look at all adapters: the first one, and later ones


async def page(replica: Replica, request: pb.ListAdaptersRequest, caller: Caller) -> pb.ListAdaptersResponse:
    """One page of what the caller sees; its token is the name of its last adapter.

    Raises InvalidArgument for a bad size or token.
    """
    if not 0 <= request.page_size <= MOST:
        raise InvalidArgument(f"page_size = {request.page_size}: must be in [0, {MOST}]")
    size, summary = request.page_size or MOST, request.view == pb.ListAdaptersRequest.SUMMARY
    answer, after, room = pb.ListAdaptersResponse(), check_length(request.page_token, "page_token"), PAGE_BYTES
    async for info in adapters(replica, after):
        if not caller.sees(info.name):
            continue
        message = convert.adapter_info(caller.seen(info), summary)
        room -= message.ByteSize()
        if len(answer.adapters) == size or (room < 0 and answer.adapters):
            answer.next_page_token = after
            break
        answer.adapters.append(message)
        after = info.name
    return answer


async def adapters(replica: Replica, after: str = "") -> AsyncIterator[AdapterInfo]:
    """The adapters behind the name `after` in order of name; the engine describes a few between two steps."""
    while True:
        infos = await asyncio.wrap_future(replica.adapters(after, CHUNK))
        for i, info in enumerate(infos):
            if i and i % PER_TURN == 0:
                await asyncio.sleep(0)
            yield info
        if len(infos) < CHUNK:
            return
        after = infos[-1].name


class Seen:
    """All adapters as the last look found them. The engine answers between two steps, and a scrape waits for none."""

    def __init__(self) -> None:
        self._infos: list[AdapterInfo] | None = None
        self._looking: asyncio.Task[list[AdapterInfo]] | None = None

    async def infos(self, replica: Replica) -> list[AdapterInfo] | None:
        """Those of a look that is quick; else of the last one, while this one goes on. None while the first goes on."""
        if self._looking is not None and self._looking.done():  # since the last call
            self._infos = self._infos if self._looking.exception() else self._looking.result()
            self._looking = None
        looking = self._looking = self._looking or asyncio.create_task(_all(replica), name="adapters")
        await asyncio.wait((looking,), timeout=FIRST_S if self._infos is None else AGAIN_S)
        if looking.done():
            self._infos = looking.result()
        return self._infos


async def _all(replica: Replica) -> list[AdapterInfo]:
    return [info async for info in adapters(replica)]


def walk(stub: rpc.AdaptersStub, timeout_s: float | None = None) -> Iterator[pb.AdapterInfo]:
    """A client's list: the summary of every adapter, page after page."""
    token = ""
    while True:
        asked = pb.ListAdaptersRequest(page_token=token, view=pb.ListAdaptersRequest.SUMMARY)
        answer = stub.ListAdapters(asked, timeout=timeout_s)
        yield from answer.adapters
        token = answer.next_page_token
        if not token:
            return
