"""What clients send: protobuf messages of every call, HTTP bodies and heads of every route.

Both go through the server's own handlers, from the interceptor to the answer's bytes, over a replica that answers at
once. Between two inputs nothing may be left: no call, completion or byte counts as under way.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec

from jlora.config import ServeConfig
from jlora.serve.backend import Backend
from jlora.serve.http.server import application
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.services import AdaptersServicer, ControlServicer, InferenceServicer
from jlora.serve.status import StatusInterceptor
from jlora.serve.tokenizer import Tokenizer
from tests.cluster._links import VOCAB
from tests.fuzz._double import Aborted, Context, Double
from tests.fuzz._engine import Target
from tests.fuzz._structure import of_json, of_message
from tests.serve import _tokenizers

LOST_S = 60.0  # of waiting: the call has hung


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, str]) -> str:
    """On a loop that lives as long as the process."""

    async def bounded() -> str:
        async with asyncio.timeout(LOST_S):
            return await work

    return _loop().run_until_complete(bounded())


@cache
def _backend() -> Backend:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(_tokenizers.byte_level(VOCAB), config, _tokenizers.CHAT_TEMPLATE)
    return Backend(Double(), tokenizer, serving=True)


def _check_at_rest(backend: Backend) -> None:
    assert not any(backend.gate.held)
    assert not backend.replica.live and not backend.leaving  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    backend.draining = False


class _Collector:
    """A server that keeps the handlers which are added to it."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Those of before, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


def _handlers(backend: Backend) -> dict[str, Any]:
    server: Any = _Collector()
    rpc.add_InferenceServicer_to_server(InferenceServicer(backend), server)
    rpc.add_AdaptersServicer_to_server(AdaptersServicer(backend), server)
    rpc.add_ControlServicer_to_server(ControlServicer(backend), server)
    return server.handlers


def protobuf() -> Target:
    """A byte for the method, then its message."""
    backend = _backend()
    interceptor, handlers = StatusInterceptor(backend, 30.0), _handlers(backend)
    methods = sorted(handlers)

    async def call(data: bytes) -> str:
        method = methods[data[0] % len(methods)] if data else methods[0]

        async def found(_: Any) -> Any:
            return handlers[method]

        details: Any = SimpleNamespace(method=method, invocation_metadata=())
        handler = await interceptor.intercept_service(found, details)
        context: Any = Context([handler.request_deserializer(data[1:])])
        try:
            if handler.response_streaming:
                await handler.stream_stream(None, context)
            else:
                context.written.append(await handler.stream_unary(None, context))
        except Aborted:
            pass
        for answer in context.written:
            handler.response_serializer(answer)
        _check_at_rest(backend)
        return "OK" if context.code is None else context.code.name

    def change(data: bytes, draw: random.Random) -> bytes:
        kind = type(_asked_by(methods[data[0] % len(methods) if data else 0]))
        return data[:1] + of_message(data[1:], kind, draw)

    return Target("protobuf", lambda data: run(call(data)), list(_messages(methods)), WORDS, change)


def _asked_by(method: str) -> Any:
    """An empty message of the method."""
    service, _, name = method.removeprefix("/jlora.v1.").partition("/")
    kind = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name].input_type
    return getattr(pb, kind.name)()


WORDS = (
    b"base",
    b"sql",
    b"base:sql",
    b"user",
    b"Hello",
    b"sql@1",
    b"../x",
    b"a" * 300,
    b"x" * 1100,
    b"\xf0\x9f\x98\x80",
)


def _messages(methods: list[str]) -> Iterator[bytes]:
    """A valid message of every method, and more of those that take much."""
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="user", content="Hello"), pb.ChatMessage(role="assistant", content="x")]
    )
    full: dict[str, Any] = dict(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=-3, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={3: -1.5}, n=3, max_tokens=9, min_tokens=2, stop=["a", "\n"],
        stop_token_ids=[7, 8], include_stop=True, ignore_eos=True, logprobs=2, prompt_logprobs=1, priority=-2,
        tenant="t", cache_salt="s", request_id="r", model="base:sql", bypass_prefix_cache=True,
    )  # fmt: skip
    generate = [_request("Hello there"), _request(chat), _request((5, 6, 7), **full), _request("x", **full)]
    messages: dict[str, list[Any]] = {
        **{name: generate for name in ("Generate", "GenerateStream", "Prefetch")},
        "Tokenize": [pb.TokenizeRequest(text="Hello"), pb.TokenizeRequest(chat=chat)],
        "Detokenize": [pb.DetokenizeRequest(token_ids=[5, 6, 300], keep_special=True)],
        "LoadAdapter": [pb.LoadAdapterRequest(name="sql", path="/a", pinned=True, replace=True, lazy=True)],
        "ListAdapters": [pb.ListAdaptersRequest(page_size=1, page_token="a", view=1)],
        "Abort": [pb.AbortRequest(request_id="r", tenant="t")],
        "Drain": [pb.DrainRequest(timeout_s=1.5)],
        "Profile": [pb.ProfileRequest(steps=3)],
        "PinAdapter": [pb.PinAdapterRequest(name="sql", pinned=True)],
        "UnloadAdapter": [pb.UnloadAdapterRequest(name="sql")],
        "GetAdapter": [pb.GetAdapterRequest(name="sql")],
    }
    for i, method in enumerate(methods):
        for message in messages.get(method.rpartition("/")[2], [pb.GetCacheStateRequest()]):
            yield bytes([i]) + message.SerializeToString()


def _request(prompt: str | pb.Chat | tuple[int, ...], **fields: Any) -> pb.GenerateRequest:
    """A request; fields of sampling and stopping go by their names."""
    made = pb.GenerateRequest()
    if isinstance(prompt, str):
        made.text = prompt
    elif isinstance(prompt, pb.Chat):
        made.chat.CopyFrom(prompt)
    else:
        made.token_ids.ids.extend(prompt)
    for name, value in fields.items():
        where = next(m for m in (made, made.sampling, made.stopping) if name in m.DESCRIPTOR.fields_by_name)
        if isinstance(value, dict):
            getattr(where, name).update(value)
        elif isinstance(value, list):
            getattr(where, name).extend(value)
        else:
            setattr(where, name, value)
    return made


GENERATION = {
    "model": "base", "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 3, "max_tokens": 5,
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1.5},
    "min_tokens": 1, "stop": ["x"], "stop_token_ids": [7], "include_stop_str_in_output": True, "ignore_eos": True,
    "priority": 1, "cache_salt": "s", "bypass_prefix_cache": False, "request_id": "r", "return_token_ids": True,
    "user": "u", "response_format": {"type": "text"}, "stream": False,
}  # fmt: skip
PROMPT = {"prompt": ["Hello", [5, 6]], "echo": True, "logprobs": 2}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "top_logprobs": 2, "logprobs": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None, "tool_calls": []}]}
# Path -> bodies. Behind "GET" or a header's name, the input is the end of the path or the header's value.
ROUTES: tuple[tuple[str, str, list[Any]], ...] = (
    ("POST", "/v1/completions", [{**GENERATION, **PROMPT}, {"prompt": "x", **STREAM}, {"prompt": [1, 2]}]),
    ("POST", "/v1/chat/completions", [{**GENERATION, **CHAT}, {**PARTS, **STREAM}, {**PARTS, "max_tokens": 2}]),
    ("POST", "/v1/prefetch", [{"prompt": "Hello", "model": "sql", "cache_salt": "x"}, {"prompt": [1, 2]}, PARTS]),
    ("POST", "/tokenize", [{"prompt": "Hello", "return_token_strs": True}, {**PARTS, "add_generation_prompt": False}]),
    ("POST", "/detokenize", [{"tokens": [5, 300], "model": "base"}]),
    ("POST", "/v1/load_lora_adapter", [{"lora_name": "a", "lora_path": "/a", "load_inplace": True, "pinned": True}]),
    ("POST", "/v1/unload_lora_adapter", [{"lora_name": "sql", "lora_int_id": None}]),
    ("POST", "/debug/profile", [{"steps": 3}, {}]),
    ("GET", "/v1/models/", ["sql", "base", "base:sql", "../x"]),
    ("GET", "/", ["health", "ready", "version", "metrics", "v1/models", "dashboard/page.js"]),
    ("host", "/version", ["localhost:80", "127.0.0.1", "[::1]:1", "x@localhost"]),
    ("authorization", "/version", ["Bearer jlora-1f2e3d4c-x"]),
    ("accept", "/metrics", ["application/openmetrics-text; version=1.0.0; escaping=underscores"]),
    ("content-type", "/tokenize", ["application/json; charset=utf-8"]),
    ("traceparent", "/tokenize", ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]),
    ("query", "/debug/profile", ["steps=3&a=b"]),
)  # fmt: skip


def http() -> Target:
    """A byte for the route, then a body, the end of a path, or a header's value."""
    backend, config = _backend(), ServeConfig()
    app = application(backend, config)

    async def call(data: bytes) -> str:
        kind, path, bodies = ROUTES[data[0] % len(ROUTES)] if data else ROUTES[0]
        content, body = data[1:], b""
        headers = {"host": b"localhost", "content-type": b"application/json"}
        if kind == "POST":
            body = content
        elif kind == "GET":
            path += content.decode("utf-8", "replace")  # as uvicorn unquotes it
        elif kind != "query":
            headers[kind] = content
            body = json.dumps({"prompt": "Hello"}).encode() if path == "/tokenize" else b""
        method = "POST" if body or kind in ("POST", "query") or path == "/tokenize" else "GET"
        if path == "/dashboard/events":
            return "endless"
        headers["content-length"] = str(len(body)).encode()
        scope = _scope(method, path, content if kind == "query" else b"", headers)
        status = await _asked(app, scope, body)
        _check_at_rest(backend)
        return "INTERNAL" if status == 500 else str(status)

    seeds = [
        bytes([i]) + (body.encode() if isinstance(body, str) else json.dumps(body).encode())
        for i, (_, _, bodies) in enumerate(ROUTES)
        for body in bodies
    ]
    keys = sorted({key for _, _, bodies in ROUTES for body in bodies if isinstance(body, dict) for key in body})
    words = [*WORDS, *(json.dumps(key).encode() for key in keys)]
    return Target(
        "http", lambda data: run(call(data)), seeds, words, lambda data, draw: data[:1] + of_json(data[1:], draw)
    )


def _scope(method: str, path: str, query: bytes, headers: dict[str, bytes]) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
        "path": path, "raw_path": path.encode("utf-8", "surrogateescape"), "query_string": query, "root_path": "",
        "headers": [(name.encode(), value) for name, value in headers.items()], "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80), "state": {"cut": lambda: None},
    }  # fmt: skip


async def _asked(app: Any, scope: dict[str, Any], body: bytes) -> int:
    """The status of the answer, whose form is checked."""
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    status, content = sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
    assert not sent[-1].get("more_body")
    for name, value in sent[0]["headers"]:
        assert b"\n" not in value and b"\r" not in value, name
    if status >= 400 and scope["method"] != "HEAD":
        assert set(msgspec.json.decode(content)["error"]) == {"message", "type", "param", "code"}
    if b"data: " == content[:6]:
        failed = [part for part in content.split(b"\n\n") if part.startswith(b'data: {"error"')]
        return 500 if failed and msgspec.json.decode(failed[0][6:])["error"]["code"] is None else status
    return status
