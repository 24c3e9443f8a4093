"""Calls leave no cycles of the server's objects: a busy server collects old ones every quarter of an hour only."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from types import CoroutineType, FrameType, FunctionType
from typing import Any

import grpc
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests.serve._server import Served, request, wait_until

CALLS = 10
LONG = 4000  # tokens: such a request still runs when its client leaves
WRONG: dict[str, Any] = {"temperature": -1.0}
TWO: dict[str, Any] = {"prompt": [[5, 6, 7], [8, 9]], "stream": True}


class Client:
    """One call of each kind; errors are what many of them are for."""

    def __init__(self, served: Served, adapters: Path):
        self._served = served
        self._adapters = adapters

    def unary(self, model: str = "", timeout: float = 60.0, **fields: Any) -> None:
        message = request(**fields)
        message.model = model
        self._served.inference.Generate(message, timeout=timeout)

    def stream(self, model: str = "", timeout: float = 60.0, **fields: Any) -> None:
        message = request(**fields)
        message.model = model
        list(self._served.inference.GenerateStream(message, timeout=timeout))

    def cancel(self) -> None:
        call = self._served.inference.GenerateStream(request(max_tokens=LONG), timeout=60)
        next(call)
        call.cancel()

    def post(self, path: str = "/v1/completions", read: bool = True, old: bool = False, **body: Any) -> None:
        connection = HTTPConnection(self._served.http.removeprefix("http://"), timeout=60)
        if old:
            vars(connection)["_http_vsn"], vars(connection)["_http_vsn_str"] = 10, "HTTP/1.0"
        sent = body if "lora_name" in body else {"model": "base", "prompt": [5, 6, 7], "max_tokens": 8, **body}
        connection.request("POST", path, json.dumps(sent), {"content-type": "application/json"})
        answer = connection.getresponse()
        if read:
            answer.read()
        else:
            answer.read(1)
        connection.close()

    def adapter(self) -> None:
        stub = self._served.adapters
        load = pb.LoadAdapterRequest(name="new", path=str(self._adapters / "upper"))
        stub.LoadAdapter(load, timeout=60)
        self.unary("new")
        load.replace, load.path = True, str(self._adapters / "lower")
        stub.LoadAdapter(load, timeout=60)
        stub.UnloadAdapter(pb.UnloadAdapterRequest(name="new"), timeout=60)

    def load(self, name: str, path: str) -> None:
        self._served.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=str(self._adapters / path)))

    def unload(self) -> None:
        self._served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="nobody"))

    def pin(self) -> None:
        self._served.adapters.PinAdapter(pb.PinAdapterRequest(name="nobody", pinned=True))


KINDS: dict[str, Callable[[Client], None]] = {
    "stream": lambda client: client.stream(),
    "unary": lambda client: client.unary(),
    "http stream": lambda client: client.post(stream=True),
    "http": lambda client: client.post(),
    "http 1.0": lambda client: client.post(stream=True, old=True),
    "http, two prompts": lambda client: client.post(**TWO),
    "cancelled": lambda client: client.cancel(),
    "http cut": lambda client: client.post(stream=True, max_tokens=LONG, ignore_eos=True, read=False),
    "refused": lambda client: client.unary(**WRONG),
    "stream refused": lambda client: client.stream(**WRONG),
    "http refused": lambda client: client.post(**WRONG),
    "unknown model": lambda client: client.unary("nobody"),
    "http, unknown model": lambda client: client.post(model="nobody"),
    "deadline": lambda client: client.unary(timeout=0.05, max_tokens=LONG),
    "stream deadline": lambda client: client.stream(timeout=0.05, max_tokens=LONG),
    "load, replace, unload": lambda client: client.adapter(),
    "load fails": lambda client: client.load("new", "nowhere"),
    "load of a taken name": lambda client: client.load("upper", "upper"),
    "http load fails": lambda client: client.post("/v1/load_lora_adapter", lora_name="new", lora_path="/nowhere"),
    "unload fails": lambda client: client.unload(),
    "pin fails": lambda client: client.pin(),
}


@pytest.fixture(scope="module")
def client(served: Served, text_model: Path) -> Iterator[Client]:
    """With the collector off, and all that exists before left out of its collections."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield Client(served, text_model.parent / "adapters")
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_leaves_no_cycles(kind: str, client: Client, served: Served):
    gc.collect()
    for _ in range(CALLS):
        with suppress(grpc.RpcError):
            KINDS[kind](client)
    wait_until(lambda: not served.stats().live_requests)
    wait_until(lambda: not served.backend.leaving)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        ours = Counter(name for found in gc.garbage if (name := _ours(found)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert ours.total() < CALLS, ours.most_common(10)  # each call would leave at least a frame and its error


def _ours(found: object) -> str:
    """What the server's code made, but the messages, which the client in this process has, too."""
    if isinstance(found, FrameType):
        module, name = found.f_globals.get("__name__", ""), found.f_code.co_qualname
    elif isinstance(found, FunctionType | CoroutineType):
        module, name = getattr(found, "__module__", "") or "", found.__qualname__
    else:
        module, name = type(found).__module__, type(found).__qualname__
    return f"{module}.{name}" if module.startswith(("jlora.", "uvicorn.")) and "_pb2" not in module else ""
