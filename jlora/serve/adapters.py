"""`jlora.v1.Adapters`: loads, unloads, lists and pins adapters at run time, over gRPC.

`LoadAdapter.path` is read on the server's machine with the server's rights. Open this port only to
clients that may choose such a path.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

import grpc

from jlora.adapters.names import check_name
from jlora.errors import AlreadyExists, InvalidArgument, JloraError
from jlora.serve import convert
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.status import shortened
from jlora.types import AdapterInfo

Context = grpc.aio.ServicerContext

log = logging.getLogger(__name__)


class AdaptersServicer(rpc.AdaptersServicer):
    """Each call, described in `jlora.proto`, is one command of the replica."""

    def __init__(self, backend: Backend):
        self._backend = backend

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.AdapterInfo:
        replica = self._backend.loaded
        name = check_name(request.name)
        if name == replica.info.model:
            raise AlreadyExists(f"name = {name!r}: is the base model's name")
        if not request.path:
            raise InvalidArgument("path: is empty, must name a directory on the server")
        try:
            return await _info(replica.load_adapter(name, request.path, request.pinned, request.replace))
        except JloraError as e:
            # The client's message names a file by its directory and name; only the log has the whole path.
            log.warning("adapter %s is not loaded from %.4096r: %s", name, request.path, shortened(str(e)))
            raise

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.AdapterInfo:
        return await _info(self._backend.loaded.unload_adapter(request.name))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        infos = await asyncio.wrap_future(self._backend.loaded.adapters())
        return pb.ListAdaptersResponse(adapters=map(convert.adapter_info, infos))

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Context) -> pb.AdapterInfo:
        return await _info(self._backend.loaded.adapter(request.name))

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: Context) -> pb.AdapterInfo:
        return await _info(self._backend.loaded.pin_adapter(request.name, request.pinned))


async def _info(future: Future[AdapterInfo]) -> pb.AdapterInfo:
    return convert.adapter_info(await asyncio.wrap_future(future))
