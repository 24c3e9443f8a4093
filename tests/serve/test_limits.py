"""What costs work is bounded before the work begins: texts, chats, ids, messages and bursts of calls."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora.config import ServeConfig
from jlora.errors import Busy, QueueFull, ResourceExhausted
from jlora.serve import workers
from jlora.serve.backend import Backend
from jlora.serve.gate import MOST_CALLS, Gate, Room
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.texts import MAX_MESSAGES
from tests.serve._server import MAX_LEN, SMALL, VOCAB, Served, refused, request, serve, serving, wait_until

CODE = grpc.StatusCode
QUEUE, SEATS = SMALL["engine.max_queue"], SMALL["engine.max_seqs"]
ROOM = QUEUE + SEATS


class Work:
    """Counts what reaches the tokenizer of a server."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch):
        self.texts: list[int] = []
        self.threads: set[str] = set()
        tokenizer = served.backend.tokenizer
        assert tokenizer is not None
        self.most_chars = MAX_LEN * tokenizer.chars_per_token
        whole, render, decode = tokenizer.encode, tokenizer.render, tokenizer.decode

        def noted(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(given: Any, *args: Any, **named: Any) -> Any:
                self.texts.append(len(given))
                self.threads.add(threading.current_thread().name)
                return inner(given, *args, **named)

            return call

        monkeypatch.setattr(tokenizer, "encode", noted(whole))
        monkeypatch.setattr(tokenizer, "render", noted(render))
        monkeypatch.setattr(tokenizer, "decode", noted(decode))


@pytest.fixture
def work(served: Served, monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(served, monkeypatch)


# -- texts --------------------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(served: Served, work: Work):
    text = "x" * (work.most_chars + 1)
    said = ("prompt.text", str(len(text)), f"at most {work.most_chars}", str(MAX_LEN))
    for call in (served.generate, served.streamed, served.inference.Prefetch):
        with refused(CODE.OUT_OF_RANGE, *said):
            call(request(text))
    with refused(CODE.OUT_OF_RANGE, *said):
        served.inference.Tokenize(pb.TokenizeRequest(text=text))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text[:-100])] * 2)
    with refused(CODE.OUT_OF_RANGE, "prompt.chat", f"at most {work.most_chars}"):
        served.generate(request(chat))
    assert not work.texts


def test_a_text_that_may_fit_is_tokenized_beside_the_loop(served: Served, work: Work):
    with refused(CODE.OUT_OF_RANGE, "prompt: has", str(MAX_LEN)):
        served.generate(request("x" * work.most_chars))
    counted = served.inference.Tokenize(pb.TokenizeRequest(text="x" * work.most_chars))
    assert len(counted.token_ids) > MAX_LEN, "Tokenize also says by how much a prompt is too long"
    assert work.texts == [work.most_chars] * 2
    assert all(name.startswith("jlora-text") for name in work.threads)


def test_a_text_that_the_memory_does_not_hold_is_refused(served: Served, work: Work, monkeypatch: pytest.MonkeyPatch):
    """The tokenizer's library would abort the process."""
    monkeypatch.setattr(workers.machine, "spare_bytes", lambda: 20 << 20)
    with refused(CODE.RESOURCE_EXHAUSTED, "too little memory for a text of 20481 characters"):
        served.inference.Tokenize(pb.TokenizeRequest(text="x" * 20_481))
    assert not work.texts
    for count in (20_480, 2000):
        assert served.inference.Tokenize(pb.TokenizeRequest(text="x" * count)).token_ids
    monkeypatch.undo()
    assert served.inference.Tokenize(pb.TokenizeRequest(text="x" * 20_481)).token_ids


def test_what_a_template_adds_to_a_chat_takes_memory_too(served: Served, work: Work, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers.machine, "spare_bytes", lambda: 20 << 20)
    monkeypatch.setattr(served.backend.tokenizer, "render", lambda *_: "x" * 20_481)
    with refused(CODE.RESOURCE_EXHAUSTED, "too little memory for a text of 20481 characters"):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])
        served.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    assert not work.texts


def test_a_text_whose_client_has_gone_counts_until_its_thread_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "WAITING_CHARS", 5000)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(20)

    async def three() -> None:
        texts = workers.Workers()
        first = asyncio.create_task(texts.run(3000, slow))
        await asyncio.to_thread(begun.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(Busy, match="3000 characters wait"):
            await texts.run(3000, slow)
        go_on.set()
        while True:
            with suppress(Busy):
                return await texts.run(3000, slow)
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(three(), 20))


@pytest.mark.parametrize("threads", [0, 1])
def test_a_text_that_gets_no_thread_counts_no_more(served: Served, monkeypatch: pytest.MonkeyPatch, threads: int):
    """The machine, or a container's limit of processes, may refuse a thread at any time."""
    monkeypatch.setattr(workers, "WAITING_CHARS", 5000)
    start, ran = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("jlora-text"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def two() -> None:
        texts, go_on = workers.Workers(), threading.Event()
        running = [asyncio.create_task(texts.run(1100, lambda: go_on.wait(20))) for _ in range(threads)]
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with pytest.raises(Busy, match="starts no more threads"):
                    await texts.run(3000, lambda: ran.append("refused"))
        go_on.set()
        assert await texts.run(3000, lambda: "done") == "done"
        await asyncio.gather(*running)

    asyncio.run(asyncio.wait_for(two(), 20))
    assert not ran
    monkeypatch.setattr(served.backend, "workers", workers.Workers())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with refused(CODE.RESOURCE_EXHAUSTED, "starts no more threads"):
        served.inference.Tokenize(pb.TokenizeRequest(text="x" * 2000))


def test_a_limit_of_the_address_space_is_seen():
    code = """
import resource
from jlora import machine
whole = machine.spare_bytes()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), -1))
assert (32 << 20) < machine.spare_bytes() <= 64 << 20 < whole, machine.spare_bytes()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_chat_is_bounded_by_the_number_of_its_messages(served: Served, work: Work):
    chat = pb.Chat(messages=[pb.ChatMessage()] * (MAX_MESSAGES + 1))
    with refused(CODE.INVALID_ARGUMENT, "messages", str(MAX_MESSAGES + 1), f"at most {MAX_MESSAGES}"):
        served.generate(request(chat))
    with refused(CODE.INVALID_ARGUMENT, f"at most {MAX_MESSAGES}"):
        served.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    assert not work.texts


def test_ids_are_counted_before_they_are_looked_at(served: Served, work: Work):
    with refused(CODE.OUT_OF_RANGE, "500000 tokens", str(MAX_LEN)):
        served.generate(request([VOCAB] * 500_000))  # none of them is valid
    with refused(CODE.INVALID_ARGUMENT, "token_ids: has 500000 ids", f"{MAX_LEN}"):
        served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[5] * 500_000))
    assert not work.texts
    served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[5] * MAX_LEN))
    assert work.texts == [MAX_LEN] and all(name.startswith("jlora-text") for name in work.threads)


def test_what_waits_for_the_tokenizer_is_bounded(served: Served, work: Work, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "WAITING_CHARS", 5000)
    free, tokenizer = threading.Event(), served.backend.tokenizer
    assert tokenizer is not None
    whole = tokenizer.encode

    def slow(*args: Any, **named: Any) -> list[int]:
        assert free.wait(20)
        return whole(*args, **named)

    monkeypatch.setattr(tokenizer, "encode", slow)
    first = served.inference.Generate.future(request("y" * 3000))
    calls = [served.inference.Generate.future(request("z" * 3000)) for _ in range(5)]
    for call in calls:
        assert call.code() == CODE.RESOURCE_EXHAUSTED and "5000" in call.details()
    free.set()
    assert first.result(20).usage.completion_tokens == 8
    assert served.generate(request("z" * 3000)).usage.completion_tokens == 8


def test_a_message_is_bounded_after_decompression(served: Served):
    with refused(CODE.RESOURCE_EXHAUSTED, "larger than max"):
        served.inference.Generate(request("x" * (5 << 20)), compression=grpc.Compression.Gzip)
    assert served.generate(request()).usage.completion_tokens == 8


class Silent:
    """A client's messages: none, until the test ends them."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __iter__(self) -> Silent:
        return self

    def __next__(self) -> bytes:
        self.ended.wait(30)
        raise StopIteration


@pytest.mark.parametrize("method", ["Inference/Generate", "Inference/GenerateStream", "Control/GetServerInfo"])
def test_a_call_whose_message_does_not_arrive_ends(served: Served, method: str):
    with serving(served.backend, ServeConfig(stall_s=0.2)) as front, grpc.insecure_channel(front.address) as channel:
        silent = Silent()
        call = channel.stream_stream(f"/jlora.v1.{method}")(silent, timeout=20)
        assert call.code() == CODE.DEADLINE_EXCEEDED and "serve.stall_s = 0.2" in call.details()
        silent.ended.set()
        call = channel.stream_stream(f"/jlora.v1.{method}")(iter(()), timeout=20)
        assert call.code() == CODE.INVALID_ARGUMENT and "without a message" in call.details()
        assert front.generate(request()).usage.completion_tokens == 8


def test_a_running_request_holds_no_message(served: Served):
    """A message of 4 MiB may take 100 MB in memory: protobuf keeps what a later value of the same field replaced."""
    wire = request("Hello", 1300, request_id="dropped").SerializeToString()
    stub = served.channel.unary_stream("/jlora.v1.Inference/GenerateStream")
    call = stub(wire)
    next(call)
    messages = [found for found in gc.get_objects() if type(found) is pb.GenerateRequest]
    assert not [message for message in messages if message.request_id == "dropped"]
    call.cancel()
    served.check_idle()


# -- bursts -------------------------------------------------------------------------------------


@pytest.fixture
def full(served: Served) -> Iterator[Served]:
    """The server with a full queue."""
    with ExitStack() as stack:
        for count, live in ((SEATS, SEATS), (QUEUE, ROOM)):  # the queue alone would be too short for all at once
            for _ in range(count):
                stack.callback(served.inference.GenerateStream(request("Hello", 1300)).cancel)
            wait_until(lambda live=live: served.stats().live_requests == live and served.stats().running == SEATS)
        yield served
    served.check_idle()


def test_with_a_full_queue_a_call_is_refused_unread(full: Served, work: Work):
    said = ("queue is full", f"limit {ROOM}")
    with refused(CODE.RESOURCE_EXHAUSTED, *said):
        full.generate(request("Hello"))
    with refused(CODE.RESOURCE_EXHAUSTED, *said):
        full.streamed(request("Hello"))
    for method in ("Generate", "GenerateStream"):  # bytes that are no message: nothing has parsed them
        with refused(CODE.RESOURCE_EXHAUSTED, *said):
            list(full.channel.unary_stream(f"/jlora.v1.Inference/{method}")(b"\x1a\xff\xff"))
    assert len("Hello") not in work.texts, "only tokens of the others are turned into text"
    assert full.control.GetServerInfo(pb.GetServerInfoRequest()).waiting == QUEUE
    assert full.status() == "SERVING"


def test_completions_count_and_not_requests(served: Served, work: Work):
    with ExitStack() as stack:
        for n, waiting in ((60, 52), (ROOM - 61, 71)):
            stream = served.inference.GenerateStream(request("Hello", 3500, n=n, temperature=1.0))
            stack.callback(stream.cancel)
            wait_until(lambda waiting=waiting: served.stats().waiting == waiting)
        work.texts.clear()
        with refused(CODE.RESOURCE_EXHAUSTED, "queue is full"):
            served.generate(request("Hello", n=2))
        assert len("Hello") not in work.texts, "only tokens of the others are turned into text"
    served.check_idle()
    assert served.generate(request("Hello", n=2)).usage.completion_tokens == 16


async def burst(address: str, count: int) -> Counter[str]:
    """The statuses of so many calls at once."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)

        async def one() -> str:
            try:
                await stub.Generate(request("Hello", 4), timeout=60)
            except grpc.aio.AioRpcError as e:
                return e.code().name
            return "OK"

        return Counter(await asyncio.gather(*(one() for _ in range(count))))


@pytest.mark.slow
def test_every_call_of_a_burst_is_answered(served: Served):
    """None is CANCELLED by the transport, which nobody asked for."""
    ends = asyncio.run(burst(served.address, 3000))
    assert set(ends) <= {"OK", "RESOURCE_EXHAUSTED"} and ends["OK"] >= ROOM, ends
    served.check_idle()


@pytest.mark.parametrize("most", [ROOM, 20])
def test_grpc_takes_as_many_calls_as_the_queue_and_the_queue_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch, most: int
):
    """A router sums the queues of its replicas; all refusals are its own, none is the transport's."""
    monkeypatch.setattr("jlora.serve.server.MOST_CALLS", 2)
    with serving(Backend(served.replica, served.backend.tokenizer, most=most)) as front, ExitStack() as stack:
        for live in range(most):
            wait_until(lambda live=live: served.stats().live_requests == live)
            stack.callback(front.inference.GenerateStream(request("Hello", 1300)).cancel)
        wait_until(lambda: served.stats().live_requests == most)
        for _ in range(3):
            with refused(CODE.RESOURCE_EXHAUSTED, "queue is full", f"limit {most}"):
                front.generate(request("Hello"))
        assert front.control.GetServerInfo(pb.GetServerInfoRequest()).running == SEATS
    served.check_idle()


def test_the_bytes_of_all_messages_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch):
    """gRPC holds a message until its call ends: thousands of large ones would fill the memory."""
    monkeypatch.setattr("jlora.serve.gate.MOST_BYTES", 100_000)
    stream = served.inference.GenerateStream(request("Hello", 3500, stop=["x" * 1024] * 16, logit_bias={5: 1.0}))
    next(stream)
    large = pb.TokenizeRequest(text="x" * 90_000)
    with refused(CODE.RESOURCE_EXHAUSTED, "bytes of requests", "limit of 100000"):
        served.inference.Tokenize(large)
    stream.cancel()
    served.check_idle()
    with refused(CODE.OUT_OF_RANGE, "characters"):  # it is looked at
        served.inference.Tokenize(large)


def test_other_calls_are_bounded_too():
    gate, four = Gate(), Room(1, 3)
    with ExitStack() as stack:
        for _ in range(MOST_CALLS):
            stack.enter_context(gate.call(1, counts=True))
        with pytest.raises(ResourceExhausted, match=f"limit {MOST_CALLS}"), gate.call(1, counts=True):
            pass
        stack.enter_context(gate.call(1, counts=False))
    with gate.call(1, counts=True), gate.completions(four, 3):
        with pytest.raises(QueueFull, match="3 completions run or wait, limit 4"):
            gate.check_completions(four, 2)
        gate.check_completions(four, 5)  # never fits: the engine says why
        gate.check_completions(four, 1)


# -- readers that do not read -------------------------------------------------------------------


@pytest.mark.parametrize("asked", [  # a megabyte, in many messages or in the first: HTTP/2 sends far less unread
    request("Hello", 3500, logprobs=20), request([5] * 1500, 2500, prompt_logprobs=20),
])  # fmt: skip
def test_a_stream_that_nobody_reads_ends_and_frees_everything(text_model: Path, asked: pb.GenerateRequest):
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)]  # a window that does not grow
    with (
        serve(text_model, {"engine.warmup": False, "serve.stall_s": 0.5}) as own,
        grpc.insecure_channel(own.address, options=small) as channel,
    ):
        stalled = rpc.InferenceStub(channel).GenerateStream(asked, timeout=60)
        wait_until(lambda: own.stats().live_requests == 1)
        neighbour = own.streamed(request("Hello", 200, logprobs=20))
        assert neighbour.usage.completion_tokens == 200
        wait_until(lambda: not own.stats().live_requests)
        own.check_idle()
        assert own.stats().generated_tokens < 200 + asked.stopping.max_tokens
        own.backend.gate.check_completions(Room(0, 1))  # it holds no place
        got: list[pb.GenerateResponse] = []
        with refused(CODE.RESOURCE_EXHAUSTED, "serve.stall_s = 0.5"):
            got.extend(stalled)


@pytest.mark.slow
def test_a_stream_that_is_read_too_slowly_ends_and_frees_everything(text_model: Path):
    """Its client takes a token every 5 ms, and the engine makes far more."""
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)]  # a window that does not grow
    with (
        serve(text_model, {"engine.warmup": False, "serve.stall_s": 1.0}) as own,
        grpc.insecure_channel(own.address, options=small) as channel,
    ):
        asked = request("Hello", 3500, logprobs=20)
        slow = rpc.InferenceStub(channel).GenerateStream(asked, timeout=60)
        # On a fast machine a message holds so many tokens that the client reads nothing for a second.
        with refused(CODE.RESOURCE_EXHAUSTED, "serve.stall_s = 1 s"):
            for delta in slow:
                time.sleep(0.005 * len(delta.outputs[0].token_ids))
        own.check_idle()
        own.backend.gate.check_completions(Room(0, 1))  # it holds no place
        assert own.streamed(asked).usage.completion_tokens == 3500, "a reader that keeps up is not cut"
