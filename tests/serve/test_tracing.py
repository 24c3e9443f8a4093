"""OpenTelemetry: an answer's spans, by the SDK's own exporter and by a collector behind OTLP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jlora.errors import DataLoss
from jlora.replica import Sink
from jlora.serve import tracing
from jlora.serve.observed import Ended
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.tracing import Tracing, parts
from jlora.types import AdapterInfo, ColdStart, Request, SamplingParams, Timing, TokenEvent, Usage
from tests import port
from tests.serve._server import Served, request, wait_until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def spans(served: Served) -> Iterator[InMemorySpanExporter]:
    """Where the shared server's spans go during a test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    served.backend.tracing = Tracing(provider)
    yield exporter
    served.backend.tracing = None


def of(exporter: InMemorySpanExporter, name: str) -> Mapping[str, ReadableSpan]:
    """The spans of one trace, once its root has ended."""

    def roots() -> list[ReadableSpan]:
        found = exporter.get_finished_spans()
        return [s for s in found if s.attributes and s.attributes.get("gen_ai.response.id") == name]

    wait_until(roots)
    trace = roots()[0].context.trace_id
    return {span.name: span for span in exporter.get_finished_spans() if span.context.trace_id == trace}


def check_chain(found: Mapping[str, ReadableSpan], names: Sequence[str]) -> None:
    """Parts follow each other and fill their parent."""
    root, chain = found["generate"], [found[name] for name in names]
    assert set(found) == {"generate", *names}
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in chain)
    edges = [root.start_time, *(span.end_time for span in chain)]
    for edge, span in zip(edges, chain, strict=False):
        assert abs((span.start_time or 0) - (edge or 0)) < 1e6, span.name  # nanoseconds
    assert abs((root.end_time or 0) - (chain[-1].end_time or 0)) < 1e6


@pytest.mark.parametrize("front", ["grpc", "stream", "http"])
def test_an_answer_has_its_spans_below_the_callers(served: Served, spans: InMemorySpanExporter, front: str):
    name = f"traced-{front}"
    served.control.FlushCache(pb.FlushCacheRequest())
    if front == "http":
        body = {"model": "upper", "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "request_id": name}
        headers = {"traceparent": PARENT}
        assert httpx.post(f"{served.http}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    else:
        made = request((5, 6, 7), 5, model="upper")
        made.request_id = name
        if front == "grpc":
            served.inference.Generate(made, timeout=60, metadata=(("traceparent", PARENT),))
        else:
            list(served.inference.GenerateStream(made, timeout=60, metadata=(("traceparent", PARENT),)))
    found = of(spans, name)
    root = found["generate"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None and f"{root.parent.span_id:016x}" == SPAN
    attributes: Mapping[str, Any] = root.attributes or {}
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.usage.output_tokens"]) == ("upper", 5)
    check_chain(found, ["queue", "prefill", "decode"])
    assert (found["prefill"].attributes or {})["jlora.prompt_tokens"] == 3


@pytest.mark.parametrize("end", ["cancel", "deadline", "abort"])
def test_an_aborted_request_has_its_spans(served: Served, spans: InMemorySpanExporter, end: str):
    """All but what it did not come to; no time of it counts."""
    name = f"left-{end}"
    made = request((5, 6, 7), 3500, request_id=name)
    before = served.backend.observed.whole.buckets()[-1][1]
    stream = served.inference.GenerateStream(made, timeout=1 if end == "deadline" else 60)
    next(stream)
    if end == "cancel":
        stream.cancel()
    elif end == "abort":
        assert served.control.Abort(pb.AbortRequest(request_id=name)).aborted
        *_, _ = stream
    found = of(spans, name)
    attributes = found["generate"].attributes or {}
    assert attributes["jlora.aborted"] and int(str(attributes["gen_ai.usage.output_tokens"])) >= 1
    check_chain(found, ["queue", "prefill", "decode"])
    assert served.backend.observed.whole.buckets()[-1][1] == before + (end == "abort")
    served.check_idle()


def test_a_request_that_fails_has_a_span_that_says_why(
    served: Served, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
):
    """After its first tokens; the engine tells no times of it."""
    submit = served.replica.submit

    def failing(asked: Request, sink: Sink) -> futures.Future[int]:
        def events(came: list[TokenEvent]) -> None:
            sink(came[:1])
            sink([TokenEvent(asked.id, 0, None, finish_reason="abort", error=DataLoss("planted"))])

        return submit(asked, events)

    with monkeypatch.context() as patched:
        patched.setattr(served.replica, "submit", failing)
        stream = served.inference.GenerateStream(request((5, 6, 7), 3000, request_id="broken"), timeout=60)
        with pytest.raises(grpc.RpcError, match="planted"):
            list(stream)
    root = of(spans, "broken")["generate"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "DataLoss: planted")
    assert not (root.attributes or {})["jlora.aborted"]
    served.check_idle()


def test_without_a_caller_a_trace_begins_here(served: Served, spans: InMemorySpanExporter):
    made = request((5, 6, 7), 2)
    made.request_id = "alone"
    served.inference.Generate(made, timeout=60, metadata=(("traceparent", "no such thing"),))
    found = of(spans, "alone")
    assert found["generate"].parent is None
    check_chain(found, ["queue", "prefill", "decode"])


def test_cold_starts_have_rank_and_bytes(served: Served, spans: InMemorySpanExporter):
    """From a request's times; that these are true is for the engine's tests."""
    usage, timing = Usage(40, 32, 5, host_tokens=16), Timing(1.0, 0.5, 0.25, 2.0, 3.5, 0.1, "wait")
    ended = Ended(Request("cold", (1,), SamplingParams(), adapter="wide"), "wide", usage, timing, 5, 100.0, 4.0)
    wide = served.replica.adapter("wide").result(20)
    made = {part.name: part for part in parts(ended, wide, token_bytes=512)}
    assert list(made) == ["queue", "adapter_cold_start", "kv_cold_start", "prefill", "decode"]
    adapter, kv = made["adapter_cold_start"], made["kv_cold_start"]
    assert (adapter.begin, adapter.seconds) == (1.0, 0.5) and (kv.begin, kv.seconds) == (1.0, 0.25)
    facts = {"jlora.cold_start": "wait", "jlora.adapter": "wide", "jlora.rank": 8, "jlora.bytes": wide.bytes}
    assert adapter.attributes == facts
    assert kv.attributes == {"jlora.tokens": 16, "jlora.bytes": 16 * 512}
    assert (made["prefill"].begin, made["decode"].begin) == (1.5, 3.5) and made["decode"].seconds == 0.5
    assert "decode" not in {part.name for part in parts(replace(ended, usage=Usage(40, 0, 0)), None, 512)}


def test_spans_reach_a_collector(served: Served):
    received: list[str] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
            received.extend(span.name for scope in scopes for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    collector = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    provider = tracing.otlp(f"http://127.0.0.1:{port}")
    served.backend.tracing = Tracing(provider)
    try:
        served.generate(request((5, 6, 7), 2))
        wait_until(lambda: provider.force_flush(1000) and "generate" in received)
    finally:
        served.backend.tracing = None
        provider.shutdown()
        collector.stop(0)
    assert sorted(received) == ["decode", "generate", "prefill", "queue"]


def cold(name: str, kind: ColdStart = "wait") -> Ended:
    """An answer of the adapter "wide", with a cold start if `kind` is one."""
    timing = Timing(1.0, 0.5, 0.25, 2.0, 3.5, 0.1, kind)
    return Ended(Request(name, (1,), SamplingParams(), adapter="wide"), "wide", Usage(40, 0, 5), timing, 5, 100.0, 4.0)


def test_only_a_cold_start_asks_for_its_adapter_and_few_at_once(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Behind a router, each such question goes to every replica."""
    asked: list[futures.Future[AdapterInfo]] = []

    def adapter(_: str) -> futures.Future[AdapterInfo]:
        asked.append(futures.Future())
        return asked[-1]

    wide = served.replica.adapter("wide").result(20)
    monkeypatch.setattr(served.replica, "adapter", adapter)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def answers() -> None:
        traces = Tracing(provider)
        for i in range(100):
            traces.answered(cold(f"warm {i}", ""), served.replica)
        await asyncio.sleep(0.01)
        assert not asked and of(exporter, "warm 99").keys() == {"generate", "queue", "prefill", "decode"}
        for i in range(2 * tracing.MOST_ASKING):
            traces.answered(cold(f"cold {i}"), served.replica)
        await asyncio.sleep(0.01)
        assert len(asked) == tracing.MOST_ASKING
        late = of(exporter, f"cold {2 * tracing.MOST_ASKING - 1}")["adapter_cold_start"]
        assert late.attributes == {"jlora.cold_start": "wait"}
        for one in asked:
            one.set_result(wide)
        await traces.close(5.0)
        assert (of(exporter, "cold 0")["adapter_cold_start"].attributes or {})["jlora.rank"] == 8

    asyncio.run(answers())


@pytest.mark.parametrize("end", ["refuses", "is silent"])
def test_a_collector_that_is_away_does_not_hold_up_the_end(served: Served, monkeypatch: pytest.MonkeyPatch, end: str):
    """Nor does a replica that says nothing of an adapter."""
    monkeypatch.setattr(served.replica, "adapter", lambda _: futures.Future())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if end == "refuses":
            silent.close()

        async def answers() -> None:
            traces = Tracing(tracing.otlp(where))
            traces.answered(cold("warm", ""), served.replica)
            traces.answered(cold("cold"), served.replica)
            await asyncio.sleep(0.01)
            await traces.close(0.5)

        began = time.monotonic()
        asyncio.run(answers())  # it waits for asyncio's own threads, too
        assert time.monotonic() - began < 5


def test_nothing_imports_opentelemetry_unasked():
    code = "import sys, jlora.serve.launcher, jlora.cli; print([m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_endpoint_without_the_extra_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jlora.serve.tracing", None)
    with pytest.raises(Exception, match=r"serve\.otlp_endpoint needs OpenTelemetry: pip install 'jlora\[otel\]'"):
        port.tracing("http://127.0.0.1:4317")
