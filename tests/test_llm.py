"""The notebook API on a real engine: answers in order, text that fits its tokens, nothing left running."""

from __future__ import annotations

import _thread
import dataclasses
import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from jlora import LLM, Completion, SamplingParams
from jlora.engine.local import LocalReplica
from jlora.errors import (
    AlreadyExists,
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from tests import _make, port
from tests.serve import _tokenizers
from tests.serve._server import wait_until

SMALL = {
    "cache": {"hbm_blocks": 256, "block_tokens": 8},
    "engine": {"max_seqs": 4, "max_step_tokens": 16, "max_queue": 32},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Hello world", "The quick brown fox", "for i in range", "café €"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model` and its tokenizer, `ids` without one, and the adapters `one` and `two`."""
    root = tmp_path_factory.mktemp("llm")
    core = _tokenizers.byte_level()
    spec = _make.make_model(root / "model", vocab=core.get_vocab_size())
    _tokenizers.write(root / "model", core)
    _make.make_model(root / "ids", vocab=spec.vocab)  # of the same shape, so that nothing compiles again
    _make.make_adapter(root / "one", spec, seed=1, r=4, targets=("q", "v"))
    _make.make_adapter(root / "two", spec, seed=2, r=8, targets=("o", "down"))
    return root


@pytest.fixture(scope="module")
def llm(files: Path) -> Iterator[LLM]:
    with LLM(files / "model", adapters={"one": files / "one"}, config=SMALL, progress=False) as llm:
        yield llm


def alone(llm: LLM, prompt: str | list[int], adapter: str | None = None, **sampling) -> Completion:
    [completion] = llm.generate(prompt, dataclasses.replace(GREEDY, **sampling), adapter)
    return completion


def assert_idle(llm: LLM) -> None:
    """Everything that ran was freed, within a few steps."""
    end = time.monotonic() + 60
    while llm.cache_stats().hbm.running_kv and time.monotonic() < end:
        time.sleep(0.01)
    assert llm.cache_stats().hbm.running_kv == 0


def test_a_list_of_prompts_gives_their_completions_in_order(llm: LLM):
    batch = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in batch] == [alone(llm, p).token_ids for p in PROMPTS]
    for prompt, c in zip(PROMPTS, batch, strict=True):
        assert c.text == llm.tokenizer.decode(c.token_ids)
        assert (c.usage.prompt_tokens, c.usage.completion_tokens) == (
            len(llm.tokenizer.encode(prompt)),
            len(c.token_ids),
        )
        assert c.finish_reason == "length" if len(c.token_ids) == 12 else "stop"
        assert 0 < c.timing.ttft < 60 and c.index == 0 and c.logprobs is None


def test_each_prompt_may_have_its_own_sampling_and_adapter(llm: LLM):
    sampling = [dataclasses.replace(GREEDY, max_tokens=n) for n in (3, 5, 7, 9)]
    names = [None, "one", None, "one"]
    batch = llm.generate(PROMPTS, sampling, names)
    assert [c.token_ids for c in batch] == [
        alone(llm, p, a, max_tokens=s.max_tokens).token_ids for p, a, s in zip(PROMPTS, names, sampling, strict=True)
    ]
    assert alone(llm, PROMPTS[0], "one").token_ids != alone(llm, PROMPTS[0]).token_ids


def test_prompts_may_be_token_ids_in_any_form(llm: LLM):
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = alone(llm, PROMPTS[0]).token_ids
    for prompts in (ids, tuple(ids), [ids], np.asarray(ids), [np.asarray(ids)], [PROMPTS[0]], PROMPTS[0]):
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [expected]
    assert llm.generate([], GREEDY) == []


def test_n_completions_of_a_prompt_follow_each_other_and_repeat_with_the_seed(llm: LLM):
    sampling = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    first, again = llm.generate(PROMPTS[:2], sampling), llm.generate(PROMPTS[:2], sampling)
    assert [c.index for c in first] == [0, 1, 2, 0, 1, 2]
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in first[:3]}) > 1


def test_a_stream_has_the_text_and_tokens_of_generate(llm: LLM):
    expected = alone(llm, PROMPTS[1], "one")
    events = list(llm.stream(PROMPTS[1], GREEDY, adapter="one"))
    assert "".join(e.text for e in events) == expected.text
    assert tuple(token for e in events for token in e.token_ids) == expected.token_ids
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == expected.finish_reason and events[-1].usage and events[-1].timing


def test_closing_a_stream_early_frees_what_it_held(llm: LLM):
    events = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    assert next(events).token_ids
    assert llm.cache_stats().hbm.running_kv > 0
    events.close()
    assert_idle(llm)


def test_a_stream_is_checked_when_it_is_asked_for(llm: LLM):
    with pytest.raises(OutOfRange):
        llm.stream(PROMPTS[0], SamplingParams(max_tokens=10_000))
    with pytest.raises(NotFound):
        llm.stream(PROMPTS[0], adapter="nobody")


def stop_in(text: str) -> str:
    """Two neighbouring characters from the middle, which end the text there."""
    return next(text[i : i + 2] for i in range(3, len(text) - 2) if text.find(text[i : i + 2]) == i)


def test_a_stop_string_ends_the_answer_and_is_cut_from_it(llm: LLM):
    full = alone(llm, PROMPTS[0], max_tokens=40, ignore_eos=True)
    stop = stop_in(full.text)
    c = alone(llm, PROMPTS[0], max_tokens=40, ignore_eos=True, stop=(stop,))
    assert (c.text, c.finish_reason) == (full.text.split(stop)[0], "stop")
    assert c.token_ids == full.token_ids[: c.usage.completion_tokens]
    shown = list(llm.stream(PROMPTS[0], SamplingParams(0, max_tokens=40, ignore_eos=True, stop=(stop,))))
    assert "".join(e.text for e in shown) == full.text.split(stop)[0]
    assert [e.finish_reason for e in shown if e.finish_reason] == ["stop"]
    assert_idle(llm)


def test_a_chat_goes_through_the_template(llm: LLM):
    messages = [{"role": "user", "content": "Hello"}]
    expected = llm.generate(llm.tokenizer.chat(messages), GREEDY, "one")[0].token_ids
    assert [c.token_ids for c in llm.chat(messages, GREEDY, adapter="one")] == [expected]
    assert [c.token_ids for c in llm.chat([messages, messages], GREEDY, adapter="one")] == [expected] * 2
    (whole,), pieces = llm.chat(messages, GREEDY, adapter="one"), list(llm.stream(messages, GREEDY, adapter="one"))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == list(expected)


@pytest.mark.parametrize(
    "prompts, sampling, error, message",
    [
        (["ok", ""], GREEDY, InvalidArgument, r"prompts\[1\]: prompt: is empty"),
        (["ok", [1, 10_000]], GREEDY, InvalidArgument, r"prompts\[1\]: prompt\[1\] = 10000"),
        (["ok", "x" * 500], GREEDY, OutOfRange, r"prompts\[1\]: .*128"),
        (["ok", "ok"], [GREEDY], InvalidArgument, "sampling: has 1 entries"),
        (["ok", "ok"], [GREEDY, SamplingParams(top_p=2)], InvalidArgument, r"prompts\[1\]: top_p"),
        (["ok", None], GREEDY, InvalidArgument, r"prompts\[1\]: prompt = None"),
        (3, GREEDY, InvalidArgument, "prompts: must be text"),
        ("ok", {"top_p": 1}, InvalidArgument, "sampling = .*: must be a SamplingParams"),
    ],
)
def test_one_bad_prompt_refuses_the_call_before_anything_runs(llm: LLM, prompts, sampling, error, message):
    before = llm.cache_stats().kv_lookup_tokens
    with pytest.raises(error, match=message):
        llm.generate(prompts, sampling)
    with pytest.raises(NotFound, match="one"):
        llm.generate(PROMPTS, GREEDY, adapter=[None, "oen", None, None])
    assert llm.cache_stats().kv_lookup_tokens == before


def test_more_prompts_than_the_queue_takes_all_get_their_answer(llm: LLM):
    batch = llm.generate(PROMPTS * 25, dataclasses.replace(GREEDY, max_tokens=2, n=2))
    expected = [alone(llm, p, max_tokens=2).token_ids for p in PROMPTS]
    assert [c.token_ids for c in batch] == [t for t in expected for _ in range(2)] * 25


def test_an_interrupt_aborts_what_runs_and_leaves_the_model_usable(llm: LLM):
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate(PROMPTS * 8, SamplingParams(max_tokens=100, ignore_eos=True))
    timer.join()
    assert_idle(llm)
    assert len(alone(llm, PROMPTS[0], ignore_eos=True).token_ids) == 12


def test_threads_share_the_model(llm: LLM):
    expected = [alone(llm, p).token_ids for p in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        assert [c.token_ids for c in pool.map(lambda p: alone(llm, p), PROMPTS)] == expected


def test_adapters_come_and_go_at_run_time(llm: LLM, files: Path):
    info = llm.load_adapter("two", files / "two")
    assert (info.name, info.rank, set(info.target_modules)) == ("two", 8, {"o", "down"})
    assert {a.name for a in llm.adapters()} == {"one", "two"}
    with pytest.raises(AlreadyExists):
        llm.load_adapter("two", files / "two")
    with pytest.raises(NotFound, match=f"adapter directory 'nope'.* \\(from {files}/nope\\)"):
        llm.load_adapter("three", files / "nope")
    assert llm.load_adapter("two", files / "two", replace=True).uid != info.uid
    changed = alone(llm, PROMPTS[0], "two").token_ids
    assert changed != alone(llm, PROMPTS[0]).token_ids
    assert llm.unload_adapter("two").name == "two"
    with pytest.raises(NotFound):
        alone(llm, PROMPTS[0], "two")


def test_without_a_tokenizer_ids_work_and_text_says_why_not(files: Path):
    with LLM(files / "ids", config=SMALL, progress=False) as llm:
        [c] = llm.generate([[5, 6, 7]], GREEDY)
        assert c.text == "" and 1 <= len(c.token_ids) <= 12
        for call in (
            lambda: llm.generate("text"),
            lambda: llm.chat([{"role": "user", "content": "x"}]),
            lambda: llm.generate([5, 6], SamplingParams(stop=("x",))),
        ):
            with pytest.raises(FailedPrecondition, match="tokenizer"):
                call()
        events = llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
        next(events)
    for call in (lambda: list(events), lambda: llm.generate([5, 6, 7])):  # closed, also under a running stream
        with pytest.raises(Unavailable, match="the model is closed"):
            call()
    for call in (llm.adapters, llm.cache_stats, lambda: llm.unload_adapter("x"), lambda: llm.stream([5])):
        with pytest.raises(Unavailable, match="the model is closed"):
            call()
    llm.close()


@pytest.mark.parametrize("config", [{"cache": {"blocks": 8}}, {"model.tp": 0}, {"nothing": {}}, "no/such/file.toml"])
def test_a_wrong_configuration_is_refused_before_the_model_is_read(config):
    with pytest.raises(ConfigError):
        LLM("no/such/model", config=config)


def test_tenants_do_not_share_cached_tokens(llm: LLM):
    prompt = [[(7 * i) % 90 + 5 for i in range(40)]]
    [first] = llm.generate(prompt, GREEDY, tenant="a")
    [other] = llm.generate(prompt, GREEDY, tenant="b")
    *_, last = llm.stream(prompt[0], GREEDY, tenant="a")
    assert last.usage is not None
    assert (first.usage.cached_tokens, other.usage.cached_tokens, last.usage.cached_tokens) == (0, 0, 32)


def test_a_conversation_has_its_tenants_cache(llm: LLM):
    messages = [{"role": "user", "content": "the same words again and again " * 2}]
    cached = [llm.chat(messages, GREEDY, tenant=tenant)[0].usage.cached_tokens for tenant in ("a", "b", "a")]
    assert cached[:2] == [0, 0] and cached[2] > 0


@pytest.mark.parametrize("refuses", ["check", "submit"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_model_that_refused_a_prompt_is_freed_when_nobody_holds_it(
    files: Path, monkeypatch: pytest.MonkeyPatch, refuses: str, count: int
):
    """Its memory on the device is needed for the next one; no garbage collection frees it in time."""

    def refused(*_: object) -> Future[None]:
        answer: Future[None] = Future()
        answer.set_exception(ResourceExhausted("the cache never holds it"))
        return answer

    monkeypatch.setattr(LocalReplica, refuses, refused)
    llm = LLM(files / "ids", config={**SMALL, "engine": {**SMALL["engine"], "warmup": False}}, progress=False)
    freed = weakref.ref(llm)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ResourceExhausted):
            llm.generate([[5]] * count)
        del llm
        assert freed() is None
    finally:
        gc.enable()


def test_a_model_may_be_collected_on_its_own_engines_thread(files: Path):
    """A garbage collection runs on any thread, and this one cannot wait for its own end."""
    before = set(threading.enumerate())
    llm = LLM(files / "ids", config={**SMALL, "engine": {**SMALL["engine"], "warmup": False}}, progress=False)
    port.between_steps(llm, llm.close).result(20)
    wait_until(lambda: not {thread for thread in threading.enumerate() if not thread.daemon} - before)
    with pytest.raises(Unavailable):
        llm.generate([[5, 6]])


BARE = {**SMALL, "engine": {**SMALL["engine"], "warmup": False}}  # it starts sooner

FORGETFUL = """
import sys
from jlora import LLM

if __name__ == "__main__":
    model, adapter, registry = sys.argv[1:]
    kept = {"adapters.registry": registry, "model.name": "model"}
    small = {"cache.hbm_blocks": 64, "cache.block_tokens": 8, "engine.warmup": False, "engine.max_step_tokens": 16}
    llm = LLM(model, adapters={"one": adapter}, config={**small, **kept}, progress=False)
    print(llm.generate([[5, 6]], adapter="one")[0].finish_reason)
"""


def test_a_script_that_forgets_to_close_ends_in_order(files: Path, tmp_path: Path):
    """At its end Python's pools end first. The registry still gets what the model has to write."""
    registry = tmp_path / "adapters.db"
    script = [sys.executable, "-c", FORGETFUL, str(files / "ids"), str(files / "one"), str(registry)]
    ended = subprocess.run(
        script, capture_output=True, text=True, timeout=120, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert ended.returncode == 0 and ended.stdout.strip() and "Traceback" not in ended.stderr
    with closing(sqlite3.connect(registry)) as table:
        assert table.execute("select name, last_used > 0 from adapters").fetchall() == [("one", 1)]


@pytest.mark.parametrize("step", ["_thread", "_engine"])
def test_a_close_that_was_interrupted_is_finished_by_the_next(files: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    llm = LLM(files / "ids", config=BARE, progress=False)
    part = port.part_of(llm, step)
    waits = "join" if step == "_thread" else "close"
    with monkeypatch.context() as patch:
        patch.setattr(part, waits, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    assert not port.weights(llm).is_deleted()
    llm.close()
    assert port.weights(llm).is_deleted()
    llm.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_forked_child_is_refused_and_leaves_the_parents_model_alone(llm: LLM):
    """Its threads stay behind, so that every call would wait for ever."""
    asked, answered = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and jax warn of forks beside threads
        child = os.fork()
    if child == 0:
        said = ""
        for call in (lambda: llm.generate("a", GREEDY), llm.adapters, lambda: llm.stream("a")):
            try:
                call()
            except FailedPrecondition as e:
                said = f"{said}{e}\n"
        llm.close()
        os.write(answered, said.encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lines = os.read(asked, 10_000).decode().splitlines()
    assert len(lines) == 3 and set(lines) == {lines[0]} and f"process {os.getpid()}" in lines[0]
    os.close(asked)
    os.close(answered)
    assert alone(llm, PROMPTS[0]).token_ids


def test_a_second_model_that_does_not_fit_hears_of_the_first(llm: LLM, files: Path):
    huge = {**BARE, "cache": {**SMALL["cache"], "host_gib": 100_000}}
    with pytest.raises(ConfigError, match="host tier .* needs .*another LLM of this process is open: close"):
        LLM(files / "ids", config=huge, progress=False)


def test_a_home_directory_in_an_adapters_path(llm: LLM, files: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(files))
    assert llm.load_adapter("home", "~/two").rank == 8
    llm.unload_adapter("home")
