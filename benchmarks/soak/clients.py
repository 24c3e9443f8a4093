"""The soak's clients: all that users do to a server, good and bad, and what they hear.

A question's answer is known before the load: the server was asked alone. So each whole answer is checked.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from benchmarks.clients import NARROW
from jlora.demo import assets
from jlora.demo.run import TEXT
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

MODELS = ("", "upper", "rot13", "leet", "stars")  # "" is the base
LIVE, VERSIONS = "live", ("mock", "piglatin")  # an adapter that is replaced all the time, and its two contents
GUESTS = 8  # names of adapters that come and go
ANSWER_S = 300.0  # a guard against hanging
STALL_S = 5.0  # serve.stall_s
OK = "OK"

Act = Callable[[], Coroutine[Any, Any, None]]

# What a client does next, and how often.
KINDS: Mapping[str, int] = {
    "stream": 42, "unary": 8, "http": 8, "http stream": 16, "live": 8, "cancel": 7, "http cut": 4, "deadline": 3,
    "unknown model": 2, "no key": 1, "bad field": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Server:
    """Where it listens, and keys: one for each tenant, and an admin's."""

    grpc: str
    http: str
    tenants: Sequence[str]
    admin: str


@dataclass
class Heard:
    """What the clients have heard since `began`."""

    began: float = field(default_factory=time.monotonic)
    ttft: list[tuple[float, float]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)  # kind and status
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def note(self, kind: str, status: str, *expected: str) -> None:
        """Counts an end; one that is not expected is kept."""
        self.ends[f"{kind}: {status.partition(' ')[0]}"] += 1
        if status.partition(" ")[0] not in expected:
            self.unexpected.append(f"{kind}: {status}")

    def check(self, kind: str, text: str, right: Sequence[str]) -> None:
        """A whole answer must be one of these."""
        self.note(kind, OK, OK)
        if text not in right:
            self.wrong.append(f"{kind}: {text!r}, not {list(right)!r}")


class Clients:
    """Connections of all tenants, and the questions with their answers."""

    def __init__(self, server: Server, texts: int, seed: int = 0):
        self._server = server
        self._rng = random.Random(seed)
        words = TEXT.split()
        self._texts = [" ".join(self._rng.sample(words, 2 + i % 5)) for i in range(texts)]
        self._channel = grpc.aio.insecure_channel(server.grpc)
        self._inference = rpc.InferenceStub(self._channel)
        self._narrow = grpc.aio.insecure_channel(server.grpc, options=NARROW)
        self._adapters, self._control = rpc.AdaptersStub(self._channel), rpc.ControlStub(self._channel)
        self._http = httpx.AsyncClient(
            base_url=f"http://{server.http}", timeout=ANSWER_S, limits=httpx.Limits(max_keepalive_connections=8)
        )
        self._admin = (("authorization", f"Bearer {server.admin}"),)
        self._known: dict[tuple[str, str], str] = {}  # (model or version, text) -> answer
        self.heard = Heard()

    async def close(self) -> None:
        """Closes all connections."""
        await self._channel.close()
        await self._narrow.close()
        await self._http.aclose()

    async def learn(self) -> None:
        """Asks each question alone."""
        for model in MODELS:
            for text in self._texts:
                self._known[model, text] = await self._unary(model, text)
        for version in reversed(VERSIONS):  # the first one stays
            await self._load(LIVE, version)
            for text in self._texts:
                self._known[version, text] = await self._unary(LIVE, text)

    async def run(self, streams: int, seconds: float) -> Heard:
        """Keeps so many requests in flight for so long; a share of them is read slowly or not at all."""
        self.heard = Heard()
        slow = max(1, streams // 32)
        tasks: list[Act] = [*([self._slow] * slow), *([self._stalled] * max(1, slow // 4))]
        tasks += [self._any] * (streams - len(tasks))
        loops = [self._repeat(task, seconds) for task in (*tasks, self._change)]
        await asyncio.gather(*loops)
        return self.heard

    async def info(self) -> pb.ServerInfo:
        """The server's counters."""
        return await self._control.GetServerInfo(pb.GetServerInfoRequest(), metadata=self._admin, timeout=ANSWER_S)

    async def cache(self) -> pb.CacheState:
        """The server's blocks."""
        return await self._control.GetCacheState(pb.GetCacheStateRequest(), metadata=self._admin, timeout=ANSWER_S)

    async def _repeat(self, act: Act, seconds: float) -> None:
        while time.monotonic() - self.heard.began < seconds:
            try:
                await act()
            except grpc.aio.AioRpcError as e:
                self.heard.note(act.__name__, f"{e.code().name} {e.details()}")
                await asyncio.sleep(0.1)
            except httpx.HTTPError as e:
                self.heard.note(act.__name__, f"{type(e).__name__} {e}")
                await asyncio.sleep(0.1)

    async def _any(self) -> None:
        (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
        model, text = self._rng.choice(MODELS), self._rng.choice(self._texts)
        if kind == "stream":
            self.heard.check(kind, await self._stream(model, text), [self._known[model, text]])
        elif kind == "unary":
            self.heard.check(kind, await self._unary(model, text), [self._known[model, text]])
        elif kind == "live":
            await self._ask_live(text)
        elif kind in ("http", "http stream"):
            answer = await self._post(model, text, stream=kind == "http stream")
            self.heard.check(kind, answer, [self._known[model, text]])
        elif kind == "http cut":
            await self._post(model, text, stream=True, cut=True)
            self.heard.note(kind, OK, OK)
        elif kind == "cancel":
            await self._cancel(model, text)
        else:
            await self._refused(kind, text)

    async def _stream(self, model: str, text: str) -> str:
        began, answer = time.monotonic(), ""
        async for delta in self._inference.GenerateStream(chat(model, text), metadata=self._key(), timeout=ANSWER_S):
            if not answer:
                self.heard.ttft.append((began - self.heard.began, time.monotonic() - began))
            answer += "".join(output.text for output in delta.outputs)
        return answer

    async def _unary(self, model: str, text: str) -> str:
        reply = await self._inference.Generate(chat(model, text), metadata=self._key(), timeout=ANSWER_S)
        return reply.outputs[0].text

    async def _ask_live(self, text: str) -> None:
        try:
            answer = await self._unary(LIVE, text)
        except grpc.aio.AioRpcError as e:  # it is being unloaded and loaded
            self.heard.note("live", f"{e.code().name} {e.details()}", "NOT_FOUND")
        else:
            self.heard.check("live", answer, [self._known[version, text] for version in VERSIONS])

    async def _post(self, model: str, text: str, stream: bool, cut: bool = False) -> str:
        body = {
            "model": model or "model", "messages": [{"role": "user", "content": text}], "stream": stream,
            "temperature": 0.0, "max_tokens": 256,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self._rng.choice(self._server.tenants)}"}
        if not stream:
            answer = await self._http.post("/v1/chat/completions", json=body, headers=headers)
            return answer.raise_for_status().json()["choices"][0]["message"]["content"]
        parts = []
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as lines:
            lines.raise_for_status()
            async for line in lines.aiter_lines():
                if cut:
                    break
                if line.startswith("data: {"):
                    parts += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
        return "".join(parts)

    async def _cancel(self, model: str, text: str) -> None:
        """At any time: while it waits, is prefilled, or decodes."""
        call = self._inference.GenerateStream(chat(model, text), metadata=self._key(), timeout=ANSWER_S)
        await asyncio.sleep(self._rng.expovariate(4.0))
        if self._rng.random() < 0.5:
            await call.read()
        call.cancel()
        self.heard.note("cancel", OK, OK)

    async def _refused(self, kind: str, text: str) -> None:
        asked, key, timeout = chat("", text), self._key(), ANSWER_S
        if kind == "deadline":
            timeout = self._rng.choice((0.001, 0.05, 0.5))
        elif kind == "unknown model":
            asked.model = "nobody"
        elif kind == "no key":
            key = (("authorization", "Bearer jlora-00000000-x"),)
        else:
            asked.sampling.top_p = 7.0
        expected = {
            "deadline": (OK, "DEADLINE_EXCEEDED"), "unknown model": ("NOT_FOUND",), "no key": ("UNAUTHENTICATED",),
            "bad field": ("INVALID_ARGUMENT",),
        }  # fmt: skip
        status = OK
        try:
            await self._inference.Generate(asked, metadata=key, timeout=timeout)
        except grpc.aio.AioRpcError as e:
            status = f"{e.code().name} {e.details()}"
        self.heard.note(kind, status, *expected[kind])

    async def _slow(self) -> None:
        """Reads a long answer with a pause before each part."""
        count, asked = 0, chat("", self._rng.choice(self._texts), 300, logprobs=5)
        async for delta in self._inference.GenerateStream(asked, metadata=self._key(), timeout=ANSWER_S):
            count += sum(len(output.token_ids) for output in delta.outputs)
            await asyncio.sleep(0.05)
        self.heard.check("slow", str(count), ["300"])

    async def _stalled(self) -> None:
        """Reads nothing of a long answer until the server has given it up, or all of it lies in buffers."""
        asked = chat("", self._rng.choice(self._texts), 900, logprobs=20)
        call = rpc.InferenceStub(self._narrow).GenerateStream(asked, metadata=self._key(), timeout=ANSWER_S)
        await asyncio.sleep(2 * STALL_S)
        status = OK
        try:
            async for _ in call:
                continue
        except grpc.aio.AioRpcError as e:
            status = e.code().name
        self.heard.note("stalled", status, OK, "RESOURCE_EXHAUSTED")

    async def _change(self) -> None:
        """A guest comes, answers and goes; the live adapter is replaced, or goes and comes."""
        i = self._rng.randrange(1000)
        guest, version, text = f"guest{i % GUESTS}", MODELS[1:][i % 4], self._rng.choice(self._texts)
        await self._load(guest, version)
        self.heard.check("guest", await self._unary(guest, text), [self._known[version, text]])
        await self._load(LIVE, VERSIONS[i % 2])
        if i % 4 == 0:
            await self._unload(LIVE)
            await self._load(LIVE, VERSIONS[i % 2])
        if i % 8 == 0:
            await self._control.FlushCache(pb.FlushCacheRequest(), metadata=self._admin, timeout=ANSWER_S)
        await self._unload(guest)

    async def _load(self, name: str, task: str) -> None:
        asked = pb.LoadAdapterRequest(name=name, path=str(assets.adapter_path(task)), replace=True)
        await self._adapters.LoadAdapter(asked, metadata=self._admin, timeout=ANSWER_S)
        self.heard.note("load", OK, OK)

    async def _unload(self, name: str) -> None:
        await self._adapters.UnloadAdapter(pb.UnloadAdapterRequest(name=name), metadata=self._admin, timeout=ANSWER_S)
        self.heard.note("unload", OK, OK)

    def _key(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._rng.choice(self._server.tenants)}"),)


def chat(model: str, text: str, tokens: int = 0, logprobs: int | None = None) -> pb.GenerateRequest:
    """A greedy request, to its end or for exactly `tokens` tokens."""
    return pb.GenerateRequest(
        model=model,
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]),
        sampling=pb.Sampling(temperature=0.0),
        stopping=pb.Stopping(max_tokens=tokens or 256, ignore_eos=tokens > 0),
        logprobs=logprobs,
    )
