"""What one side of a link writes, the other one reads."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from jlora.cluster import wire
from jlora.cluster.directory import Version
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.requests import Broken
from jlora.config import Config
from jlora.errors import DataLoss, JloraError, NotFound, QueueFull, Unavailable
from jlora.replica import ReplicaInfo
from jlora.types import Done, Request, SamplingParams, Timing, TokenEvent, TokenLogprob, Usage
from jlora.validation import Limits, validate

LIMITS = Limits(vocab=400, max_len=4096, capacity_tokens=4096)
FULL = SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**64 - 3, repetition_penalty=1.5, presence_penalty=0.5,
    frequency_penalty=-0.5, logit_bias={3: -1.5}, n=3, max_tokens=9, min_tokens=2, stop=("a", "\n"),
    stop_token_ids=(7, 8), include_stop=True, ignore_eos=True, logprobs=2, prompt_logprobs=0,
)  # fmt: skip


@pytest.mark.parametrize("sampling", [FULL, SamplingParams(), SamplingParams(seed=0, max_tokens=None)])
def test_a_request_arrives_as_it_was_sent(sampling: SamplingParams):
    sent = validate(Request("mine", (1, 2, 399), sampling, "x@3", -2, True, "tenant", cache_salt="salt"), LIMITS)
    sent = replace(sent, done=(Done((4, 5)), Done((), True), Done())[: sampling.n])
    message = link.Start.FromString(wire.start(5, sent, Version("x", 3, "/x", "abc"), ["p:1"]).SerializeToString())
    assert (message.rid, message.adapter.path, message.adapter.digest, list(message.adapter.peers)) == (
        5, "/x", "abc", ["p:1"],
    )  # fmt: skip
    got = validate(wire.request(message, "r7"), LIMITS)
    assert replace(got, id="mine") == sent


def test_a_deadline_is_sent_as_what_is_left():
    request = Request("r", (1,), deadline=time.monotonic() + 100)
    got = wire.request(wire.start(1, request, None), "r")
    assert got.adapter is None and request.deadline and got.deadline
    assert abs(got.deadline - request.deadline) < 10


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent("r", 1, 5, handle=3),
        TokenEvent("r", 0, 0, TokenLogprob(0, -0.5, ((0, -0.5), (9, -1.25))), handle=3),
        TokenEvent("r", 0, 5, None, (None, TokenLogprob(7, -2.0)), handle=3),
        TokenEvent(
            "r", 0, 5, TokenLogprob(5, -1.0), None, "length", Usage(5, 4, 3, 2), Timing(1, 2, 3, 4, 5, 6, "stream"), 3
        ),
        TokenEvent("r", 2, None, None, None, "abort", Usage(1, 0, 0), Timing(), 3),
    ],
)
def test_an_event_arrives_as_it_was_sent(event: TokenEvent):
    message = link.Token.FromString(wire.token(8, 4, event).SerializeToString())
    assert (message.rid, message.position, message.HasField("id")) == (8, 4, event.token_id is not None)
    assert wire.event(message, "r", 3) == event


def test_a_message_with_neither_a_token_nor_an_end_is_none():
    with pytest.raises(Broken):
        wire.event(link.Token(rid=1, position=3), "r", 1)


@pytest.mark.parametrize("error", [NotFound("no x"), QueueFull("full", 3.0), Unavailable("drains")])
def test_an_error_keeps_its_class_and_message(error: JloraError):
    got = wire.error(wire.failure(4, error))
    assert type(got) is type(error) and str(got) == str(error)


def test_a_bug_is_no_error_of_the_callers():
    message = wire.failure(4, KeyError("x"), elsewhere=True)
    assert message.kind == "" and message.elsewhere
    assert isinstance(wire.error(message), RuntimeError)
    assert isinstance(wire.error(link.Failure(kind="Sequence")), RuntimeError)


def test_a_replicas_constants_are_json():
    info = ReplicaInfo("base", "float32", LIMITS, (2,), 16, 4096, "cpu", ("cpu:0",), Config())
    assert wire.info(wire.info_bytes(info)) == info
    newer = wire.info_bytes(info).replace(b'{"model":"base"', b'{"later":1,"model":"base"', 1)
    assert wire.info(newer) == info
    with pytest.raises(ValueError):
        wire.info(b"{}")


def test_a_setting_that_a_later_release_has_is_read_as_its_default():
    info = ReplicaInfo("base", "float32", LIMITS, (2,), 16, 4096, "cpu", ("cpu:0",), Config())
    told = wire.info_bytes(info).replace(b'"policy":"%s"' % info.config.cache.policy.encode(), b'"policy":"later"')
    told = told.replace(b'"max_queue":', b'"max_queue":-')
    assert b"later" in told and wire.info(told) == info
    with pytest.raises(ValueError, match="int"):
        wire.info(told.replace(b'"vocab":', b'"vocab":-0.5,"x":'))
    with pytest.raises(ValueError, match="target_modules"):  # replicas are compared in it
        wire.info(told.replace(b'"target_modules":"all"', b'"target_modules":"later"'))


def test_an_error_has_the_name_of_its_own_adapter_alone():
    own = Version("own", 1, "/own")
    said = wire.failure(1, DataLoss("adapter 'own@1' is not 'own@12'"))
    assert str(wire.error(said, own)) == "adapter 'own' is not 'own@12'"


def test_an_error_does_not_name_other_versions_that_are_like_it():
    said = wire.failure(1, NotFound("adapter 'own@1' is not loaded", ["own@12"]))
    assert str(wire.error(said, Version("own", 1, "/own"))) == "adapter 'own' is not loaded"


def test_a_later_versions_kind_of_cold_start_is_none():
    ends = TokenEvent("r", 0, 5, finish_reason="length", usage=Usage(1, 0, 1), timing=Timing(ttft=0.5))
    message = wire.token(1, 0, ends)
    message.timing.cold_start = "teleported"
    assert wire.event(message, "r", -1) == ends
