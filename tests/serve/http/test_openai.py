"""The real `openai` package against the server: answers, streams, and equality with gRPC."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any, get_type_hints

import httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat import completion_create_params as chat_params

from jlora.engine.local import LocalReplica
from jlora.replica import Sink
from jlora.serve.http.schema import ChatBody, CompletionBody, MessageBody, StreamOptions
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.template import Template
from jlora.types import Request, SamplingParams
from tests.serve._server import MAX_LEN, Served, request

GREEDY: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
NAMES = ("base", "upper", "lower", "wide")


def extra(**fields: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "extra_body": {**GREEDY["extra_body"], **fields}}


def ids(choice: Any) -> list[int]:
    return choice.model_extra["token_ids"]


def test_models_list_the_base_and_every_adapter(client: openai.OpenAI, served: Served):
    entries = {model.id: model for model in client.models.list()}
    assert list(entries) == ["base", *sorted(NAMES[1:])]
    assert {name: entry.model_extra["parent"] for name, entry in entries.items()} == {
        "base": None, "upper": "base", "lower": "base", "wide": "base",
    }  # fmt: skip
    assert {name: entry.model_extra["root"] for name, entry in entries.items()} == {n: n for n in entries}
    assert all(entry.model_extra["max_model_len"] == MAX_LEN for entry in entries.values())
    assert client.models.retrieve("upper").model_extra["adapter"]["rank"] == 4
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


@pytest.mark.parametrize("model", NAMES)
def test_a_completion_is_grpcs_answer(client: openai.OpenAI, served: Served, model: str):
    sampled = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 2}
    for grpc_fields, http_fields in (({}, extra()), (sampled, {**extra(), **sampled})):
        want = served.generate(request("Hello", 12, model=model, logprobs=2, **grpc_fields))
        got = client.completions.create(model=model, prompt="Hello", max_tokens=12, logprobs=2, **http_fields)
        assert [c.text for c in got.choices] == [o.text for o in want.outputs]
        assert [ids(c) for c in got.choices] == [list(o.token_ids) for o in want.outputs]
        assert [c.finish_reason for c in got.choices] == ["length"] * len(want.outputs)
        for choice, output in zip(got.choices, want.outputs, strict=True):
            assert choice.logprobs.token_logprobs == pytest.approx([x.logprob for x in output.logprobs], abs=1e-5)
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (
            want.usage.prompt_tokens,
            want.usage.completion_tokens,
        )
        assert got.object == "text_completion" and got.model == model and got.id.startswith("cmpl-")
    assert got.model_extra["timing"]["ttft_s"] > 0


@pytest.mark.parametrize("model", ["base", "upper"])
def test_a_chat_is_grpcs_answer_whole_and_streamed(client: openai.OpenAI, served: Served, model: str):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello there")])
    want = served.generate(request(chat, 20, model=model, logprobs=2)).outputs[0]
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello there"}], "max_completion_tokens": 20}
    got = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, **extra())
    choice = got.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert ids(choice) == list(want.token_ids) and got.object == "chat.completion"
    assert [t.logprob for t in choice.logprobs.content] == pytest.approx([x.logprob for x in want.logprobs], abs=1e-5)
    assert all(len(t.top_logprobs) == 2 and t.top_logprobs[0].token == t.token for t in choice.logprobs.content)
    raw = b"".join(bytes(t.bytes) for t in choice.logprobs.content)
    assert raw.decode("utf-8", "replace").replace("\ufffd", "") == want.text.replace("\ufffd", "")
    chunks = list(client.chat.completions.create(**asked, stream=True, **extra()))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want.text
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk" and len(chunks) > 2


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI):
    asked = {"model": "wide", "prompt": ["Hello", "Good day"], "n": 2, "max_tokens": 30, "seed": 3}
    sampled = {**extra(), "temperature": 1.0}
    whole = client.completions.create(**asked, **sampled)
    texts = {c.index: c.text for c in whole.choices}
    assert sorted(texts) == [0, 1, 2, 3] and len(set(texts.values())) == 4
    parts: dict[int, str] = dict.fromkeys(texts, "")
    usage, events = None, 0
    options = {"include_usage": True}
    for chunk in client.completions.create(**asked, stream=True, stream_options=options, **sampled):  # type: ignore
        assert usage is None  # the last event has it
        usage, events = chunk.usage, events + 1
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == texts and events > 4
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens == 120
    assert chunk.choices == [] and chunk.model_extra["timing"]["ttft_s"] > 0


def test_every_piece_has_the_usage_of_its_completion_so_far(client: openai.OpenAI):
    """GuideLLM asks for it with every stream."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "wide", "prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 9, "seed": 3}
    counts: dict[int, list[int]] = {i: [] for i in range(4)}
    *pieces, last = client.completions.create(**asked, stream=True, stream_options=options, **extra())  # type: ignore
    for piece in pieces:
        index, usage = piece.choices[0].index, piece.usage
        assert usage.prompt_tokens == (3, 2)[index // 2]
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        counts[index].append(usage.completion_tokens)
    assert all(some == sorted(set(some)) and some[-1] == 9 for some in counts.values())
    assert last.choices == [] and last.usage.completion_tokens == 36


def test_prompts_of_every_kind(client: openai.OpenAI, served: Served):
    tokens = list(served.inference.Tokenize(pb.TokenizeRequest(text="Hello")).token_ids)
    one = client.completions.create(model="base", prompt="Hello", **extra()).choices[0]
    assert one.model_extra["prompt_token_ids"] == tokens and len(ids(one)) == 16  # OpenAI's default
    for prompt in (tokens, ["Hello"], [tokens], ["Hello", tokens]):
        choices = client.completions.create(model="base", prompt=prompt, **extra()).choices  # type: ignore
        assert [c.index for c in choices] == list(range(len(choices)))
        assert {c.text for c in choices} == {one.text}
    assert len(choices) == 2


def test_echo_begins_with_the_prompt_and_its_logprobs(client: openai.OpenAI, served: Served):
    want = served.generate(request("Hello", 4, logprobs=1, prompt_logprobs=1))
    got = client.completions.create(model="base", prompt="Hello", max_tokens=4, echo=True, logprobs=1, **extra())
    choice = got.choices[0]
    assert choice.text == "Hello" + want.outputs[0].text
    entries = [None, *(e.logprob for e in want.prompt_logprobs[1:]), *(e.logprob for e in want.outputs[0].logprobs)]
    assert choice.logprobs.token_logprobs == [e if e is None else pytest.approx(e, abs=1e-5) for e in entries]
    assert choice.logprobs.tokens[:2] == ["<s>", "He"] and len(choice.logprobs.text_offset) == len(entries)
    streamed = client.completions.create(model="base", prompt="Hello", max_tokens=4, echo=True, stream=True, **extra())
    assert "".join(c.choices[0].text for c in streamed) == choice.text


def test_every_completion_has_the_prompts_logprobs(client: openai.OpenAI, served: Served):
    prompts = ["Hello", "Good day"]
    asked = {"model": "base", "prompt": prompts, "n": 2, "max_tokens": 3, "seed": 1, **extra(prompt_logprobs=1)}
    got = client.completions.create(**{**asked, "temperature": 1.0}, echo=True, logprobs=1)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    for choice in got.choices:
        prompt, scores = prompts[choice.index // 2], choice.logprobs
        assert scores is not None and scores.tokens[0] == "<s>" and scores.token_logprobs[0] is None
        assert choice.text.startswith(prompt) and len(scores.tokens) == len(choice.model_extra["prompt_token_ids"]) + 3
        lengths = {
            len(each) for each in (scores.tokens, scores.token_logprobs, scores.top_logprobs, scores.text_offset)
        }
        assert lengths == {len(scores.tokens)}
        known = len(choice.model_extra["prompt_logprobs"])
        assert known == len(choice.model_extra["prompt_token_ids"])
        assert None not in scores.token_logprobs[1:] and scores.text_offset == sorted(scores.text_offset)
    first, second = (got.choices[i].logprobs.token_logprobs[:known] for i in (2, 3))
    assert first == second


def test_an_echo_without_tokens_is_the_prompt(client: openai.OpenAI, http: httpx.Client):
    """As evaluations score a text."""
    asked: dict[str, Any] = {"model": "upper", "prompt": ["Hello", "Good day"], "echo": True, "temperature": 0}
    bare = client.completions.create(**asked, max_tokens=0, logprobs=1, extra_body={"return_token_ids": True})
    more = client.completions.create(**asked, max_tokens=3, logprobs=1)
    assert [(c.text, c.finish_reason, ids(c)) for c in bare.choices] == [(p, "length", []) for p in asked["prompt"]]
    for choice, longer in zip(bare.choices, more.choices, strict=True):
        count = len(choice.model_extra["prompt_token_ids"])
        assert choice.logprobs.tokens == longer.logprobs.tokens[:count]
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(longer.logprobs.token_logprobs[1:count], abs=1e-4)
    assert bare.usage.completion_tokens == 0 and bare.usage.prompt_tokens == more.usage.prompt_tokens
    streamed = client.completions.create(**asked, max_tokens=0, stream=True)
    assert sorted(chunk.choices[0].text for chunk in streamed) == ["Good day", "Hello"]
    assert http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 0}).status_code == 400


@pytest.mark.parametrize(("left", "drawn"), [(40, 16), (16, 16), (5, 5)])
def test_a_completion_that_sets_no_length_draws_16_tokens_or_those_that_are_left(
    client: openai.OpenAI, left: int, drawn: int
):
    got = client.completions.create(model="base", prompt=[5] * (MAX_LEN - left), **extra())
    assert got.usage is not None and got.usage.completion_tokens == drawn
    assert got.choices[0].finish_reason == "length"


def test_an_answer_goes_back_as_a_message(client: openai.OpenAI):
    """As clients keep a conversation: the message of the answer, in both of the package's forms."""
    asked: dict[str, Any] = {"model": "base", "max_tokens": 6, "temperature": 0}
    user = {"role": "user", "content": "Hello"}
    answer = client.chat.completions.create(**asked, messages=[user]).choices[0].message
    said = [
        client.chat.completions.create(**asked, messages=[user, back, user]).choices[0].message.content  # type: ignore
        for back in (answer, answer.model_dump(), {**answer.model_dump(), "reasoning": None, "annotations": []})
    ]
    assert len(set(said)) == 1


def test_the_packages_fields_are_known():
    """What it can send is either taken or refused by its own name, never as unknown."""
    for kind, asked in (
        (CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
        (ChatBody, chat_params.CompletionCreateParamsStreaming),
        (StreamOptions, ChatCompletionStreamOptionsParam),
        (MessageBody, ChatCompletionAssistantMessageParam),
    ):
        assert get_type_hints(asked).keys() <= set(kind.__struct_fields__)


def test_sampling_fields_reach_the_engine_by_vllms_names(client: openai.OpenAI, served: Served):
    bias = {str(token): 100.0 for token in range(40, 90)}
    free = client.completions.create(model="base", prompt="Hello", max_tokens=20, logit_bias=bias, seed=4).choices[0]
    assert len(free.text) == 20
    fields = {"include_stop_str_in_output": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    asked = {"model": "base", "prompt": "Hello", "max_tokens": 20, "logit_bias": bias, "seed": 4}
    stop = free.text[7:10]
    cut = client.completions.create(**asked, stop=[stop]).choices[0]  # type: ignore[call-overload]
    assert (cut.text, cut.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    kept = client.completions.create(**asked, stop=stop, extra_body=fields).choices[0]  # type: ignore[call-overload]
    assert kept.text == free.text[: free.text.index(stop) + 3]
    ended = {"model": "base", "prompt": "Hello", "logit_bias": {"50": 100}, "temperature": 0}
    by_id = client.completions.create(**ended, extra_body={"stop_token_ids": [50], "return_token_ids": True})
    assert by_id.choices[0].finish_reason == "stop" and ids(by_id.choices[0]) == [50]
    later = {"stop_token_ids": [50], "min_tokens": 4, "return_token_ids": True}
    assert len(ids(client.completions.create(**ended, extra_body=later).choices[0])) == 5


def test_what_shapes_the_choice_reaches_the_engine(http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch):
    fields = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "n": 2, "seed": 9, "max_tokens": 2,
    }  # fmt: skip
    asked, submit = list[Request](), served.replica.submit

    def noted(request: Request, sink: Sink) -> Future[int]:
        asked.append(request)
        return submit(request, sink)

    monkeypatch.setattr(served.replica, "submit", noted)
    user = {"role": "user", "content": "Hello"}
    for path, body in (("completions", {"prompt": "Hello"}), ("chat/completions", {"messages": [user]})):
        answer = http.post(f"/v1/{path}", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        sampling = asked.pop().sampling
        assert not asked and {name: getattr(sampling, name) for name in fields} == fields
        assert http.post(f"/v1/{path}", json={**body, "max_tokens": 2, "seed": -1, "top_k": -1}).status_code == 200
        unset = SamplingParams()
        assert (asked[0].sampling.top_k, asked.pop().sampling.seed) == (unset.top_k, unset.seed)
    body = {"messages": [user], "max_tokens": 9, "max_completion_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 2


def test_prompt_logprobs_have_vllms_form(client: openai.OpenAI, served: Served):
    want = served.generate(request("Hello", 1, prompt_logprobs=2)).prompt_logprobs
    got = client.completions.create(model="base", prompt="Hello", max_tokens=1, **extra(prompt_logprobs=2))
    entries = got.choices[0].model_extra["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(want)
    for entry, expected in zip(entries[1:], want[1:], strict=True):
        assert entry[str(expected.token_id)]["logprob"] == pytest.approx(expected.logprob, abs=1e-5)
        assert len(entry) in (2, 3) and all(set(value) == {"logprob", "decoded_token"} for value in entry.values())


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream, without its end."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]


def test_a_chats_prompt_is_told_where_vllm_tells_it(http: httpx.Client):
    messages = [{"role": "user", "content": "Hello"}]
    want = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    asked: dict[str, Any] = {"messages": messages, "n": 2, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/chat/completions", json={**asked, "return_token_ids": True, "prompt_logprobs": 1}).json()
    assert [whole["prompt_token_ids"], *(c["prompt_token_ids"] for c in whole["choices"])] == [want] * 3
    scores = [whole["prompt_logprobs"], *(c["prompt_logprobs"] for c in whole["choices"])]
    assert len(scores[0]) == len(want) and scores[0] == scores[1] == scores[2]

    pieces = events(http, "/v1/chat/completions", {**asked, "return_token_ids": True})
    told = dict[int, list[Any]]()
    for piece in pieces:
        (choice,) = piece["choices"]
        assert "prompt_token_ids" not in choice
        told.setdefault(choice["index"], []).append(piece.get("prompt_token_ids"))
    assert sorted(told) == [0, 1]
    assert all(first == want and later and not any(later) for first, *later in told.values())
    assert "prompt_token_ids" not in str([http.post("/v1/chat/completions", json=asked).json(),
                                          *events(http, "/v1/chat/completions", asked)])  # fmt: skip


def test_a_stream_tells_each_prompts_ids_with_its_first_piece(http: httpx.Client):
    prompts = ["Hello", "Good day"]
    want = [http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    fields = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "echo": True, "return_token_ids": True}
    told: list[list[Any]] = [[], []]
    for piece in events(http, "/v1/completions", {"prompt": prompts, **fields}):
        (choice,) = piece["choices"]
        assert "prompt_token_ids" not in piece
        told[choice["index"]].append(choice.get("prompt_token_ids"))
    assert [first for first, *_ in told] == want
    assert all(len(some) > 1 and not any(some[1:]) for some in told)


def test_the_name_of_who_speaks_is_taken(http: httpx.Client):
    """AutoGen sends one with every message."""
    user = {"role": "user", "content": "Hello"}
    tokens = [
        http.post("/tokenize", json={"messages": [{**user, **named}]}).json()["tokens"]
        for named in ({}, {"name": None}, {"name": ""}, {"name": "alice"}, {"name": "x" * 256})
    ]
    assert all(some == tokens[0] for some in tokens)
    said = http.post("/v1/chat/completions", json={"messages": [{**user, "name": "alice"}], "max_tokens": 2})
    assert said.status_code == 200 and said.json()["usage"]["prompt_tokens"] == len(tokens[0])


def test_a_template_sees_the_name_of_who_speaks(http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch):
    source = "{% for m in messages %}<{{ m.name if m.name is defined else '-' }}>{{ m.content }}{% endfor %}"
    tokenizer, template = served.backend.tokenizer, Template(source)
    monkeypatch.setattr(tokenizer, "render", lambda messages, ask=True: template.render(messages, ask, {}))
    said = [{"role": "user", "content": "Hi", "name": "alice"}, {"role": "user", "content": "Ho", "name": None}]
    got = http.post("/tokenize", json={"messages": said}).json()["tokens"]
    plain = {"prompt": "<alice>Hi<->Ho", "add_special_tokens": False}
    assert got == http.post("/tokenize", json=plain).json()["tokens"]


def test_parts_of_text_are_a_text(client: openai.OpenAI):
    def asked(content: Any) -> str | None:
        messages: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model="base", messages=messages, max_tokens=8, temperature=0)
        return answer.choices[0].message.content

    assert asked([{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]) == asked("Hello\nthere")


def test_a_cache_salt_keeps_prompts_apart(client: openai.OpenAI, served: Served):
    prompt = [7, *range(100, 200)]

    def cached(**fields: Any) -> int:
        got = client.completions.create(model="base", prompt=prompt, max_tokens=1, **extra(**fields))
        assert got.usage is not None and got.usage.prompt_tokens_details is not None
        return got.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [
        0,
        96,
        0,
        96,
        0,
    ]
    salted = request(prompt, 1, cache_salt="a")
    assert served.generate(salted).usage.cached_tokens == 96  # one salt on both fronts
    salted.tenant = "other"
    assert served.generate(salted).usage.cached_tokens == 0  # mixed into the tenant, never instead of it


def test_health_says_how_many_programs_still_compile(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
):
    for left in (3, 0):
        monkeypatch.setattr(LocalReplica, "programs_left", left)
        assert http.get("/health").json() == http.get("/ready").json() == {"status": "ok", "programs_left": left}


def test_async_clients_share_the_batch(served: Served):
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:

            async def one(model: str) -> str:
                text = ""
                stream = await client.completions.create(model=model, prompt="Hello", stream=True, **extra())
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(one(model) for model in NAMES * 4))

    texts = asyncio.run(all_of_them())
    want = [served.generate(request("Hello", 16, model=model)).outputs[0].text for model in NAMES]
    assert texts == want * 4
    served.check_idle()
