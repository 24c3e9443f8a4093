"""What is refused: OpenAI's shape and status, a message with the field, and nothing else disturbed."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import openai
import pytest

from jlora.config import ServeConfig
from jlora.errors import DataLoss, ShortOfMemory, WeightsGone
from jlora.serve.backend import Backend
from jlora.serve.http import failures, protocol
from jlora.serve.http.schema import MAX_PARTS, ChatBody, CompletionBody
from jlora.serve.status import status_of
from jlora.serve.texts import MAX_MESSAGES
from tests.serve._server import MAX_LEN, SMALL, VOCAB, Served, request, serving, wait_until

ROOM = SMALL["engine.max_queue"] + SMALL["engine.max_seqs"]
COMPLETION = {"prompt": "Hello", "max_tokens": 2}
USER = {"role": "user", "content": "Hello"}
CHAT = {"messages": [USER], "max_tokens": 2}


def refused(answer: httpx.Response, status: int, *said: str, param: str | None = None) -> dict[str, Any]:
    """The error of an answer, which must have this status and name all of `said`."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for part in said:
        assert part in error["message"], error
    if param is not None:
        assert error["param"] == param, error
    return error


BAD_FIELDS: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"temperature": -1}, "temperature", ("= -1.0", "[0, 100]")),
    ({"temperature": "hot"}, "temperature", ("float", "str")),
    ({"top_p": 0}, "top_p", ("(0, 1]",)),
    ({"top_k": -2}, "top_k", ("at least 0",)),
    ({"min_p": 1.5}, "min_p", ("= 1.5", "[0, 1]")),
    ({"min_p": -0.1}, "min_p", ("= -0.1", "[0, 1]")),
    ({"repetition_penalty": 0}, "repetition_penalty", ("= 0.0", "[0.001, 1000]")),
    ({"repetition_penalty": 1001}, "repetition_penalty", ("= 1001.0", "[0.001, 1000]")),
    ({"presence_penalty": 2.5}, "presence_penalty", ("= 2.5", "[-2, 2]")),
    ({"frequency_penalty": -2.5}, "frequency_penalty", ("= -2.5", "[-2, 2]")),
    ({"n": 65}, "n", ("[1, 64]",)),
    ({"n": True}, "n", ("int",)),
    ({"max_tokens": 0}, "max_tokens", ("at least 1",)),
    ({"max_tokens": -1}, "max_tokens", ("max_tokens = -1", "at least 1")),
    ({"stop": [""]}, "stop[0]", ("empty",)),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]", (f"[0, {VOCAB})",)),
    ({"logit_bias": {"x": 1}}, "logit_bias", ("int",)),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias key", (f"[0, {VOCAB})",)),
    ({"logprobs": 21}, "logprobs", ("[0, 20]",)),
    ({"cache_salt": "x" * 257}, "cache_salt", ("256",)),
    ({"request_id": "a b"}, "request_id", ("visible ASCII",)),
    ({"priority": 2**31}, "priority", ("int",)),
    ({"stream_options": {"include_usage": True}}, "stream_options", ("stream = true",)),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", ("stream",)),
    ({"stream": True, "echo": True, "logprobs": 1}, "logprobs", ("echo",)),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", ("not a field",)),
    ({"prompt": [5] * 3000, "n": 64, "prompt_logprobs": 20}, "prompt_logprobs", ("n = 64", "limit 2097152")),
    ({"prompt": [5] * 3000, "n": 64, "echo": True, "logprobs": 20}, "prompt_logprobs", ("n = 64",)),
    ({"prompt": ""}, "prompt", ("at least 1 character",)),
    ({"prompt": []}, "prompt", ("at least 1 token",)),
    ({"prompt": [5, "x"]}, "prompt", ("mixes",)),
    ({"prompt": [5, VOCAB]}, "prompt[1]", (f"[0, {VOCAB})",)),
    ({"prompt": [[5], [-1]]}, "prompt[0]", ("-1",)),
    ({"prompt": ["x"] * (ROOM + 1)}, "prompt", (f"limit {ROOM}",)),
    ({"model": "base:"}, "model", ("no adapter after the colon",)),
]


@pytest.mark.parametrize(("fields", "param", "said"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_named(http: httpx.Client, fields: dict[str, Any], param: str, said: tuple[str, ...]):
    answer = http.post("/v1/completions", json={**COMPLETION, **fields})
    error = refused(answer, 400, *said)
    assert error["type"] == "invalid_request_error" and error["message"].startswith(param), error


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"suffix": "x"}),
    ("completions", {"best_of": 2}),
    ("completions", {"guided_json": {}}),
    ("completions", {"response_format": {"type": "json_object"}}),
    ("completions", {"skip_special_tokens": False}),
    ("completions", {"use_beam_search": True}),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("chat/completions", {"tool_choice": "required"}),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("chat/completions", {"modalities": ["text", "audio"]}),
    ("chat/completions", {"chat_template_kwargs": {"thinking": True}}),
    ("chat/completions", {"web_search_options": {}}),
]


@pytest.mark.parametrize(("kind", "fields"), UNSUPPORTED, ids=str)
def test_what_is_not_supported_is_refused_by_name(http: httpx.Client, kind: str, fields: dict[str, Any]):
    base = COMPLETION if kind == "completions" else CHAT
    (name,) = fields
    refused(http.post(f"/v1/{kind}", json={**base, **fields}), 400, f"{name}: is not supported", param=name)
    assert http.post(f"/v1/{kind}", json={**base, name: None}).status_code == 200


def test_values_that_mean_not_used_are_taken(http: httpx.Client):
    unused = {
        "best_of": 1,
        "suffix": None,
        "skip_special_tokens": True,
        "response_format": {"type": "text"},
        "user": "x",
    }
    assert http.post("/v1/completions", json={**COMPLETION, **unused}).status_code == 200
    options = {"include_usage": None, "include_obfuscation": False, "continuous_usage_stats": False}
    streamed = {**COMPLETION, "stream": True, "stream_options": options}
    assert http.post("/v1/completions", json=streamed).text.endswith("data: [DONE]\n\n")
    unused = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False, "top_logprobs": 0}
    assert http.post("/v1/chat/completions", json={**CHAT, **unused}).status_code == 200


def test_null_is_the_default_of_every_field(http: httpx.Client):
    for path, kind, body in (("completions", CompletionBody, COMPLETION), ("chat/completions", ChatBody, CHAT)):
        nulls = dict.fromkeys(kind.__struct_fields__)
        answer = http.post(f"/v1/{path}", json={**nulls, **body})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 2, answer.text


def test_an_unknown_field_is_refused_with_the_nearest(http: httpx.Client):
    for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        refused(http.post(f"/v1/{path}", json={**body, "temprature": 0}), 400, "the nearest field is temperature",
                param="temprature")  # fmt: skip
    refused(http.post("/v1/completions", json={"max_tokens": 1}), 400, "prompt: is missing", param="prompt")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/prefetch", "/tokenize"])
def test_messages_and_their_parts_are_counted_before_they_are_looked_at(http: httpx.Client, path: str):
    """One of these that was looked at would be refused by another name."""

    def said(messages: list[dict[str, Any]]) -> str:
        return refused(http.post(path, json={"messages": messages}), 400, param="messages")["message"]

    many = [{"role": "x"}] * (MAX_MESSAGES + 1)
    assert f"{MAX_MESSAGES + 1} messages, must have at most {MAX_MESSAGES}" in said(many)
    pictures = {"role": "user", "content": [{"type": "image_url"}] * (MAX_PARTS // 2 + 1)}
    assert f"{MAX_PARTS + 2} parts, must have at most {MAX_PARTS}" in said([pictures] * 2)


def test_messages_that_are_no_text_are_refused(http: httpx.Client):
    def said(*messages: Any, **fields: Any) -> dict[str, Any]:
        return refused(http.post("/v1/chat/completions", json={"messages": messages, **fields}), 400)

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    first = said(USER, {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]})
    assert first["message"].startswith("messages[1].content[1].type = 'image_url': is not supported")
    assert said({"role": "assistant", "content": None})["param"] == "messages[0].content"
    assert said({"role": "tool", "content": "x", "tool_call_id": "1"})["param"] == "messages[0].tool_call_id"
    assert said(USER, {**USER, "name": "x" * 257})["message"].startswith("messages[1].name: has 257 characters")
    assert "name" in said({**USER, "name": 5})["message"]
    assert "role" in said({"content": "x"})["message"]
    assert said()["param"] == "messages"
    assert said(USER, top_logprobs=2)["param"] == "top_logprobs"


def test_bodies_that_are_no_json_of_an_object(http: httpx.Client):
    kind = {"content-type": "application/json"}
    deep = b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    refused(http.post("/v1/chat/completions", content=deep, headers=kind), 400, "the body is not valid JSON")
    for body in (b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"n": NaN}'):
        answer = http.post("/v1/completions", content=body, headers=kind)
        refused(answer, 400, "the body")
    refused(http.post("/v1/completions", data={"prompt": "x"}), 400, "content-type", "application/json")
    refused(http.post("/v1/nothing", json={}), 404, "/v1/nothing")
    refused(http.get("/v1/completions"), 405, "Method Not Allowed")


def test_other_methods_and_slashes(http: httpx.Client):
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    for path in ("/health", "/v1/models", "/metrics", "/"):
        head = http.head(path)
        assert head.status_code == 200 and not head.content and int(head.headers["content-length"]) > 0
    for method, path in (
        ("HEAD", "/dashboard/events"),
        ("OPTIONS", "/v1/chat/completions"),
        ("DELETE", "/v1/models/upper"),
    ):
        answer = http.request(method, path, headers={"origin": "http://other.example"})
        assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_past_the_context(client: openai.OpenAI, http: httpx.Client):
    for fields in ({"prompt": [5] * MAX_LEN}, {"max_tokens": MAX_LEN}):
        error = refused(http.post("/v1/completions", json={**COMPLETION, **fields}), 400, str(MAX_LEN))
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(f"This model's maximum context length is {MAX_LEN} tokens. ")
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="base", prompt="x" * 500_000)
    assert e.value.code == "context_length_exceeded" and e.value.param == "prompt"
    assert "This model's maximum context length is" in str(e.value) and "prompt: has 500000 characters" in str(e.value)


def test_a_chats_errors_name_the_fields_that_it_has(http: httpx.Client):
    for fields, param in (
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": MAX_LEN}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "é " * MAX_LEN}]}, "messages"),
    ):
        error = refused(http.post("/v1/chat/completions", json={"messages": [USER], **fields}), 400, param=param)
        assert f"{param}: " in error["message"] or f"{param} = " in error["message"], error


def test_an_unknown_model_is_404_with_near_names(client: openai.OpenAI):
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="upper") as e:
            client.completions.create(model="uper", prompt="Hello", stream=stream)
        assert e.value.code == "model_not_found"


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "Hello"}), ("/detokenize", {"tokens": [5]})])
def test_the_tokenizers_calls_know_their_models(http: httpx.Client, path: str, body: dict[str, Any]):
    error = refused(http.post(path, json={**body, "model": "uper"}), 404, "adapter 'uper' is not loaded")
    assert error["code"] == "model_not_found"
    for model in ("base", "upper", "base:upper", "", None):
        assert http.post(path, json={**body, "model": model}).status_code == 200


def test_a_body_that_arrives_too_slowly_may_be_sent_again(served: Served):
    """Clients send it again after a 408."""
    with serving(served.backend, ServeConfig(heartbeat_s=60.0, stall_s=0.2)) as impatient:
        url = urlsplit(impatient.http)
        with socket.create_connection((url.hostname, url.port), timeout=20) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            answer = HTTPResponse(raw)
            answer.begin()
            error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"]) == (408, "deadline_exceeded") and "serve.stall_s = 0.2 s" in error["message"]


def test_a_body_with_a_coding_is_415(http: httpx.Client):
    body, kind = gzip.compress(json.dumps(COMPLETION).encode()), {"content-type": "application/json"}
    answer = http.post("/v1/completions", content=body, headers={**kind, "content-encoding": "gzip"})
    refused(answer, 415, "content-encoding = 'gzip': must be identity")
    plain = {**kind, "content-encoding": "Identity"}
    assert http.post("/v1/completions", content=json.dumps(COMPLETION), headers=plain).status_code == 200


def test_a_body_past_the_limit_is_413_before_it_is_read(served: Served, http: httpx.Client):
    big = {"prompt": "x" * (5 << 20)}
    assert refused(http.post("/v1/completions", json=big), 413, "max_request_mib = 4")["code"] == "request_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(6):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    refused(http.post("/v1/completions", content=chunks(), headers=headers), 413, "max_request_mib")
    host, port = urlsplit(served.http).hostname, urlsplit(served.http).port
    with socket.create_connection((host, port), timeout=20) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
        )  # and no body
        assert raw.recv(64).startswith(b"HTTP/1.1 413")


def test_short_memory_is_a_passing_state_of_the_server_and_no_fault_of_the_request():
    status, body, headers = failures.answer(ShortOfMemory("too little memory; try again later"), "/v1/completions")
    assert (status, headers["retry-after"]) == (503, "1") and "try again later" in body["error"]["message"]


def test_an_answer_whose_weights_are_gone_may_be_sent_again():
    gone = WeightsGone("the files of adapter 'x' have changed; send it again")
    status, body, headers = failures.answer(gone, "/v1/completions")
    assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "weights_gone")
    assert status_of(gone, "Generate") == (grpc.StatusCode.DATA_LOSS, str(gone))
    assert failures.answer(DataLoss("a damaged file"), "/v1/completions")[0] == 400


def test_a_full_queue_is_429_with_a_time_to_wait(served: Served, http: httpx.Client):
    streams = []
    try:
        for _ in range(2):
            streams.append(served.inference.GenerateStream(request("Hello", 3000, n=40)))
            wait_until(lambda: served.stats().running == SMALL["engine.max_seqs"])
        wait_until(lambda: served.stats().waiting == SMALL["engine.max_queue"])
        answer = http.post("/v1/completions", json=COMPLETION)
        assert refused(answer, 429, f"limit {ROOM}")["type"] == "rate_limit_error"
        assert answer.headers["retry-after"] == "1"
        refused(http.get("/ready"), 429)
        assert http.get("/health").status_code == 200
    finally:
        for stream in streams:
            stream.cancel()
    served.check_idle()
    wait_until(lambda: http.get("/ready").status_code == 200)


def test_a_live_request_id_is_409(served: Served, http: httpx.Client):
    body = {**COMPLETION, "max_tokens": 3000, "request_id": "same", "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        again = http.post("/v1/completions", json={**COMPLETION, "request_id": "same"})
        assert refused(again, 409, "'same'")["code"] == "already_exists"
    served.check_idle()


def test_one_prompt_refused_and_none_runs(served: Served, http: httpx.Client):
    before = served.stats().generated_tokens
    for bad in ([VOCAB], [5] * MAX_LEN):
        refused(http.post("/v1/completions", json={"prompt": [[5, 6], [7, 8], bad], "max_tokens": 3000}), 400)
    served.check_idle()
    assert served.stats().generated_tokens == before


def test_our_own_bug_is_500_with_an_id_that_the_log_has(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise RuntimeError("secret prompt in /secret/path")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "jlora"):
        patch.setattr(served.replica, "submit", broken)
        for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
            answer = http.post(f"/v1/{path}", json=body)
            error = refused(answer, 500, "internal error")
            assert "secret" not in answer.text and error["type"] == "server_error"
            assert error["message"].split()[2].strip(":") in caplog.records[-1].getMessage()
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_while_the_model_loads_all_is_503():
    with serving(Backend()) as loading:
        with httpx.Client(base_url=loading.http, timeout=20) as http:
            for path in ("/health", "/ready", "/v1/models"):
                answer = http.get(path)
                refused(answer, 503, "loading")
                assert answer.headers["retry-after"] == "1"
            refused(http.post("/v1/completions", json=COMPLETION), 503, "loading")
            refused(http.post("/v1/chat/completions", json=CHAT), 503, "loading")
            assert http.get("/version").status_code == 200


def test_a_model_without_a_tokenizer_serves_token_ids(served: Served):
    want = served.generate(request((5, 6, 7), 4, logprobs=1)).outputs[0]
    with serving(Backend(replica=served.replica)) as plain:
        with httpx.Client(base_url=plain.http, timeout=20) as http:
            body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            got = http.post("/v1/completions", json={**body, "return_token_ids": True, "logprobs": 1}).json()
            assert got["choices"][0]["token_ids"] == list(want.token_ids) and got["choices"][0]["text"] == ""
            assert got["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in want.token_ids]
            refused(http.post("/v1/completions", json=COMPLETION), 400, "needs a tokenizer", param="prompt")
            refused(http.post("/v1/chat/completions", json=CHAT), 400, "needs a tokenizer", param="messages")
            refused(http.post("/v1/completions", json={**body, "stop": "x"}), 400, "stop: strings need a tokenizer")


def test_a_head_that_does_not_arrive_is_cut(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    url = urlsplit(served.http)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for sent in (b"", whole[:20], whole + whole[:20]):  # also the second one of a connection
        with socket.create_connection((url.hostname, url.port), timeout=20) as raw:
            raw.sendall(sent)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := raw.recv(1000):
                    answer += piece
            assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")
    with socket.create_connection((url.hostname, url.port), timeout=20) as raw:
        raw.sendall(whole)
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        raw.sendall(b"\r\n")  # it begins no head, and the connection is idle no more
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(1000):
                pass
    assert httpx.get(f"{served.http}/health", timeout=20).status_code == 200


def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "CONNECTIONS", 3)
    url = urlsplit(served.http)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection((url.hostname, url.port), timeout=20))
        with socket.create_connection((url.hostname, url.port), timeout=20) as raw:
            with contextlib.suppress(ConnectionResetError):
                raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert raw.recv(1000) == b""

    def serves() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{served.http}/health", timeout=20).status_code == 200
        return False

    wait_until(serves)


def test_without_keys_a_foreign_name_is_refused(served: Served, http: httpx.Client):
    """A web page may have its name lead to 127.0.0.1; to a browser the server is then of its origin."""
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::1", "127.0.0.1.nip.io"):
        body = {"lora_name": "x", "lora_path": "/x"}
        answer = http.post("/v1/load_lora_adapter", json=body, headers={"host": host})
        assert answer.status_code == 403 and "host" in answer.text
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert http.get("/v1/models", headers={"host": host}).status_code == 200
    assert http.get("/health", headers={"host": "probe.example"}).status_code == 200
    with serving(served.backend, ServeConfig(heartbeat_s=60.0, insecure=True)) as open_to_all:
        named = {"host": "llm.example"}
        assert httpx.get(f"{open_to_all.http}/v1/models", headers=named, timeout=20).status_code == 200
