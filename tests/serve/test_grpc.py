"""The three services through a real channel: answers, streams, and requests that end early."""

from __future__ import annotations

import math
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2

from jlora.engine import loading
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.tokenizer import Tokenizer
from tests.serve import _tokenizers
from tests.serve._server import END, MAX_LEN, VOCAB, Served, refused, request, serving, wait_until

CODE = grpc.StatusCode
LONG = 3000  # tokens; several seconds, so it runs until it is stopped
LONG_BLOCKS = MAX_LEN // 16


def ids(response: pb.GenerateResponse, index: int = 0) -> list[int]:
    return list(response.outputs[index].token_ids)


def cache(served: Served) -> pb.CacheState:
    return served.control.GetCacheState(pb.GetCacheStateRequest())


# -- answers ------------------------------------------------------------------------------------


def test_stream_and_unary_say_the_same(served: Served):
    sampled = {"temperature": 1.0, "seed": 5}
    for asked in (request("Hello", 40), request("Hello", 40, **sampled), request((5, 6), 40, n=3, **sampled)):
        whole, parts = served.generate(asked), served.streamed(asked)
        assert [o.text for o in parts.outputs] == [o.text for o in whole.outputs]
        assert [list(o.token_ids) for o in parts.outputs] == [list(o.token_ids) for o in whole.outputs]
        assert [o.finish_reason for o in parts.outputs] == ["length"] * len(whole.outputs)
        assert parts.usage.completion_tokens == whole.usage.completion_tokens == 40 * len(whole.outputs)
        assert len({tuple(o.token_ids) for o in whole.outputs}) == len(whole.outputs)
        assert [o.index for o in whole.outputs] == list(range(len(whole.outputs)))


def test_usage_and_timing_are_on_the_last_message_only(served: Served):
    deltas = list(served.inference.GenerateStream(request("Hello", 20)))
    assert len(deltas) > 1 and {d.request_id for d in deltas} == {deltas[0].request_id} != {""}
    assert [d.HasField("usage") and d.HasField("timing") for d in deltas] == [False] * (len(deltas) - 1) + [True]
    timing = deltas[-1].timing
    assert 0 <= timing.queue_s <= timing.ttft_s and timing.tpot_s > 0
    assert timing.queue_s + timing.prefill_s == pytest.approx(timing.ttft_s, abs=1e-6)


def test_text_chat_and_token_ids_are_three_ways_to_one_prompt(served: Served):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello there")])
    text = "Hello there"
    for prompt, asked in ((text, pb.TokenizeRequest(text=text)), (chat, pb.TokenizeRequest(chat=chat))):
        tokens = served.inference.Tokenize(asked)
        assert tokens.max_model_len == served.spec.max_len and tokens.token_ids[0] == 1
        answer = served.generate(request(prompt))
        assert answer.usage.prompt_tokens == len(tokens.token_ids)
        assert ids(answer) == ids(served.generate(request(tokens.token_ids)))
        assert served.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids(answer))).text == answer.outputs[0].text
    shown = served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1, END], keep_special=True))
    assert shown.text == "<s></s>" and not served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1, END])).text


def test_unset_temperature_samples_and_zero_is_greedy(served: Served):
    greedy = ids(served.generate(request("Hello", 30)))
    sampled = {tuple(ids(served.generate(request("Hello", 30, temperature=None, seed=s)))) for s in (1, 2)}
    assert len(sampled) == 2 and tuple(greedy) not in sampled
    assert ids(served.generate(request("Hello", 30, temperature=None, seed=1))) in [list(s) for s in sampled]
    assert ids(served.generate(request("Hello", 30, temperature=1.0, top_k=1))) == greedy


def test_models_answer_together_as_they_do_alone(served: Served):
    names = ("", "upper", "lower", "wide", "base:upper", "base")
    alone = {name: ids(served.generate(request("Hello", 24, model=name))) for name in names}
    assert alone[""] == alone["base"] and alone["upper"] == alone["base:upper"]
    assert len({tuple(alone[name]) for name in ("", "upper", "lower", "wide")}) == 4
    calls = {name: served.inference.Generate.future(request("Hello", 24, model=name)) for name in names * 2}
    assert {name: ids(call.result()) for name, call in calls.items()} == alone


def test_unknown_model_lists_near_names(served: Served):
    for model in ("uper", "base:uper"):
        with refused(CODE.NOT_FOUND, "uper", "upper"):
            served.generate(request(model=model))
    with refused(CODE.INVALID_ARGUMENT, "model = 'base:'"):
        served.generate(request(model="base:"))


def test_logprobs_cover_every_token_when_asked(served: Served):
    answer = served.generate(request((5, 6, 7), 6, logprobs=3, prompt_logprobs=2))
    output = answer.outputs[0]
    assert [p.token_id for p in output.logprobs] == list(output.token_ids)
    for chosen in output.logprobs:
        assert len(chosen.top) == 3 and chosen.top[0].token_id == chosen.token_id  # greedy
        assert chosen.top[0].logprob >= chosen.top[1].logprob >= chosen.top[2].logprob
        assert chosen.logprob == pytest.approx(chosen.top[0].logprob, abs=1e-5) and chosen.logprob < 0
    prompt = answer.prompt_logprobs
    assert [p.token_id for p in prompt[1:]] == [6, 7] and prompt[0] == pb.TokenLogprob()
    assert [len(p.top) for p in prompt[1:]] == [2, 2]
    assert served.streamed(request((5, 6, 7), 6, logprobs=3, prompt_logprobs=2)).prompt_logprobs == prompt
    plain = served.generate(request((5, 6, 7), 6))
    assert not plain.outputs[0].logprobs and not plain.prompt_logprobs
    none_of_the_top = served.generate(request((5, 6, 7), 2, logprobs=0)).outputs[0].logprobs
    assert len(none_of_the_top) == 2 and not none_of_the_top[0].top


# -- where the text ends ------------------------------------------------------------------------


def test_stop_string_across_tokens_ends_the_text(served: Served):
    asked = {"logit_bias": {t: 100.0 for t in range(40, 90)}, "temperature": 1.0, "seed": 4}  # single ASCII bytes
    whole = served.generate(request("Hello", 40, **asked)).outputs[0]
    stop = whole.text[17:22]
    at = whole.text.index(stop)
    assert len(whole.text) == 40 and at + 5 < 40  # a character per token
    for answer in (served.generate(request("Hello", 40, stop=[stop, "never"], **asked)),
                   served.streamed(request("Hello", 40, stop=["never", stop], **asked))):  # fmt: skip
        output = answer.outputs[0]
        assert (output.text, output.finish_reason) == (whole.text[:at], "stop")
        assert list(output.token_ids) == list(whole.token_ids[: at + 5])
        assert answer.usage.completion_tokens == at + 5
    kept = served.generate(request("Hello", 40, stop=[stop], include_stop=True, **asked)).outputs[0]
    assert kept.text == whole.text[: at + 5]
    late = served.generate(request("Hello", 40, stop=[stop], min_tokens=40, **asked)).outputs[0]
    assert late.text == whole.text and late.finish_reason in ("length", "stop")
    served.check_idle()


def test_one_completion_stops_and_the_others_go_on(served: Served):
    asked = {"logit_bias": {t: 100.0 for t in range(40, 90)}, "temperature": 1.0, "seed": 4, "n": 3}
    free = served.generate(request("Hello", 24, **asked))
    stop = free.outputs[1].text[6:9]
    assert stop not in free.outputs[0].text and stop not in free.outputs[2].text
    cut = served.generate(request("Hello", 24, stop=[stop], **asked))
    assert [o.finish_reason for o in cut.outputs] == ["length", "stop", "length"]
    assert [cut.outputs[i].text for i in (0, 2)] == [free.outputs[i].text for i in (0, 2)]
    assert cut.outputs[1].text == free.outputs[1].text[: free.outputs[1].text.index(stop)]


def test_end_and_stop_tokens(served: Served):
    always = {"logit_bias": {END: 100.0}, "ignore_eos": None}
    ended = served.generate(request("Hello", 9, **always))
    assert (ids(ended), ended.outputs[0].text, ended.outputs[0].finish_reason) == ([END], "", "stop")
    assert ended.usage.completion_tokens == 1
    ignored = served.generate(request("Hello", 9, **{**always, "ignore_eos": True}))
    assert ids(ignored) == [END] * 9 and ignored.outputs[0].finish_reason == "length"
    by_id = {"logit_bias": {50: 100.0}, "stop_token_ids": [50]}
    cut = served.generate(request("Hello", 9, **by_id)).outputs[0]
    assert (list(cut.token_ids), cut.text, cut.finish_reason) == ([50], "", "stop")
    assert served.generate(request("Hello", 9, include_stop=True, **by_id)).outputs[0].text != ""
    assert len(ids(served.generate(request("Hello", 9, min_tokens=4, **by_id)))) == 5


# -- requests that end early --------------------------------------------------------------------


def test_abort_ends_with_what_there_is(served: Served):
    stream = served.inference.GenerateStream(request("Hello", LONG, request_id="victim"))
    first = next(stream)
    assert served.control.Abort(pb.AbortRequest(request_id="victim")).aborted
    rest = list(stream)
    assert first.request_id == "victim" and rest[-1].outputs[0].finish_reason == "abort"
    assert rest[-1].usage.completion_tokens == sum(len(o.token_ids) for d in [first, *rest] for o in d.outputs)
    assert not served.control.Abort(pb.AbortRequest(request_id="victim")).aborted
    with refused(CODE.INVALID_ARGUMENT, "request_id"):
        served.control.Abort(pb.AbortRequest())


def test_each_tenant_has_its_own_request_ids(served: Served):
    """A live id of another tenant is neither in the way nor within reach."""
    streams = {
        tenant: served.inference.GenerateStream(request("Hello", LONG, request_id="same", tenant=tenant))
        for tenant in ("red", "blue", "")
    }
    for stream in streams.values():
        next(stream)
    for tenant in streams:
        with refused(CODE.ALREADY_EXISTS, "request_id 'same'"):
            served.generate(request("Hello", request_id="same", tenant=tenant))
    for request_id, tenant in (("same", "green"), ("other", "red"), ("same", "r")):
        assert not served.control.Abort(pb.AbortRequest(request_id=request_id, tenant=tenant)).aborted
    for tenant, stream in streams.items():
        live = served.stats().live_requests
        assert served.control.Abort(pb.AbortRequest(request_id="same", tenant=tenant)).aborted
        assert list(stream)[-1].outputs[0].finish_reason == "abort"
        wait_until(lambda live=live: served.stats().live_requests == live - 1)
    served.check_idle()


def test_a_live_request_id_cannot_be_used_twice(served: Served):
    stream = served.inference.GenerateStream(request("Hello", 200, request_id="twice"))
    next(stream)
    with refused(CODE.ALREADY_EXISTS, "twice"):
        served.generate(request("Hello", request_id="twice"))
    assert list(stream)[-1].outputs[0].finish_reason == "length"  # the first one was left alone
    assert served.generate(request("Hello", request_id="twice")).request_id == "twice"


def test_a_full_queue_refuses_and_serves_the_rest(served: Served):
    asked = [served.inference.Generate.future(request((5, 6), LONG, temperature=1.0)) for _ in range(100)]
    wait_until(lambda: any(call.done() for call in asked))
    refusals = [call for call in asked if call.done()]
    assert all(call.code() == CODE.RESOURCE_EXHAUSTED and "queue is full" in call.details() for call in refusals)
    for call in asked:
        call.cancel()
    served.check_idle()
    assert len(ids(served.generate(request("Hello")))) == 8


def test_a_slow_reader_delays_nobody(served: Served):
    slow = served.inference.GenerateStream(request("Hello", 1500))
    next(slow)
    served.generate(request("Hello", 10))
    assert served.stats().running == 1, "the one that nobody reads runs on, and has far more to say"
    wait_until(lambda: not served.stats().running)  # it ran to its end unread
    deltas = list(slow)
    assert sum(len(o.token_ids) for d in deltas for o in d.outputs) >= 1490
    assert deltas[-1].usage.completion_tokens == 1500


# -- adapters and the cache at run time ---------------------------------------------------------


def test_adapters_come_and_go(served: Served, text_model: Path):
    path, free = str(text_model.parent / "adapters" / "upper"), cache(served).hbm.free
    made = served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="new", path=path, pinned=True))
    known = served.adapters.GetAdapter(pb.GetAdapterRequest(name="upper"))
    assert made.name == "new" and made.uid != known.uid and made.digest == known.digest
    assert (made.rank, list(made.target_modules), made.pinned) == (4, ["q", "v"], True)
    assert made.tier == pb.AdapterInfo.HBM and made.blocks > 0 and made.bytes > 0
    assert made.ranks["layers.0.self_attn.q_proj"] == 4 and made.last_used_s == -1
    listed = served.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
    assert [a.name for a in listed] == ["lower", "new", "upper", "wide"]
    assert ids(served.generate(request("Hello", model="new"))) == ids(served.generate(request("Hello", model="upper")))
    assert not served.adapters.PinAdapter(pb.PinAdapterRequest(name="new", pinned=False)).pinned
    with refused(CODE.ALREADY_EXISTS, "new"):
        served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="new", path=path))
    other = str(text_model.parent / "adapters" / "lower")
    again = served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="new", path=other, replace=True))
    assert again.uid != made.uid and again.digest != made.digest
    assert ids(served.generate(request("Hello", model="new"))) == ids(served.generate(request("Hello", model="lower")))
    assert served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="new")).uid == again.uid
    with refused(CODE.NOT_FOUND, "new"):
        served.generate(request(model="new"))
    served.control.FlushCache(pb.FlushCacheRequest())
    assert cache(served).hbm.free >= free


def test_a_load_names_the_folder_that_is_missing_and_the_log_has_its_path(
    served: Served, caplog: pytest.LogCaptureFixture
):
    with refused(CODE.NOT_FOUND, "'the-last-folder'") as error:
        served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="far", path="/srv/" + "deep/" * 99 + "the-last-folder"))
    assert "/srv" not in error.value.details()
    assert "/srv/deep/" in caplog.text and "deep/the-last-folder'" in caplog.text


def test_unloading_a_pinned_adapter_is_logged_as_such(
    served: Served, text_model: Path, caplog: pytest.LogCaptureFixture
):
    path = str(text_model.parent / "adapters" / "upper")
    for pinned, said in ((True, "unloads, although it is pinned: uid="), (False, "unloads: uid=")):
        made = served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="new", path=path, pinned=pinned))
        with caplog.at_level("INFO", logger=loading.__name__):
            served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="new"))
        assert caplog.messages.count(f"adapter new {said}{made.uid}") == 1, caplog.messages


def test_pins_leave_room_for_the_longest_request_and_the_largest_adapter(served: Served, text_model: Path):
    path = str(text_model.parent / "adapters" / "wide")
    names = []
    with refused(CODE.RESOURCE_EXHAUSTED, f"longest context {LONG_BLOCKS}", "the 700 that", "unpin one"):
        while True:
            name = f"pinned{len(names)}"
            served.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path, pinned=True))
            names.append(name)
    held = sum(info.blocks for info in served.replica.adapters().result() if info.pinned)
    assert held < 700 - LONG_BLOCKS
    for model in ("base", "wide"):
        whole = served.generate(request([5] * (MAX_LEN - 2), 2, model=model, bypass_prefix_cache=True))
        assert len(whole.outputs[0].token_ids) == 2
    for name in names:
        served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name=name))
    served.check_idle()


def test_prefix_cache_is_used_bypassed_and_flushed(served: Served):
    prompt = [(7 * i) % 300 + 5 for i in range(100)]
    first = served.generate(request(prompt))
    hint = served.inference.Prefetch(request(prompt, model="base"))
    again = served.generate(request(prompt))
    bypassed = served.generate(request(prompt, bypass_prefix_cache=True))
    assert ids(first) == ids(again) == ids(bypassed)
    assert again.usage.cached_tokens == hint.cached_tokens == 96 and hint.adapter_resident  # whole blocks of 16
    assert (first.usage.cached_tokens, bypassed.usage.cached_tokens) == (0, 0)
    for tenant, cached in (("a", 0), ("b", 0), ("a", 96)):  # nobody sees what another tenant asked
        assert served.inference.Prefetch(request(prompt, tenant=tenant)).cached_tokens == cached
        answer = served.generate(request(prompt, tenant=tenant))
        assert (ids(answer), answer.usage.cached_tokens) == (ids(first), cached)
    assert cache(served).hbm.history_kv > 0
    assert served.control.FlushCache(pb.FlushCacheRequest()).blocks > 0
    assert cache(served).hbm.history_kv == 0
    with refused(CODE.NOT_FOUND, "uper"):
        served.inference.Prefetch(request(prompt, model="uper"))


def test_server_info_says_what_it_is_without_paths(served: Served, text_model: Path):
    info = served.control.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.model, info.platform, info.tp, info.dtype) == ("base", "cpu", 1, "float32")
    assert (info.vocab, info.max_model_len, info.block_tokens) == (VOCAB, served.spec.max_len, 16)
    assert info.blocks == cache(served).hbm.total and len(info.devices) == 1 and info.text and info.chat
    assert "serve.otlp_endpoint" not in info.config and "serve.keys" not in info.config
    assert info.config["engine.max_seqs"] == "8" and info.host_s_per_step < 1 and not info.draining
    assert str(text_model.parent) not in str(info) and math.isfinite(info.uptime_s)


# -- a model without a tokenizer ----------------------------------------------------------------


def test_a_model_without_tokenizer_serves_token_ids(served: Served):
    with serving(Backend(replica=served.replica)) as plain:
        answer = plain.generate(request((5, 6, 7)))
        assert ids(answer) == ids(served.generate(request((5, 6, 7)))) and answer.outputs[0].text == ""
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="secret")])
        for asked in (request("secret words"), request(chat), request((5,), stop=["secret"])):
            with refused(CODE.FAILED_PRECONDITION, "tokenizer") as error:
                plain.generate(asked)
            assert "secret" not in error.value.details()
        with refused(CODE.FAILED_PRECONDITION, "tokenizer"):
            plain.inference.Detokenize(pb.DetokenizeRequest(token_ids=[5]))
        info = plain.control.GetServerInfo(pb.GetServerInfoRequest())
        assert not info.text and not info.chat


def test_chat_needs_a_template(served: Served, tmp_path: Path):
    bare = Tokenizer.from_dir(_tokenizers.write(tmp_path, _tokenizers.byte_level(VOCAB), template=None))
    with serving(Backend(replica=served.replica, tokenizer=bare)) as templateless:
        with refused(CODE.FAILED_PRECONDITION, "chat template"):
            templateless.generate(request(pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])))
        assert ids(templateless.generate(request("hi")))
        assert not templateless.control.GetServerInfo(pb.GetServerInfoRequest()).chat


def test_generated_code_is_that_of_the_proto_file(tmp_path: Path):
    """Written again by protoc, the interface is the committed one."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    out, root = tmp_path / "descriptor", Path(__file__).resolve().parents[2]
    source = str(root / "jlora/serve/proto/jlora.proto")
    assert protoc.main(["protoc", f"-I{root}", f"--descriptor_set_out={out}", source]) == 0
    made = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    for message in made.message_type:  # protoc adds the names that JSON would use
        for part in (message, *message.nested_type):
            for field in part.field:
                field.ClearField("json_name")
    assert made == committed, "run make proto"
