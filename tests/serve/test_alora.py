"""Activated LoRA as a client sees it: shared KV, refusals, a pipeline of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
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


def test_a_multi_turn_pipeline_computes_history_once_and_each_answer_once_as_the_bases(served: Served):
    talk, computed, new = TALK, 0, len(TALK)
    for model, invocation in (("", ()), ("check", CHECK), ("", ()), ("judge", JUDGE), ("check", CHECK), ("", ())):
        talk += invocation
        answer, known = ask(served, talk, model)
        computed += len(talk) - known
        talk += answer[:10]
        new += len(invocation) + 10
    # Each of the six steps computes what is new, and again what shares a block with the step before.
    assert computed <= new + 6 * 2 * BLOCK
    assert ask(served, talk)[1] >= len(talk) - 3 * BLOCK
    again = [ask(served, talk)[1] for _ in range(2)]
    assert again == [(len(talk) - 1) // BLOCK * BLOCK] * 2  # all of it is base KV by now


def test_an_activated_lora_answers_otherwise_than_the_base_and_than_the_same_weights_as_a_lora(served: Served):
    prompt = (*TALK, *CHECK, 7, 8)
    answers = [ask(served, prompt, model)[0] for model in ("", "check", "plain")]
    assert len(set(answers)) == 3
    assert [ask(served, prompt, model)[0] for model in ("", "check", "plain")] == answers
    invoked_at_once = (*CHECK, *TALK)  # from token 0 on it is the same
    assert ask(served, invoked_at_once, "check")[0] == ask(served, invoked_at_once, "plain")[0]


def test_a_prompt_without_the_invocation_is_refused_naming_adapter_and_sequence(served: Served):
    for prompt in (TALK, (*TALK, CHECK[0]), (*TALK, *reversed(CHECK))):
        with refused(CODE.INVALID_ARGUMENT, "'check'", "alora_invocation_tokens = [300, 301]", "alora_missing"):
            served.generate(request(prompt, model="check"))
    with refused(CODE.INVALID_ARGUMENT, "'check'"):
        list(served.inference.GenerateStream(request(TALK, model="base:check"), timeout=60))
    with refused(CODE.INVALID_ARGUMENT, "'check'"):
        served.inference.Prefetch(request(TALK, model="check"), timeout=60)
    assert ask(served, TALK, "plain")


def test_a_prompt_without_the_invocation_is_the_bases_if_the_configuration_says_so(
    text_model: Path, adapters: dict[str, str]
):
    with _server.serve(text_model, {**adapters, "adapters.alora_missing": "base"}) as lenient:
        answer, known = ask(lenient, TALK, "check")
        assert known == 0 and (answer, 5 * BLOCK) == ask(lenient, TALK)
        assert ask(lenient, (*TALK, *CHECK), "check")[1] == 5 * BLOCK


def test_several_completions_and_streams_of_an_activated_prompt(served: Served):
    prompt = (*TALK, *CHECK, *range(5, 5 + BLOCK))
    sampled = request(prompt, 20, model="check", n=3, temperature=1.0, seed=5)
    whole, parts = served.generate(sampled), served.streamed(sampled)
    assert [list(o.token_ids) for o in whole.outputs] == [list(o.token_ids) for o in parts.outputs]
    assert len({tuple(o.token_ids) for o in whole.outputs}) == 3
    alone = served.generate(request(prompt, 20, model="check", temperature=1.0, seed=5, bypass_prefix_cache=True))
    assert list(alone.outputs[0].token_ids) == list(whole.outputs[0].token_ids) and alone.usage.cached_tokens == 0


def test_an_adapter_says_how_it_is_invoked_and_comes_and_goes(served: Served, adapters: dict[str, str]):
    found = {
        a.name: list(a.alora_invocation_tokens) for a in served.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
    }
    assert found == {"check": [300, 301], "judge": [302], "plain": []}
    prompt = (*TALK, *CHECK, *range(5, 5 + 2 * BLOCK))
    before, _ = ask(served, prompt, "check")
    assert ask(served, prompt, "check") == (before, 7 * BLOCK)
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="check"))
    with refused(CODE.NOT_FOUND, "'check'"):
        served.generate(request(prompt, model="check"))
    path = adapters["adapters.paths.check"]
    served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="check", path=path))
    assert ask(served, prompt, "check") == (before, 5 * BLOCK)  # its suffix went with it, the base's KV did not
