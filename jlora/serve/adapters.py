"""`jlora.v1.Adapters`: load, unload, list and pin at run time, over gRPC.

`LoadAdapter.path` is read on the server's machine with the server's rights: open this port only to
those who may choose such a path.
"""

from __future__ import annotations

import asyncio

import grpc

from jlora.adapters.names import check_name
from jlora.errors import AlreadyExists, InvalidArgument
from jlora.serve import convert
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

Context = grpc.aio.ServicerContext


class AdaptersServicer(rpc.AdaptersServicer):
    """Each call is one call of the engine; the slow ones run on a thread."""

    def __init__(self, backend: Backend):
        self._backend = backend

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.AdapterInfo:
        """Reads, checks and serves a PEFT directory; answers when requests may use it."""
        engine = self._backend.engine
        name = check_name(request.name)
        if name == engine.model_name:
            raise AlreadyExists(f"name = {name!r}: is the base model's name")
        if not request.path:
            raise InvalidArgument("path: is empty, must name a directory on the server")
        # The reader's errors name files by their last two parts: a client learns no more of the disk.
        info = await asyncio.to_thread(engine.load_adapter, name, request.path, request.pinned, request.replace)
        return convert.adapter_info(info)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.AdapterInfo:
        """Answers when its running requests have ended and its blocks are free."""
        return convert.adapter_info(await asyncio.to_thread(self._backend.engine.unload_adapter, request.name))

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
        engine = self._backend.engine
        return convert.adapter_info(await asyncio.to_thread(engine.pin_adapter, request.name, request.pinned))
