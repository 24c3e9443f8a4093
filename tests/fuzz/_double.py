"""A replica without an engine, which answers at once, and the ends of gRPC calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

import grpc

from jlora.cluster import link
from jlora.engine.futures import done, failed, running
from jlora.errors import AlreadyExists, FailedPrecondition, NotFound
from jlora.replica import Replica, ReplicaInfo, ReplicaState, Sink
from jlora.serve.status import MESSAGE_BYTES
from jlora.types import (
    AdapterInfo,
    CacheState,
    EngineStats,
    Owners,
    PrefetchResult,
    ProfileResult,
    Request,
    TierState,
    Timing,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from jlora.validation import validate
from tests.cluster._links import INFO

TOKENS = 2  # of an answer
TIER = TierState(100, 90, 5, 5, 0)
STATE = ReplicaState(CacheState("jlora", TIER, TIER, *[0] * 21), EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0), 0.0)


def adapter_info(name: str) -> AdapterInfo:
    """What is told of an adapter."""
    return AdapterInfo(name, 1, "d" * 64, 4, {"layers.0.q": 4}, ("q",), 9, 1, "HOST", False, 0, 0, 0, -1.0, 0.0)


class Double(Replica):
    """Checks that what it gets is canonical, and answers it. It knows the adapter "sql".

    Attributes:
        live: handle -> the request of each that has not ended.
        patient: requests stay live until they are stopped or aborted.
    """

    info: ReplicaInfo = INFO
    compiling = False
    programs_left = 0
    failure: Future[BaseException] = running()

    def __init__(self, patient: bool = False) -> None:
        self.live: dict[int, tuple[Request, Sink]] = {}
        self.patient = patient
        self._handles = itertools.count(1)

    def check(self, request: Request) -> Future[None]:
        return done(None) if request.adapter in (None, "sql") else failed(NotFound(f"adapter {request.adapter!r}"))

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        assert validate(request, self.info.limits) == request
        if request.adapter not in (None, "sql", "sql@1"):
            return failed(NotFound(f"adapter {request.adapter!r} is not loaded", ["sql"]))
        if any((r.tenant, r.id) == (request.tenant, request.id) for r, _ in self.live.values()):
            return failed(AlreadyExists(f"request_id {request.id!r} is in use by a live request"))
        handle = next(self._handles)
        self.live[handle] = request, sink
        for index in request.open:
            sink([self._token(request, index, i, handle) for i in range(self._count(request) - self.patient)])
        if not self.patient:
            del self.live[handle]
        return done(handle)

    def _count(self, request: Request) -> int:
        return min(request.sampling.max_tokens or TOKENS, TOKENS)

    def _token(self, request: Request, index: int, i: int, handle: int) -> TokenEvent:
        token, sampling, last = 300 + i, request.sampling, i == self._count(request) - 1
        scored = TokenLogprob(token, -0.5, ((1, -0.5),) * (sampling.logprobs or 0))
        prompt = (None, *(TokenLogprob(t, -1.0) for t in request.prompt[1:]))
        ends = _ends(request, i + 1) if last else {}
        return TokenEvent(
            request.id, index, token, None if sampling.logprobs is None else scored,
            prompt if sampling.prompt_logprobs is not None and not (index or i) else None, handle=handle, **ends,
        )  # fmt: skip

    def abort(self, handle: int, moved: bool = False) -> Future[bool]:
        return done(self.live.pop(handle, None) is not None)

    def abort_named(self, request_id: str, tenant: str = "") -> Future[bool]:
        return done(False)

    def stop(self, handle: int, index: int, outputs: int) -> Future[None]:
        assert handle in self.live or not self.patient
        return done(None)

    def prefetch(self, request: Request) -> Future[PrefetchResult]:
        assert validate(request, self.info.limits) == request
        return done(PrefetchResult(False, 0, 0))

    def load_adapter(
        self, name: str, path: str, pinned: bool = False, replace: bool = False, lazy: bool = False
    ) -> Future[AdapterInfo]:
        return done(adapter_info(name))

    def unload_adapter(self, name: str) -> Future[AdapterInfo]:
        return self.adapter(name)

    def pin_adapter(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        return self.adapter(name)

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        return done([adapter_info("sql")] if after < "sql" else [])

    def adapter(self, name: str) -> Future[AdapterInfo]:
        return done(adapter_info(name)) if name == "sql" else failed(NotFound(f"adapter {name!r} is not loaded"))

    def check_adapter(self, name: str) -> None:
        if name != "sql":
            raise NotFound(f"adapter {name!r} is not loaded")

    def state(self) -> Future[ReplicaState]:
        return done(STATE)

    def owners(self) -> Future[Owners]:
        return done(Owners((), 1, {}, whole=False))

    def flush_cache(self) -> Future[int]:
        return done(0)

    def profile(self, steps: int, replica: str = "") -> Future[ProfileResult]:
        return failed(FailedPrecondition("serve.profile_dir: is not set"))

    def drain(self, timeout_s: float | None = None) -> Future[bool]:
        return done(True)

    def heartbeat_age(self) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing to end."""


def _ends(request: Request, tokens: int) -> dict[str, Any]:
    return {"finish_reason": "length", "usage": Usage(len(request.prompt), 0, tokens), "timing": Timing(ttft=0.1)}


class Aborted(Exception):
    """What gRPC raises in a handler that ends its call."""


class Context:
    """The server's end of a call: what the client sends, and what it gets.

    Attributes:
        code: that of the end, once there is one.
        written: messages of a stream.
    """

    def __init__(self, messages: Sequence[Any]):
        self._messages = list(reversed(messages))
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.written: list[Any] = []

    async def read(self) -> Any:
        return self._messages.pop() if self._messages else link.EOF

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """A client gets it."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        assert len(quote(details, safe=" ")) <= MESSAGE_BYTES, "peers take 8 KiB of headers"
        self.code, self.details = code, details
        raise Aborted

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()
