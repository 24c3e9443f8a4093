"""gRPC servers: what one serves, how it is asked, and one that the benchmark starts itself."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import grpc

from jlora import machine
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.sim.trace import Turn
from jlora.types import ColdStart, Timing, Usage

LOOK_S = 0.5  # between two looks at a server that still compiles


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself: its adapters with their pool blocks, and which of them a prompt must invoke."""

    address: str
    info: pb.ServerInfo
    adapters: Mapping[str, int]
    activated: frozenset[str] = frozenset()
    login: Login = Login()

    def describe(self) -> Mapping[str, object]:
        names = ("version", "model", "platform", "tp", "dtype", "max_model_len", "block_tokens", "blocks")
        plain = {name: getattr(self.info, name) for name in names}
        return {**plain, "devices": list(self.info.devices), "config": dict(self.info.config)}


async def look(address: str, login: Login | None = None, timeout_s: float = 10.0) -> Server:
    """Asks a server what it serves, once all its programs are compiled. Raises RuntimeError if nothing answers."""
    login = login or Login()
    call = {"timeout": timeout_s, "metadata": login.metadata}
    async with login.aio(address) as channel:
        try:
            control = rpc.ControlStub(channel)
            while (info := await control.GetServerInfo(pb.GetServerInfoRequest(), **call)).programs_left:
                await asyncio.sleep(LOOK_S)
            listed = [adapter async for adapter in _adapters(rpc.AdaptersStub(channel), call)]
        except grpc.aio.AioRpcError as e:
            raise RuntimeError(f"no jlora server at {address}: {e.code().name}: {e.details()}") from e
    activated = frozenset(adapter.name for adapter in listed if adapter.alora_invocation_tokens)
    return Server(address, info, {adapter.name: adapter.blocks for adapter in listed}, activated, login)


async def _adapters(stub: rpc.AdaptersStub, call: Mapping[str, Any]) -> AsyncIterator[pb.AdapterInfo]:
    """Page by page."""
    asked = pb.ListAdaptersRequest()
    while True:
        page = await stub.ListAdapters(asked, **call)
        for adapter in page.adapters:
            yield adapter
        if not page.next_page_token:
            return
        asked.page_token = page.next_page_token


class Part(NamedTuple):
    """New tokens of an answer. Usage and timing come with the last part."""

    tokens: Sequence[int] = ()
    usage: Usage | None = None
    timing: Timing | None = None


class Failed(Exception):
    """A server did not answer a request: `status` names the gRPC status, `detail` gives its words."""

    def __init__(self, status: str, detail: str):
        super().__init__(f"{status}: {detail}")
        self.status, self.detail = status, detail


class GrpcTarget:
    """Asks a server greedy requests."""

    def __init__(self, channel: grpc.aio.Channel, login: Login | None = None):
        self._stub, self._login = rpc.InferenceStub(channel), login or Login()

    async def ask(self, model: str, prompt: Sequence[int], turn: Turn) -> AsyncIterator[Part]:
        """Streams exactly `turn.output` tokens of the adapter `model` ("": the base model). Raises Failed."""
        request = exactly(turn.output, prompt, model=model, session=str(turn.session))
        stream = self._stub.GenerateStream(request, metadata=self._login.metadata)
        try:
            async for delta in stream:
                tokens = [token for output in delta.outputs for token in output.token_ids]
                yield Part(tokens, *(_end(delta) if delta.HasField("usage") else (None, None)))
        except grpc.aio.AioRpcError as e:
            raise Failed(e.code().name, e.details() or "") from e
        finally:
            stream.cancel()


def exactly(tokens: int, prompt: Iterable[int], seed: int | None = None, **fields: Any) -> pb.GenerateRequest:
    """A request for so many tokens, whatever ends a text: greedy, or with a seed drawn at temperature 1."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.Sampling(temperature=0.0 if seed is None else 1.0, seed=seed),
        stopping=pb.Stopping(max_tokens=tokens, ignore_eos=True),
        **fields,
    )


def _end(delta: pb.GenerateResponse) -> tuple[Usage, Timing]:
    usage, timing = delta.usage, delta.timing
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), Timing(
        queue=timing.queue_s,
        adapter_cold_start=timing.adapter_cold_start_s,
        kv_cold_start=timing.kv_cold_start_s,
        prefill=timing.prefill_s,
        ttft=timing.ttft_s,
        tpot=timing.tpot_s,
        cold_start=cast(ColdStart, timing.cold_start),
    )


class ServerProcess:
    """A `jlora serve` process on a free port, stopped at the end of a `with` block; ready once this is made.

    Raises RuntimeError if it ends before.
    """

    def __init__(self, flags: Sequence[str], command: Sequence[str] = ("jlora.serve",)):
        """`command`: another module with the same ready line, and its first arguments."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": machine.python_path()},
        )
        self.address, self.http = self._ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Ctrl-C reaches the process, too: it may end in another way, and the interrupt is what counts.
        with suppress(*(() if kind is None else (RuntimeError,))):
            self.stop()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends the process a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit code, once the process has ended by itself. Raises subprocess.TimeoutExpired."""
        code = self._process.wait(timeout_s)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def stop(self) -> None:
        """Ends the process as an operator would. Raises RuntimeError if it does not end by itself, with code 0."""
        self._process.terminate()
        try:
            code = self.wait(60)
        except subprocess.TimeoutExpired as e:
            self._process.kill()
            raise RuntimeError("the server did not stop within 60 s of SIGTERM") from e
        if code != 0:
            raise RuntimeError(f"the server's exit code after SIGTERM was {code}")

    def _ready(self) -> tuple[str, str]:
        """The addresses of gRPC and HTTP, "" without HTTP."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.match(r"jlora (?:cluster )?ready grpc=(\S+)(?: http=(\S+))?", line):
                return found[1], found[2] or ""
        self._process.stdout.close()
        raise RuntimeError(f"the server ended with code {self._process.wait()} before it was ready")


def flags_of(adapters: Mapping[str, str], settings: Mapping[str, object]) -> list[str]:
    """`--adapter` and `--set` flags."""
    flags = [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
    return flags + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
