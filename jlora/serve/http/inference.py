"""Completions, chats, prefetch and the tokenizer over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jlora.errors import InvalidArgument, OutOfRange
from jlora.serve.backend import Backend
from jlora.serve.generation import Generation, merged, together
from jlora.serve.http.answers import Answers, Asked, ChatAnswers, Completions, Tokens
from jlora.serve.http.call import DONE, Call, event
from jlora.serve.http.failures import PastContext
from jlora.serve.http.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    PrefetchBody,
    TokenizeBody,
    read,
)
from jlora.serve.observed import trace_of
from jlora.serve.texts import Prompt, Texts
from jlora.types import Request, SamplingParams
from jlora.validation import MAX_ENTRIES

SESSION = "x-session-id"  # the header; a body may say it, too
PROMPTS = 8  # short ones of a list that one turn of the loop reads: some milliseconds


class Inference:
    """The handlers of calls that generate or prepare to."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._texts = Texts(backend)

    async def completions(self, call: Call) -> None:
        """`/v1/completions`."""
        body = read(call.body, CompletionBody)
        _check_stream(body, body.echo and body.logprobs is not None)
        prompts = body.prompts()
        self._check_count(len(prompts) * max(1, body.n or 1))
        # An echo with log-probabilities has those of the prompt, too.
        wanted = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        sampling = body.sampling(logprobs=body.logprobs, prompt_logprobs=wanted, max_tokens=body.most_tokens())
        with self._backend.admitted(call.caller, sampling.n, len(prompts)):
            requests = await self._requests(call, body, prompts, sampling)
            _check_copies(requests)
            echoes = [await self._echo(p) for p in prompts] if body.echo else ()
            asked = replace(self._asked("cmpl-", body, requests, echoes), bare=body.bare)
            await self._answer(call, body, requests, Completions(asked, self._tokens(body)))

    async def chat(self, call: Call) -> None:
        """`/v1/chat/completions`."""
        body = read(call.body, ChatBody)
        call.names = body.names
        _check_stream(body, False)
        sampling = body.sampling(logprobs=body.most_likely(), max_tokens=body.most_tokens())
        chat = body.chat()
        with self._backend.admitted(call.caller, sampling.n):
            requests = await self._requests(call, body, [chat], sampling)
            _check_copies(requests)
            asked = self._asked("chatcmpl-", body, requests)
            await self._answer(call, body, requests, ChatAnswers(asked, self._tokens(body)))

    async def prefetch(self, call: Call) -> None:
        """`/v1/prefetch`: brings a later request's adapter and cached prefix to the device."""
        body = read(call.body, PrefetchBody)
        caller = call.caller
        adapter = self._backend.adapter_of(caller, body.model or "")
        draft = Request(
            uuid.uuid4().hex, (), adapter=adapter, tenant=caller.tenant_of(""), cache_salt=body.cache_salt or ""
        )
        ready = await self._request(body.asked(), draft)
        with self._backend.telling():
            result = await asyncio.wrap_future(self._backend.loaded.prefetch(ready))
        coming = {"cached_tokens": result.cached_tokens, "coming_bytes": result.coming_bytes}
        await call.json({"adapter_resident": result.resident_adapter, **coming})

    async def tokenize(self, call: Call) -> None:
        """`/tokenize`."""
        body = read(call.body, TokenizeBody)
        self._check_model(call, body.model)
        limits, prompt = self._backend.loaded.info.limits, body.asked()
        ids = await self._texts.tokenize(prompt, body.add_special_tokens)
        tokens = Tokens(self._backend.tokenizer, by_id=False)

        def answer() -> dict[str, Any]:
            strings = {"token_strs": [tokens.text(i) for i in ids]} if body.return_token_strs else {}
            return {"count": len(ids), "max_model_len": limits.max_len, "tokens": ids, **strings}

        await call.long(answer)

    async def detokenize(self, call: Call) -> None:
        """`/detokenize`; special tokens show by name, as in vLLM."""
        body = read(call.body, DetokenizeBody)
        self._check_model(call, body.model)
        await call.json({"prompt": await self._texts.detokenize(body.tokens, keep_special=True)})

    def _check_model(self, call: Call, model: str | None) -> None:
        """Raises NotFound for a model that is not served, though all of them have one tokenizer."""
        adapter = self._backend.adapter_of(call.caller, model or "")
        if adapter is not None:
            self._backend.loaded.check_adapter(adapter)

    def _check_count(self, completions: int) -> None:
        if completions > (most := self._backend.room.most):
            raise InvalidArgument(f"prompt: asks for {completions} completions, limit {most}")

    async def _requests(
        self, call: Call, body: GenerationBody, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Request]:
        caller = call.caller
        name = body.request_id if body.request_id is not None else uuid.uuid4().hex
        draft = Request(
            id=name,
            prompt=(),
            sampling=sampling,
            adapter=self._backend.adapter_of(caller, body.model or ""),
            priority=caller.check_priority(body.priority, lower_first=True),  # as in vLLM
            bypass_prefix_cache=body.bypass_prefix_cache or False,
            tenant=caller.tenant_of(""),
            cache_salt=body.cache_salt or "",
            session=body.session(call.headers.get(SESSION, "")),
        )
        if len(prompts) == 1:
            return [await self._request(prompts[0], draft, body.usual)]
        requests = []
        for i, prompt in enumerate(prompts):
            requests.append(await self._request(prompt, replace(draft, id=f"{name}-{i}"), body.usual))
            if not (i + 1) % PROMPTS:
                await asyncio.sleep(0)
        return requests

    async def _request(self, prompt: Prompt, draft: Request, usual: int | None = None) -> Request:
        try:
            return await self._texts.request(prompt, draft, usual)
        except OutOfRange as e:
            raise PastContext(str(e), self._backend.loaded.info.limits.max_len) from e

    async def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else await self._texts.detokenize(prompt, keep_special=False)

    def _asked(self, prefix: str, body: GenerationBody, requests: list[Request], echoes: Sequence[str] = ()) -> Asked:
        return Asked(
            id=prefix + (body.request_id or requests[0].id),
            model=body.model or self._backend.loaded.info.model,
            n=requests[0].sampling.n,
            ids=body.return_token_ids or False,
            prompts=[request.prompt for request in requests],
            echoes=echoes,
            counts=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        )

    def _tokens(self, body: GenerationBody) -> Tokens:
        return Tokens(self._backend.tokenizer, by_id=body.return_tokens_as_token_ids or False)

    async def _answer(self, call: Call, body: GenerationBody, requests: list[Request], answers: Answers) -> None:
        eager = body.stream or bool(body.stop)  # otherwise nothing needs to be read before the end
        trace = trace_of(call.headers.items())
        tokens = sum(len(request.prompt) for request in requests)
        self._backend.access.tenants.check_tokens(requests[0].tenant, tokens)
        running = [Generation(self._backend, request, eager, trace) for request in requests]
        async with together(running):
            if body.stream:
                await self._stream(call, body, running, answers)
            else:
                wholes = await asyncio.gather(*(generation.whole() for generation in running))
                totals = [g.totals for g in running if g.totals]
                await call.long(lambda: answers.whole(wholes, totals))

    async def _stream(self, call: Call, body: GenerationBody, running: list[Generation], answers: Answers) -> None:
        async for pairs in merged(running):
            await call.write(b"".join(event(answers.piece(place, delta)) for place, delta in pairs))
        options = body.stream_options
        usage = (
            event(answers.last([g.totals for g in running if g.totals])) if options and options.include_usage else b""
        )
        await call.write(usage + DONE, more=False)


def _check_stream(body: GenerationBody, echoed: bool | None) -> None:
    """Raises InvalidArgument for what a stream cannot have."""
    if not body.stream and body.stream_options is not None:
        raise InvalidArgument("stream_options: needs stream = true")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs: is not supported with stream = true")
    if body.stream and echoed:
        raise InvalidArgument("logprobs: is not supported with echo and stream = true")


def _check_copies(requests: Sequence[Request]) -> None:
    """Raises InvalidArgument if the completions of a prompt would repeat its log-probabilities too often."""
    sampling, tokens = requests[0].sampling, sum(len(request.prompt) for request in requests)
    if sampling.prompt_logprobs is None or sampling.n == 1:
        return
    if (entries := sampling.n * tokens * (sampling.prompt_logprobs + 1)) > MAX_ENTRIES:
        raise InvalidArgument(
            f"prompt_logprobs = {sampling.prompt_logprobs}: each of the n = {sampling.n} completions has those of the "
            f"prompt, {entries} in all, limit {MAX_ENTRIES}"
        )
