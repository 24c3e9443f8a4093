"""Converts between the messages of a link and the records of jlora.

Both sides use it, so that what one writes the other reads: a request as a `Start`, its events as `Token`s, an error
as a `Failure`, a replica's constants as JSON.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from jlora import errors
from jlora.cluster.directory import Version
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.requests import Broken
from jlora.replica import ReplicaInfo
from jlora.serve import convert
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import ColdStart, Done, FinishReason, Request, SamplingParams, Timing, TokenEvent, TokenLogprob, Usage

log = logging.getLogger(__name__)

LONGEST_S = 1e9  # of a time that a replica may tell
REASONS = ("", *get_args(FinishReason))
STARTS = get_args(ColdStart)
PROTOCOL = 1  # of `Hello`: grows when the two sides must speak the same; new fields do not make it grow

# Settings in which replicas of one service are compared: a default would hide a difference.
COMPARED = ("adapters.target_modules", "engine.kernels", "engine.one_row")
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def check_protocol(theirs: int, who: str) -> None:
    """Raises FailedPrecondition unless the other side of a link speaks our protocol."""
    if theirs != PROTOCOL:
        older = who if theirs < PROTOCOL else "this side"
        raise errors.FailedPrecondition(
            f"hello: {who} speaks protocol {theirs} of the link, and this side {PROTOCOL}: upgrade {older}"
        )


def named(version: Version, peers: Iterable[str] = ()) -> link.Version:
    """What a replica needs to make a version known."""
    return link.Version(key=version.key, path=version.path, digest=version.digest, peers=peers)


def fetch(version: Version, peers: Iterable[str]) -> link.Fetch:
    """A hint that requests for this version come soon."""
    return link.Fetch(adapter=named(version, peers), prompt=version.alora_invocation_tokens or (0,))


def start(
    rid: int, request: Request, version: Version | None, peers: Iterable[str] = (), now: float | None = None
) -> link.Start:
    """A request, with what earlier attempts have delivered, for an attempt of this name.

    `now` is on the clock of the request's deadline; None: it is `time.monotonic()`.
    """
    message = link.Start(rid=rid, request=generate(request), waited_s=request.waited)
    if version is not None:
        message.adapter.CopyFrom(named(version, peers))
    for done in request.done:
        message.done.add(tokens=done.tokens, ended=done.ended)
    if request.deadline is not None:
        message.deadline_s = request.deadline - (time.monotonic() if now is None else now)
    return message


def request(message: link.Start, name: str, now: float | None = None) -> Request:
    """The request of a `Start`, not validated; `name` is its id at the replica, `now` as of `start`."""
    asked, now = message.request, time.monotonic() if now is None else now
    return Request(
        id=name,
        prompt=tuple(asked.token_ids.ids),
        sampling=convert.sampling_params(asked),
        adapter=message.adapter.key if message.HasField("adapter") else None,
        priority=asked.priority,
        bypass_prefix_cache=asked.bypass_prefix_cache,
        tenant=asked.tenant,
        deadline=now + message.deadline_s if message.HasField("deadline_s") else None,
        cache_salt=asked.cache_salt,
        done=tuple(Done(tuple(done.tokens), done.ended) for done in message.done),
        waited=message.waited_s if 0 <= message.waited_s <= LONGEST_S else 0.0,
    )


def token(rid: int, position: int, event: TokenEvent) -> link.Token:
    """One event of a request; `position` counts the output tokens of earlier attempts too."""
    message = link.Token(
        rid=rid, index=event.index, position=position, id=event.token_id, finish_reason=event.finish_reason or ""
    )
    if event.logprob is not None:
        message.logprob.CopyFrom(convert.token_logprob(event.logprob))
    if event.prompt_logprobs is not None:
        message.prompt_logprobs.extend(map(convert.token_logprob, event.prompt_logprobs))
    if event.usage is not None:
        message.usage.CopyFrom(pb.Usage(**dataclasses.asdict(event.usage)))
    if event.timing is not None:
        message.timing.CopyFrom(pb.Timing(**event.timing.fields()))
    return message


def event(message: link.Token, request_id: str, handle: int) -> TokenEvent:
    """The event of a `Token`, by the names that the request has at its receiver. Raises Broken if it can be none."""
    if not message.finish_reason and not message.prompt_logprobs:  # nearly all of them
        if not message.HasField("id"):
            raise Broken("a message with neither a token nor an end")
        logprob = _logprob(message.logprob) if message.HasField("logprob") else None
        return TokenEvent(request_id, message.index, message.id, logprob, handle=handle)
    if message.finish_reason not in REASONS:
        raise Broken(f"finish_reason = {message.finish_reason[:32]!r}")
    scored = message.prompt_logprobs
    return TokenEvent(
        request_id,
        message.index,
        message.id if message.HasField("id") else None,
        _logprob(message.logprob) if message.HasField("logprob") else None,
        (None, *map(_logprob, scored[1:])) if scored else None,
        message.finish_reason or None,  # pyright: ignore[reportArgumentType]
        _usage(message.usage) if message.HasField("usage") else None,
        _timing(message.timing) if message.HasField("timing") else None,
        handle,
    )


def failure(rid: int, error: BaseException, elsewhere: bool = False) -> link.Failure:
    """An error as its class and message; a bug of ours has no class of `jlora.errors`."""
    kind = next((c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), "")
    told = error.message if isinstance(error, errors.NotFound) else str(error)  # names near it are keys here
    return link.Failure(rid=rid, kind=kind, message=told, elsewhere=elsewhere)


def error(message: link.Failure, version: Version | None = None) -> Exception:
    """The error of a `Failure`, of a request for `version`: clients know an adapter by its name, not by its key."""
    told = message.message
    if version is not None:
        told = re.sub(re.escape(version.key) + r"(?!\d)", lambda _: version.name, told)
    kind = getattr(errors, message.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.JloraError)):
        return RuntimeError(told)
    return kind(told)


def info_bytes(info: ReplicaInfo) -> bytes:
    """A replica's constants as JSON."""
    return msgspec.json.encode(info)


def info(data: bytes) -> ReplicaInfo:
    """Reads them. What a later release has added is ignored: fields, and values of settings. Raises ValueError."""
    values = msgspec.json.decode(data)
    while True:
        try:
            return msgspec.convert(values, ReplicaInfo)
        except msgspec.ValidationError as e:
            named = re.search(r"at `\$\.config\.(\w+)\.(\w+)", str(e))
            section = values["config"].get(named[1]) if named else None
            if named is None or named[0].endswith(COMPARED) or not isinstance(section, dict) or named[2] not in section:
                raise
            log.warning("a replica's %s.%s is taken for its default: %s", named[1], named[2], e)
            del section[named[2]]  # so this ends


def generate(request: Request) -> pb.GenerateRequest:
    """A request as a message that names no model."""
    message = pb.GenerateRequest(
        request_id=request.id,
        token_ids=pb.TokenIds(ids=request.prompt),
        priority=request.priority,
        bypass_prefix_cache=request.bypass_prefix_cache,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
    )
    for part in (message.sampling, message.stopping, message):
        for field in part.DESCRIPTOR.fields:
            if field.name in _SAMPLING:
                _set(part, field.name, getattr(request.sampling, field.name))
    return message


def _set(part: Any, name: str, value: Any) -> None:
    if name == "seed" and value is not None:
        value = (value + 2**63) % 2**64 - 2**63  # a seed counts modulo 2^64, and the field is signed
    if isinstance(value, dict):
        getattr(part, name).update(value)
    elif isinstance(value, tuple):
        getattr(part, name).extend(value)
    elif value is not None:
        setattr(part, name, value)


def _logprob(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)


def _usage(message: pb.Usage) -> Usage:
    counts = message.prompt_tokens, message.cached_tokens, message.completion_tokens, message.host_tokens
    if min(counts) < 0:
        raise Broken(f"usage = {counts}")
    return Usage(*counts)


def _timing(message: pb.Timing) -> Timing:
    times = (
        message.queue_s,
        message.adapter_cold_start_s,
        message.kv_cold_start_s,
        message.prefill_s,
        message.ttft_s,
        message.tpot_s,
    )
    if not all(0 <= time <= LONGEST_S for time in times):
        raise Broken(f"timing = {times}")
    start = message.cold_start if message.cold_start in STARTS else ""  # one of a later version
    return Timing(*times, start)  # pyright: ignore[reportArgumentType]
