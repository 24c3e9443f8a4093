"""Activated LoRA as a client sees it: shared KV, refusals, how an adapter is invoked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.serve import _server
from tests.serve._server import END, Served, refused, request

CODE = grpc.StatusCode
BLOCK = _server.SMALL["cache.block_tokens"]
CHECK, JUDGE = (300, 301), (302,)  # invocations
TALK = tuple(5 + i % 200 for i in range(5 * BLOCK + 3))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> dict[str, str]:
    """`check` and `judge` are activated; `plain` is `check` without its invocation."""
    root = tmp_path_factory.mktemp("alora")
    spec = _make.tiny_spec(vocab=_server.VOCAB, max_len=_server.MAX_LEN, eos_ids=(END,))
    for name, seed, invocation in (("check", 1, CHECK), ("judge", 2, JUDGE), ("plain", 1, ())):
        _make.make_adapter(root / name, spec, seed, 4, ("q", "v", "down"), alora_invocation_tokens=list(invocation))
    return {f"adapters.paths.{name}": str(root / name) for name in ("check", "judge", "plain")}


@pytest.fixture(scope="module")
def running(text_model: Path, adapters: dict[str, str]) -> Iterator[Served]:
    with _server.serve(text_model, adapters) as served:
        yield served
        assert served.stats().compiles_after_warmup == 0


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    """The server, with nothing in its cache but adapters."""
    _server.wait_until(lambda: not cache(running).in_flight)
    running.control.FlushCache(pb.FlushCacheRequest())
    yield running
    running.check_idle()


def cache(served: Served) -> pb.CacheState:
    return served.control.GetCacheState(pb.GetCacheStateRequest())


def ask(served: Served, prompt: tuple[int, ...], model: str = "") -> tuple[tuple[int, ...], int]:
    """Output tokens, and how many of the prompt's were known."""
    answer = served.generate(request(prompt, 20, model=model))
    return tuple(answer.outputs[0].token_ids), answer.usage.cached_tokens


def test_cached_tokens_show_what_base_and_adapters_share(served: Served):
    long, before = len(TALK) // BLOCK * BLOCK, cache(served)
    assert ask(served, TALK)[1] == 0
    assert ask(served, (*TALK, *CHECK), "check")[1] == long
    assert ask(served, (*TALK, *JUDGE), "judge")[1] == long
    assert ask(served, (*TALK, *CHECK), "plain")[1] == 0
    assert ask(served, (*TALK, *CHECK))[1] == long
    after = cache(served)
    assert after.kv_base_hit_tokens - before.kv_base_hit_tokens == 2 * long
    assert after.kv_hit_tokens - before.kv_hit_tokens == 3 * long and after.invalid_kv == 0


def test_a_prompt_without_the_invocation_is_refused_naming_adapter_and_sequence(served: Served):
    for prompt in (TALK, (*TALK, CHECK[0]), (*TALK, *reversed(CHECK))):
        with refused(CODE.INVALID_ARGUMENT, "'check'", "alora_invocation_tokens = [300, 301]", "alora_missing"):
            served.generate(request(prompt, model="check"))
    read = served.inference.Detokenize(pb.DetokenizeRequest(token_ids=CHECK, keep_special=True)).text
    with refused(CODE.INVALID_ARGUMENT, "'check'", f"= [300, 301], the text {read!r} (a space"):
        list(served.inference.GenerateStream(request(TALK, model="base:check"), timeout=60))
    with refused(CODE.INVALID_ARGUMENT, "'check'", f"the text {read!r}"):
        served.inference.Prefetch(request(TALK, model="check"), timeout=60)
    assert ask(served, TALK, "plain")


def test_an_adapter_says_how_it_is_invoked(served: Served):
    listed = served.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
    found = {a.name: list(a.alora_invocation_tokens) for a in listed}
    assert found == {"check": [300, 301], "judge": [302], "plain": []}


def test_over_http_tokens_invoke_as_in_grpc(served: Served):
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(base_url=served.http, timeout=60) as http:

        def answer(model: str, prompt: tuple[int, ...]) -> httpx.Response:
            return http.post("/v1/completions", json={**fields, "model": model, "prompt": list(prompt)})

        got, plain = (answer(model, (*TALK, *CHECK)).json() for model in ("check", "base"))
        want = served.generate(request((*TALK, *CHECK), 12, model="check"))
        assert got["choices"][0]["token_ids"] == list(want.outputs[0].token_ids) != plain["choices"][0]["token_ids"]
        usage = answer("judge", (*TALK, *JUDGE)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(TALK) // BLOCK * BLOCK  # the base's
        for refusal in (
            answer("check", TALK),
            http.post("/v1/prefetch", json={"model": "check", "prompt": list(TALK)}),
        ):
            message = refusal.json()["error"]["message"]
            assert refusal.status_code == 400 and "alora_invocation_tokens" in message and ", the text " in message


def test_over_http_a_chats_role_invokes(served: Served, tmp_path: Path):
    """The tokens with which the template opens the assistant's answer are the invocation."""
    said = [{"role": "user", "content": "Hello there"}]
    fields = {"model": "role", "messages": said, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=served.http, timeout=60) as http:
        asking, bare = (
            http.post("/tokenize", json={"messages": said, "add_generation_prompt": opens}).json()["tokens"]
            for opens in (True, False)
        )
        role = asking[len(bare) :]
        path = _make.make_adapter(tmp_path / "role", served.spec, 3, 4, ("q", "v"), alora_invocation_tokens=role)
        body = {"lora_name": "role", "lora_path": str(path)}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        got = http.post("/v1/chat/completions", json={**fields, "return_token_ids": True}).json()
        chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in said])
        want = served.generate(request(chat, 12, model="role"))
        assert got["choices"][0]["token_ids"] == list(want.outputs[0].token_ids)
        refusal = http.post("/v1/chat/completions", json={**fields, "add_generation_prompt": False})
        assert refusal.status_code == 400 and "alora_invocation_tokens" in refusal.json()["error"]["message"]
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "role"}).status_code == 200
