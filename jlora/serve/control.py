"""`jlora.v1.Control`: the server's constants and counters, abort, flush and drain."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Mapping

import grpc

from jlora import __version__
from jlora.config import Config
from jlora.errors import InvalidArgument
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

Context = grpc.aio.ServicerContext

# Keys whose values are paths on the server: clients do not see them.
PRIVATE_KEYS = frozenset({"model.path", "adapters.paths", "adapters.dir", "serve.compile_cache"})


class ControlServicer(rpc.ControlServicer):
    """Each call, described in `jlora.proto`, is one command of the replica."""

    def __init__(self, backend: Backend):
        self._backend = backend

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        replica, tokenizer = self._backend.loaded, self._backend.tokenizer
        state = await asyncio.wrap_future(replica.state())
        info, stats, recent = replica.info, state.stats, self._backend.recent.summary()
        return pb.ServerInfo(
            version=__version__,
            model=info.model,
            platform=info.platform,
            devices=info.devices,
            tp=info.config.model.tp,
            dtype=info.dtype,
            max_model_len=info.limits.max_len,
            vocab=info.limits.vocab,
            block_tokens=info.block_tokens,
            blocks=state.cache.hbm.total,
            config=public_config(info.config),
            uptime_s=time.monotonic() - self._backend.started,
            compiles_after_warmup=stats.compiles_after_warmup,
            host_s_per_step=stats.host_step_s,
            steps=stats.steps,
            running=stats.running,
            waiting=stats.waiting,
            draining=self._backend.draining,
            text=tokenizer is not None,
            chat=tokenizer is not None and tokenizer.has_chat,
            recent_requests=recent.count,
            recent_ttft_mean_s=recent.mean_s,
            recent_ttft_p99_s=recent.p99_s,
        )

    async def GetCacheState(self, request: pb.GetCacheStateRequest, context: Context) -> pb.CacheState:
        state = await asyncio.wrap_future(self._backend.loaded.state())
        return pb.CacheState(**dataclasses.asdict(state.cache))  # the message has the record's fields

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidArgument("request_id: is empty, must name a live request")
        return pb.AbortResponse(aborted=await asyncio.wrap_future(self._backend.loaded.abort(request.request_id)))

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(blocks=await asyncio.wrap_future(self._backend.loaded.flush_cache()))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        replica = self._backend.loaded
        timeout = request.timeout_s if request.HasField("timeout_s") else None
        if timeout is not None and not (timeout >= 0 and math.isfinite(timeout)):
            raise InvalidArgument(f"timeout_s = {timeout}: must be a finite number of seconds, at least 0")
        self._backend.draining = True
        return pb.DrainResponse(drained=await asyncio.wrap_future(replica.drain(timeout)))


def public_config(config: Config) -> Mapping[str, str]:
    """`section.key` -> value for every key that is not a path."""
    values = {
        f"{section}.{key}": str(value)
        for section, keys in dataclasses.asdict(config).items()
        for key, value in keys.items()
    }
    return {key: value for key, value in values.items() if key not in PRIVATE_KEYS}
