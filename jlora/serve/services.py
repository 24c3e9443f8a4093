"""The three services of `jlora.proto`, which describes their calls.

`LoadAdapter.path` is read on the server's machine: only clients that may choose one may reach this port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future

from jlora import __version__
from jlora.config import Config
from jlora.errors import InvalidArgument
from jlora.replica import Load, ReplicaState
from jlora.serve import convert
from jlora.serve.backend import Backend
from jlora.serve.generation import Generation
from jlora.serve.loading import load_adapter
from jlora.serve.pages import AT_ONCE, page
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.status import Context, DeadlineExceeded
from jlora.serve.texts import Texts
from jlora.types import AdapterInfo, EngineStats, Request

# Keys whose values are paths on the server: clients do not see them.
PRIVATE_KEYS = frozenset({
    "model.path", "adapters.paths", "adapters.dir", "adapters.roots", "adapters.registry",
    "engine.step_model", "serve.compile_cache", "serve.profile_dir",
    "serve.keys", "serve.otlp_endpoint", "serve.tls_cert", "serve.tls_key", "serve.tls_client_ca",
    "cluster.addresses", "cluster.controller", "cluster.token_file", "cluster.env",
    "cluster.ray_address", "cluster.ray_token_file",
})  # fmt: skip


class _Servicer:
    def __init__(self, backend: Backend):
        self._backend = backend


class InferenceServicer(_Servicer, rpc.InferenceServicer):
    """Turns messages into requests, submits them, and sends their deltas."""

    def __init__(self, backend: Backend):
        super().__init__(backend)
        self._texts = Texts(backend)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse | bytes:
        with self._backend.admitted(context.caller, _completions(request)):
            ready = await self._request(request, context)
            del request  # it may hold far more than `ready`: protobuf keeps what a later value of a field replaced
            eager = bool(ready.sampling.stop)  # otherwise nothing needs to be read before the end
            async with Generation(self._backend, ready, eager, context.trace) as generation:
                whole = await generation.whole()
                return await convert.response(ready.id, whole, generation.totals)

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse | bytes]:
        with self._backend.admitted(context.caller, _completions(request)):
            ready = await self._request(request, context)
            del request  # as above
            async with Generation(self._backend, ready, True, context.trace) as generation:
                async for deltas in generation.deltas():
                    yield await convert.response(ready.id, deltas, generation.totals)

    async def Prefetch(self, request: pb.GenerateRequest, context: Context) -> pb.PrefetchResponse:
        ready = await self._request(request, context)
        with self._backend.telling():
            result = await asyncio.wrap_future(self._backend.loaded.prefetch(ready))
        return pb.PrefetchResponse(
            adapter_resident=result.resident_adapter,
            cached_tokens=result.cached_tokens,
            coming_bytes=result.coming_bytes,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        limits = self._backend.loaded.info.limits
        return pb.TokenizeResponse(
            token_ids=await self._texts.tokenize(convert.tokenize_input(request)), max_model_len=limits.max_len
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=await self._texts.detokenize(request.token_ids, request.keep_special))

    async def _request(self, message: pb.GenerateRequest, context: Context) -> Request:
        # First: while loading there is nothing to validate against.
        adapter = self._backend.adapter_of(context.caller, message.model)
        left = context.time_remaining()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        deadline = None if left is None else time.monotonic() + left
        draft = Request(
            id=message.request_id or uuid.uuid4().hex,
            prompt=(),
            sampling=convert.sampling_params(message),
            adapter=adapter,
            priority=context.caller.check_priority(message.priority),
            bypass_prefix_cache=message.bypass_prefix_cache,
            tenant=context.caller.tenant_of(message.tenant),
            deadline=deadline,
            cache_salt=message.cache_salt,
            session=message.session,
        )
        return await self._texts.request(convert.prompt(message), draft)


def _completions(message: pb.GenerateRequest) -> int:
    return message.sampling.n if message.sampling.HasField("n") else 1


class AdaptersServicer(_Servicer, rpc.AdaptersServicer):
    """Loads, unloads, lists and pins adapters; each call is one command of the replica."""

    def __init__(self, backend: Backend):
        super().__init__(backend)
        self._pages = asyncio.Semaphore(AT_ONCE)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.AdapterInfo:
        replica = self._backend.loaded
        load = Load(request.name, request.path, request.pinned, request.replace, request.lazy)
        return convert.adapter_info(await load_adapter(replica, load))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.AdapterInfo:
        return await _info(self._backend.loaded.unload_adapter(request.name))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        async with self._pages:
            return await page(self._backend.loaded, request, context.caller)

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Context) -> pb.AdapterInfo:
        context.caller.check_adapter(request.name)
        info = await asyncio.wrap_future(self._backend.loaded.adapter(request.name))
        return convert.adapter_info(context.caller.seen(info))

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: Context) -> pb.AdapterInfo:
        return await _info(self._backend.loaded.pin_adapter(request.name, request.pinned))


async def _info(future: Future[AdapterInfo]) -> pb.AdapterInfo:
    try:
        return convert.adapter_info(await asyncio.wrap_future(future))
    finally:
        del future  # it holds its error, whose traceback holds this frame: a cycle


class ControlServicer(_Servicer, rpc.ControlServicer):
    """The server's constants and counters, abort, flush and drain."""

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        """The server's constants, and its counters for callers that may see them."""
        replica, tokenizer = self._backend.loaded, self._backend.tokenizer
        info = replica.info
        answer = pb.ServerInfo(
            version=__version__,
            model=info.model,
            platform=info.platform,
            devices=info.devices,
            tp=info.config.model.tp,
            dtype=info.dtype,
            max_model_len=info.limits.max_len,
            vocab=info.limits.vocab,
            block_tokens=info.block_tokens,
            config=_public_config(info.config),
            start_s=info.start_s,
            process=self._backend.process,
            uptime_s=time.monotonic() - self._backend.started,
            draining=self._backend.draining,
            text=tokenizer is not None,
            chat=tokenizer is not None and tokenizer.has_chat,
        )
        state = await asyncio.wrap_future(replica.state())
        answer.blocks = state.cache.hbm.total
        if context.caller.sight:
            answer.MergeFrom(_activity(self._backend, state))
        return answer

    async def GetCacheState(self, request: pb.GetCacheStateRequest, context: Context) -> pb.CacheState:
        state = await asyncio.wrap_future(self._backend.loaded.state())
        # The messages have the records' fields.
        found = pb.CacheState(**dataclasses.asdict(state.cache), merge=_merge(state.stats))
        if request.with_kv:
            owners = await asyncio.wrap_future(self._backend.loaded.owners())
            found.kv.update(owners.kv)
            found.kv_whole = owners.whole
        return found

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidArgument("request_id: is empty, must name a live request")
        caller = context.caller
        tenant = request.tenant if caller.admin and request.tenant else caller.tenant_of(request.tenant)
        aborted = self._backend.loaded.abort_named(request.request_id, tenant)
        return pb.AbortResponse(aborted=await asyncio.wrap_future(aborted))

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(blocks=await asyncio.wrap_future(self._backend.loaded.flush_cache()))

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileResponse:
        made = await asyncio.wrap_future(self._backend.loaded.profile(request.steps, request.replica))
        return pb.ProfileResponse(name=made.name, steps=made.steps)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        replica = self._backend.loaded
        timeout = request.timeout_s if request.HasField("timeout_s") else None
        if timeout is not None and not (timeout >= 0 and math.isfinite(timeout)):
            raise InvalidArgument(f"timeout_s = {timeout}: must be a finite number of seconds, at least 0")
        self._backend.draining = True
        return pb.DrainResponse(drained=await asyncio.wrap_future(replica.drain(timeout)))


def _public_config(config: Config) -> Mapping[str, str]:
    values = {
        f"{section}.{key}": str(value)
        for section, keys in dataclasses.asdict(config).items()
        for key, value in keys.items()
    }
    return {key: value for key, value in values.items() if key not in PRIVATE_KEYS}


def _activity(backend: Backend, state: ReplicaState) -> pb.ServerInfo:
    """The fields that count what all tenants do."""
    stats, recent = state.stats, backend.recent.summary()
    return pb.ServerInfo(
        compiles_after_warmup=stats.compiles_after_warmup,
        programs_left=stats.programs_left,
        host_s_per_step=stats.host_step_s,
        steps=stats.steps,
        running=stats.running,
        waiting=stats.waiting,
        recent_requests=recent.ttft.count,
        recent_ttft_mean_s=recent.ttft.mean_s,
        recent_ttft_p50_s=recent.ttft.p50_s,
        recent_ttft_p90_s=recent.ttft.p90_s,
        recent_ttft_p99_s=recent.ttft.p99_s,
        recent_tpot_requests=recent.tpot.count,
        recent_tpot_mean_s=recent.tpot.mean_s,
        recent_tpot_p50_s=recent.tpot.p50_s,
        recent_tpot_p90_s=recent.tpot.p90_s,
        recent_tpot_p99_s=recent.tpot.p99_s,
        longest_loop_gap_s=backend.gaps.longest(),
        longest_engine_gap_s=state.longest_gap_s,
        merge=_merge(stats),
        replicas=[pb.ReplicaStatus(**dataclasses.asdict(member)) for member in state.members],
        live_requests=stats.live_requests,
        generated_tokens=stats.generated_tokens,
        prompt_tokens=stats.prompt_tokens,
        preemptions=stats.preemptions,
        plan_s=stats.plan_s,
        dispatch_s=stats.dispatch_s,
        read_s=stats.read_s,
        commit_s=stats.commit_s,
    )


def _merge(stats: EngineStats) -> pb.MergeState:
    return pb.MergeState(**dataclasses.asdict(stats.merge))
