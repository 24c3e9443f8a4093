"""`jlora.v1.Adapters`: load, unload, list and pin at run time, over gRPC.

`LoadAdapter.path` is read on the server's machine with the server's rights: open this port only to
those who may choose such a path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from jlora.adapters.names import check_name
from jlora.errors import AlreadyExists, InvalidArgument
from jlora.serve import convert
from jlora.serve.backend import Backend, until
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.types import AdapterInfo

Context = grpc.aio.ServicerContext

# Reading files, and waiting for copies, may take seconds: so many calls at once, on threads of their own.
THREADS = 8


class AdaptersServicer(rpc.AdaptersServicer):
    """Each call is one call of the engine; none that waits holds a thread that requests need."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.AdapterInfo:
        """Reads, checks and serves a PEFT directory; answers when requests may use it."""
        engine = self._backend.engine
        name = check_name(request.name)
        if name == engine.model_name:
            raise AlreadyExists(f"name = {name!r}: is the base model's name")
        if not request.path:
            raise InvalidArgument("path: is empty, must name a directory on the server")
        # The reader's errors name files by their last two parts: a client learns no more of the disk.
        path, pinned, replace = request.path, request.pinned, request.replace
        return await self._slowly(lambda: engine.load_adapter(name, path, pinned, replace))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.AdapterInfo:
        """Answers when its running requests have ended and its blocks are free."""
        engine = self._backend.engine
        info, uids = await asyncio.to_thread(engine.start_unload, request.name)
        await until(lambda: engine.are_gone(uids))
        return convert.adapter_info(info)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """In order of name."""
        infos = await asyncio.to_thread(self._backend.engine.adapters)
        return pb.ListAdaptersResponse(
            adapters=[convert.adapter_info(i) for i in sorted(infos, key=lambda info: info.name)]
        )

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Context) -> pb.AdapterInfo:
        """One adapter, or NOT_FOUND with near names."""
        return convert.adapter_info(await asyncio.to_thread(self._backend.engine.adapter, request.name))

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: Context) -> pb.AdapterInfo:
        """Pins it on the device, or takes the pin away."""
        engine, name, pinned = self._backend.engine, request.name, request.pinned
        return await self._slowly(lambda: engine.pin_adapter(name, pinned))

    async def _slowly(self, call: Callable[[], AdapterInfo]) -> pb.AdapterInfo:
        return convert.adapter_info(await asyncio.get_running_loop().run_in_executor(self._threads, call))
