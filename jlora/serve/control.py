"""`jlora.v1.Control`: what the server is and how it fares, and the few levers it has."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Mapping

import grpc
import jax

from jlora import __version__
from jlora.config import Config
from jlora.errors import InvalidArgument
from jlora.serve import convert
from jlora.serve.backend import Backend, until
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

Context = grpc.aio.ServicerContext

# Keys whose values are paths of the server's disk: no client's business.
PRIVATE_KEYS = frozenset({"model.path", "adapters.paths", "adapters.dir", "serve.compile_cache"})


class ControlServicer(rpc.ControlServicer):
    """Reads the engine's counters; the calls that wait run on a thread."""

    def __init__(self, backend: Backend):
        self._backend = backend

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        """Constants of the server, and the few numbers that say whether it is well."""
        engine, tokenizer = self._backend.engine, self._backend.tokenizer
        stats = await asyncio.to_thread(engine.stats)
        state = await asyncio.to_thread(engine.cache_state)
        recent = self._backend.recent.summary()
        devices = jax.devices()[: engine.config.model.tp]
        return pb.ServerInfo(
            version=__version__,
            model=engine.model_name,
            platform=devices[0].platform,
            devices=[f"{d.device_kind} {d.id}" for d in devices],
            tp=engine.config.model.tp,
            dtype=engine.spec.dtype,
            max_model_len=engine.limits.max_len,
            vocab=engine.limits.vocab,
            block_tokens=engine.layout.block_tokens,
            blocks=state.hbm.total,
            config=public_config(engine.config),
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
        """A snapshot of both tiers."""
        return convert.cache_state(await asyncio.to_thread(self._backend.engine.cache_state))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Its blocks are free within two steps."""
        if not request.request_id:
            raise InvalidArgument("request_id: is empty, must name a live request")
        return pb.AbortResponse(aborted=await asyncio.to_thread(self._backend.engine.abort, request.request_id))

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Drops KV that no live request uses."""
        return pb.FlushCacheResponse(blocks=await asyncio.to_thread(self._backend.engine.flush_cache))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Health says NOT_SERVING at once; the process goes on until it is told to end."""
        engine = self._backend.engine
        timeout = request.timeout_s if request.HasField("timeout_s") else None
        if timeout is not None and not (timeout >= 0 and math.isfinite(timeout)):
            raise InvalidArgument(f"timeout_s = {timeout}: must be a finite number of seconds, at least 0")
        self._backend.draining = True
        # Each look refuses new requests, the first one too, and does not wait itself.
        return pb.DrainResponse(drained=await until(lambda: engine.drain(timeout_s=0), timeout))


def public_config(config: Config) -> Mapping[str, str]:
    """`section.key` -> value for every key that is not a path."""
    values = {
        f"{section}.{key}": str(value)
        for section, keys in dataclasses.asdict(config).items()
        for key, value in keys.items()
    }
    return {key: value for key, value in values.items() if key not in PRIVATE_KEYS}
