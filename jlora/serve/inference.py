"""`jlora.v1.Inference`: generation, prefetch and the tokenizer, over gRPC."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import grpc

from jlora.errors import FailedPrecondition, InvalidArgument
from jlora.serve import convert
from jlora.serve.backend import Backend
from jlora.serve.generation import Generation
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.status import DeadlineExceeded
from jlora.types import Request
from jlora.validation import validate

Context = grpc.aio.ServicerContext


class InferenceServicer(rpc.InferenceServicer):
    """Turns messages into requests, submits them, and sends their deltas. `jlora.proto` describes the calls.

    A call that ends early, by cancellation or deadline, leaves its `Generation`, which aborts the
    request.
    """

    def __init__(self, backend: Backend):
        self._backend = backend

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        ready = await self._request(request, context)
        # Without stop strings nothing needs to be read before the end.
        async with Generation(self._backend, ready, eager=bool(ready.sampling.stop)) as generation:
            whole = await generation.whole()
            return convert.response(ready.id, whole, generation.totals)

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        ready = await self._request(request, context)
        async with Generation(self._backend, ready, eager=True) as generation:
            async for deltas in generation.deltas():
                yield convert.response(ready.id, deltas, generation.totals)

    async def Prefetch(self, request: pb.GenerateRequest, context: Context) -> pb.PrefetchResponse:
        ready = await self._request(request, context)
        result = await asyncio.wrap_future(self._backend.loaded.prefetch(ready))
        return pb.PrefetchResponse(
            adapter_resident=result.resident_adapter,
            cached_tokens=result.cached_tokens,
            coming_bytes=result.coming_bytes,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        limits = self._backend.loaded.info.limits
        ids = await self._backend.encode(request, "input")
        return pb.TokenizeResponse(token_ids=ids, max_model_len=limits.max_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        vocab = self._backend.loaded.info.limits.vocab
        tokenizer = self._backend.text_tokenizer("Detokenize")
        for i, token in enumerate(request.token_ids):
            if not 0 <= token < vocab:
                raise InvalidArgument(f"token_ids[{i}] = {token}: must be in [0, {vocab})")
        return pb.DetokenizeResponse(text=tokenizer.decode(request.token_ids, skip_special=not request.keep_special))

    async def _request(self, message: pb.GenerateRequest, context: Context) -> Request:
        """The message as a valid request; the call's deadline becomes the request's."""
        backend = self._backend
        limits = backend.loaded.info.limits  # first: while loading there is nothing to validate against
        left = context.time_remaining()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        deadline = None if left is None else time.monotonic() + left
        if message.stopping.stop and backend.tokenizer is None:
            raise FailedPrecondition("stop: strings need a tokenizer, and the model has none; use stop_token_ids")
        adapter = backend.adapter_of(message.model)
        request = Request(
            id=message.request_id or uuid.uuid4().hex,
            prompt=tuple(await backend.encode(message, "prompt")),
            sampling=convert.sampling_params(message),
            adapter=adapter,
            priority=message.priority,
            bypass_prefix_cache=message.bypass_prefix_cache,
            tenant=message.tenant,
            deadline=deadline,
        )
        return validate(request, limits)
