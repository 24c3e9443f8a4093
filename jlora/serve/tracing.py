"""Spans of answered requests for OpenTelemetry. Only a server with `serve.otlp_endpoint` imports this (jlora[otel]).

generate                    the whole request, a child of the caller's span if it sent a `traceparent`
  queue                     until it held its blocks
  adapter_cold_start        kind, rank and bytes of the adapter; absent if it was on the device
  kv_cold_start             tokens and bytes that were copied from the host; absent if there were none
  prefill                   prompt tokens, cached ones
  decode                    output tokens

A request's spans are made when its answer has ended, from its `Timing`, and leave on a thread of the SDK's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jlora import __version__
from jlora.errors import JloraError
from jlora.replica import Replica
from jlora.serve.observed import Ended
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

MOST_ASKING = 64  # behind a router each asks every replica

Attributes = Mapping[str, str | int | bool]


def otlp(endpoint: str) -> TracerProvider:
    """Spans to an OTLP collector's gRPC port, "http://HOST:4317"."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": "jlora", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `Tracing.close` does it, within its time
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


@dataclass(frozen=True, slots=True)
class Part:
    """A child span; `begin` and `seconds` count from the request's arrival."""

    name: str
    begin: float
    seconds: float
    attributes: Attributes


class Tracing:
    """Turns answers into spans. For the event loop's thread."""

    def __init__(self, provider: TracerProvider):
        self._provider = provider
        self._tracer = provider.get_tracer("jlora", __version__)
        self._callers = TraceContextTextMapPropagator()
        self._making: set[asyncio.Task[None]] = set()
        self._asking = 0  # of those, how many wait for the replica

    def answered(self, ended: Ended, replica: Replica) -> None:
        """Makes the spans of an answer; those of an adapter's cold start first ask for its rank and size."""
        making = asyncio.ensure_future(self._make(ended, replica))
        self._making.add(making)
        making.add_done_callback(self._making.discard)

    async def close(self, within_s: float) -> None:
        """Sends what is left, as far as the collector takes it in so many seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        if self._making:
            await asyncio.wait(self._making, timeout=within_s / 2)
        # It waits 30 s for a collector that does not answer. A thread of asyncio's own would hold up the process's end.
        closing = threading.Thread(target=self._provider.shutdown, name="jlora-traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, end - loop.time())
        if closing.is_alive():
            log.warning("serve.otlp_endpoint: the collector has not taken the last spans in %g s", within_s)

    async def _make(self, ended: Ended, replica: Replica) -> None:
        adapter = await self._adapter(ended, replica)
        parent = self._callers.extract(dict(ended.trace))
        attributes: Attributes = {
            "gen_ai.request.model": ended.model,
            "gen_ai.response.id": ended.request.id,
            "gen_ai.usage.input_tokens": ended.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": ended.usage.completion_tokens,
            "jlora.aborted": ended.aborted,
        }
        root = self._tracer.start_span(
            "generate", parent, SpanKind.SERVER, attributes, start_time=_nanoseconds(ended.began)
        )
        within = set_span_in_context(root, parent)
        for part in parts(ended, adapter, replica.info.block_bytes // replica.info.block_tokens):
            begin = ended.began + part.begin
            span = self._tracer.start_span(
                part.name, within, attributes=part.attributes, start_time=_nanoseconds(begin)
            )
            span.end(_nanoseconds(begin + part.seconds))
        if ended.error:
            root.set_status(StatusCode.ERROR, ended.error)
        root.end(_nanoseconds(ended.began + ended.whole_s))

    async def _adapter(self, ended: Ended, replica: Replica) -> AdapterInfo | None:
        """What a cold start's span says of its adapter; None if there is no such span, or too many ask already."""
        name = ended.request.adapter
        if name is None or not ended.timing.cold_start or self._asking >= MOST_ASKING:
            return None
        self._asking += 1
        try:
            return await asyncio.wrap_future(replica.adapter(name))
        except JloraError as e:  # it was unloaded meanwhile
            log.debug("a trace without its adapter: %s", e)
            return None
        finally:
            self._asking -= 1


def parts(ended: Ended, adapter: AdapterInfo | None, token_bytes: int) -> Iterator[Part]:
    """The parts of a request, in order; `token_bytes` is the size of one token's KV."""
    timing, usage = ended.timing, ended.usage
    yield Part("queue", 0.0, timing.queue, {})
    if timing.cold_start:
        facts: dict[str, Any] = {"jlora.cold_start": timing.cold_start}
        if adapter is not None:
            facts |= {"jlora.adapter": adapter.name, "jlora.rank": adapter.rank, "jlora.bytes": adapter.bytes}
        yield Part("adapter_cold_start", timing.queue, timing.adapter_cold_start, facts)
    if usage.host_tokens:
        facts = {"jlora.tokens": usage.host_tokens, "jlora.bytes": usage.host_tokens * token_bytes}
        yield Part("kv_cold_start", timing.queue, timing.kv_cold_start, facts)
    tokens = {"jlora.prompt_tokens": usage.prompt_tokens, "jlora.cached_tokens": usage.cached_tokens}
    yield Part("prefill", timing.ttft - timing.prefill, timing.prefill, tokens)
    if usage.completion_tokens:
        decode = max(0.0, ended.whole_s - timing.ttft)
        yield Part("decode", timing.ttft, decode, {"jlora.output_tokens": usage.completion_tokens})


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
