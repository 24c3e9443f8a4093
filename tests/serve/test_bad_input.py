"""Bad input is refused by name with the right status; eight neighbours run on and keep their answers."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.serve._server import MAX_LEN, VOCAB, Served, refused, request, serve, wait_until

CODE = grpc.StatusCode
INT32 = 2**31 - 1
INT64 = 2**63 - 1
HUGE = "x" * 100_000

NEIGHBOURS = [
    request("Hello", 40, model=model, temperature=temperature, seed=7, logprobs=1)
    for model in ("", "upper", "lower", "wide")
    for temperature in (0.0, 1.0)
]


def check_same(answer: pb.GenerateResponse, alone: pb.GenerateResponse) -> None:
    """All that a client would notice: tokens, text, end, log-probabilities."""
    got, expected = answer.outputs[0], alone.outputs[0]
    assert (got.token_ids, got.text, got.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
    assert [e.logprob for e in got.logprobs] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-3)


@pytest.fixture(scope="module")
def alone(served: Served) -> list[pb.GenerateResponse]:
    """The neighbours' answers, each with the server to itself."""
    return [served.generate(asked) for asked in NEIGHBOURS]


@pytest.fixture
def crowd(served: Served, alone: list[pb.GenerateResponse]) -> Iterator[Served]:
    """The server with eight neighbours that ask on until the test ends; each answer must be the one it got alone."""
    over = threading.Event()

    def ask_on(asked: pb.GenerateRequest, expected: pb.GenerateResponse) -> None:
        while not over.is_set():
            check_same(served.generate(asked), expected)

    with ThreadPoolExecutor(len(NEIGHBOURS)) as pool:
        neighbours = list(map(pool.submit, [ask_on] * len(NEIGHBOURS), NEIGHBOURS, alone))
        try:
            wait_until(lambda: served.stats().running == len(NEIGHBOURS))
            yield served
        finally:
            over.set()
    for neighbour in neighbours:
        neighbour.result()
    served.check_idle()


# -- fields of a request ------------------------------------------------------------------------

# One or two per field: `test_validation` has the edges.
BAD = {
    "temperature": [-0.001, math.nan],
    "top_k": [-1],
    "top_p": [0.0, math.inf],
    "min_p": [1.01],
    "repetition_penalty": [0.0, math.nan],
    "presence_penalty": [-2.01],
    "frequency_penalty": [2.01],
    "n": [0, INT32],
    "max_tokens": [0, -INT32],
    "min_tokens": [-1, 9],
    "logprobs": [21],
    "prompt_logprobs": [-1],
    "stop_token_ids": [[5, VOCAB]],
    "stop": [[""], ["x"] * 17],
    "logit_bias": [{VOCAB: 1.0}, {5: math.nan}, {t: 1.0 for t in range(1025)}],
    "request_id": ["é"],
    "tenant": [HUGE],
    "cache_salt": ["x" * 257, HUGE],
    "model": ["base:", "x" * 129, "base:" + HUGE],
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_refused_by_name(crowd: Served, field: str):
    for value in BAD[field]:
        with refused(CODE.INVALID_ARGUMENT, field):
            crowd.generate(request("secret words", **{field: value}))
        with refused(CODE.INVALID_ARGUMENT) as error:
            list(crowd.inference.GenerateStream(request("secret words", **{field: value})))
        assert "secret" not in error.value.details() and len(error.value.details()) <= 500
        if isinstance(value, int | float) and math.isfinite(value):
            assert str(value) in error.value.details()


GOOD = {
    "temperature": [0.0, 5e-324, 1e-6, 100.0],
    "top_k": [0, 1, VOCAB, INT32],
    "top_p": [5e-324, 1e-9, 1.0],
    "min_p": [0.0, 1.0],
    "seed": [0, -1, INT64, -INT64 - 1],
    "repetition_penalty": [0.001, 1000.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "n": [1, 33, 64],
    "max_tokens": [1],
    "min_tokens": [0, 8],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "stop_token_ids": [[0], [VOCAB - 1], list(range(64))],
    "stop": [["x" * 1024], ["\ufffd"] * 16],
    "logit_bias": [{0: -100.0}, {VOCAB - 1: 100.0}, {t: -100.0 for t in range(VOCAB)}],
    "priority": [-INT32 - 1, INT32],
    "request_id": ["x" * 256, "!~"],
    "bypass_prefix_cache": [True],
    "tenant": ["x" * 256, "Zoë & Söhne"],
    "cache_salt": ["x" * 256, "\0", "../..", "%s{}\n\r", "\U0010ffff" * 256],
}


@pytest.mark.parametrize("field", GOOD)
def test_a_field_at_its_edge_is_served(crowd: Served, field: str):
    for value in GOOD[field]:
        answer = crowd.generate(request("Hello", **{"temperature": 1.0, field: value}))
        assert len(answer.outputs) == (value if field == "n" else 1)
        for output in answer.outputs:
            assert all(0 <= token < VOCAB for token in output.token_ids) and output.finish_reason in ("length", "stop")
            assert all(math.isfinite(entry.logprob) for entry in output.logprobs)


def test_the_number_of_biases_is_limited_and_not_their_sum(crowd: Served):
    """The vocabulary has fewer tokens than a request may have biases: which refusal comes tells which limit it is."""
    with refused(CODE.INVALID_ARGUMENT, "logit_bias: has 1025 entries, must have at most 1024"):
        crowd.generate(request(logit_bias={t: 1.0 for t in range(1025)}))
    with refused(CODE.INVALID_ARGUMENT, "logit_bias key", f"must be a token id in [0, {VOCAB})"):
        crowd.generate(request(logit_bias={t: 1.0 for t in range(1024)}))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ((), "prompt"),
        ("", "prompt.text"),
        (pb.Chat(), "messages"),
        (pb.Chat(messages=[pb.ChatMessage(content="hi")]), "role"),
        (pb.Chat(messages=[pb.ChatMessage(role="pirate", content="hi")]), "unknown role"),
        ((5, -1), "prompt[1]"),
        ((5, 6, VOCAB), f"prompt[2] = {VOCAB}"),
        ((INT32,), str(INT32)),
        ((-INT32 - 1,), str(-INT32 - 1)),
    ],
)
def test_a_bad_prompt_is_refused(crowd: Served, prompt: Any, said: str):
    with refused(CODE.INVALID_ARGUMENT, said):
        crowd.generate(request(prompt))
    with refused(CODE.INVALID_ARGUMENT, said):
        crowd.inference.Prefetch(request(prompt))


def test_no_prompt_at_all_is_refused(crowd: Served):
    with refused(CODE.INVALID_ARGUMENT, "prompt: is not set"):
        crowd.generate(pb.GenerateRequest())
    with refused(CODE.INVALID_ARGUMENT, "input: is not set"):
        crowd.inference.Tokenize(pb.TokenizeRequest())
    with refused(CODE.INVALID_ARGUMENT, "token_ids[1]"):
        crowd.inference.Detokenize(pb.DetokenizeRequest(token_ids=[5, VOCAB]))


def test_what_passes_the_context_is_out_of_range(crowd: Served):
    for prompt, max_tokens in (([5] * MAX_LEN, 1), ([5] * (MAX_LEN + 1), None), ([5], MAX_LEN), ([5, 6], INT32)):
        with refused(CODE.OUT_OF_RANGE, str(MAX_LEN)):
            crowd.generate(request(prompt, max_tokens))
    with refused(CODE.OUT_OF_RANGE):
        crowd.generate(request("secret words " * MAX_LEN))
    assert crowd.generate(request([5] * (MAX_LEN - 1), 1)).usage.completion_tokens == 1


# -- adapters -----------------------------------------------------------------------------------


WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def truncate(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:-100])


# One for each status; `tests/adapters` has every way to be broken.
BROKEN: dict[str, tuple[Callable[[Path], object], grpc.StatusCode, str]] = {
    "truncated": (truncate, CODE.DATA_LOSS, WEIGHTS),
    "not JSON": (lambda directory: (directory / CONFIG).write_text('{"r": 4,'), CODE.DATA_LOSS, CONFIG),
    "DoRA": (lambda directory: _make.edit_json(directory / CONFIG, use_dora=True), CODE.INVALID_ARGUMENT, "use_dora"),
    "no weights": (lambda directory: (directory / WEIGHTS).unlink(), CODE.NOT_FOUND, WEIGHTS),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_adapter_is_refused_and_leaves_nothing(crowd: Served, text_model: Path, tmp_path: Path, kind: str):
    spoil, code, said = BROKEN[kind]
    directory = tmp_path / "broken"
    shutil.copytree(text_model.parent / "adapters" / "upper", directory)
    spoil(directory)
    blocks = crowd.control.GetCacheState(pb.GetCacheStateRequest()).hbm.adapters
    with refused(code, said) as error:
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="broken", path=str(directory)))
    assert str(tmp_path) not in error.value.details()
    with refused(CODE.NOT_FOUND):
        crowd.adapters.GetAdapter(pb.GetAdapterRequest(name="broken"))
    assert crowd.control.GetCacheState(pb.GetCacheStateRequest()).hbm.adapters == blocks


def test_a_replacement_that_is_broken_leaves_the_old_one(crowd: Served, text_model: Path, tmp_path: Path):
    shutil.copytree(text_model.parent / "adapters" / "upper", tmp_path / "new")
    truncate(tmp_path / "new")
    before = crowd.adapters.GetAdapter(pb.GetAdapterRequest(name="upper")).uid
    with refused(CODE.DATA_LOSS):
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="upper", path=str(tmp_path / "new"), replace=True))
    assert crowd.adapters.GetAdapter(pb.GetAdapterRequest(name="upper")).uid == before


def test_an_adapter_of_too_high_a_rank_is_refused(crowd: Served, tmp_path: Path):
    path = _make.make_adapter(tmp_path / "big", crowd.spec, r=300, targets=tuple(_make.MODULES))
    with refused(CODE.INVALID_ARGUMENT, "300", "adapters.max_rank"):
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="big", path=str(path)))


@pytest.mark.slow
def test_what_can_never_fit_the_pool_is_refused_by_the_key_to_change(text_model: Path, tmp_path: Path):
    with serve(text_model, {"cache.hbm_blocks": 100, "engine.warmup": False}) as small:
        path = _make.make_adapter(tmp_path / "big", small.spec, r=256, targets=tuple(_make.MODULES))
        with refused(CODE.RESOURCE_EXHAUSTED, "adapter 'big' needs", "pool's 100", "cache.hbm_blocks"):
            small.adapters.LoadAdapter(pb.LoadAdapterRequest(name="big", path=str(path)))
        assert not small.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
        for call in (small.generate, small.streamed, small.inference.Prefetch):
            with refused(CODE.RESOURCE_EXHAUSTED, "max_tokens = 1598", "at most 1600", "cache.hbm_blocks"):
                call(request((5, 6, 7), 1598))
        small.check_integrity()
        assert small.generate(request((5, 6, 7))).usage.completion_tokens == 8


@pytest.mark.parametrize("name", ["", "../x"])
def test_an_odd_adapter_name_is_refused(crowd: Served, text_model: Path, name: str):
    path = str(text_model.parent / "adapters" / "upper")
    with refused(CODE.INVALID_ARGUMENT, "name = "):
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path))


def test_odd_paths_and_unknown_names_are_refused(crowd: Served, tmp_path: Path):
    for path in (str(tmp_path / "none"), "\x00", str(Path(__file__)), "x" * 4096):
        with refused(CODE.NOT_FOUND) as error:
            crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="x", path=path))
        assert str(tmp_path) not in error.value.details()
    with refused(CODE.INVALID_ARGUMENT, "path"):
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="x"))
    with refused(CODE.INVALID_ARGUMENT, "path = 'xxx", "at most 4096", "got 4097"):
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="x", path="x" * 4097))
    with refused(CODE.ALREADY_EXISTS, "base"):
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="base", path=str(tmp_path)))
    for call in (
        lambda: crowd.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="uper")),
        lambda: crowd.adapters.GetAdapter(pb.GetAdapterRequest(name="uper")),
        lambda: crowd.adapters.PinAdapter(pb.PinAdapterRequest(name="uper", pinned=True)),
        lambda: crowd.generate(request(model="uper")),
    ):
        with refused(CODE.NOT_FOUND, "upper"):
            call()
    with refused(CODE.INVALID_ARGUMENT, "timeout_s"):
        crowd.control.Drain(pb.DrainRequest(timeout_s=-1))
    with refused(CODE.INVALID_ARGUMENT, "timeout_s"):
        crowd.control.Drain(pb.DrainRequest(timeout_s=math.nan))


# -- of any length ------------------------------------------------------------------------------


def test_names_of_any_length_are_refused_in_few_words(crowd: Served):
    """Looked for among the adapters, such a name would hold up the engine; whole, no header could carry it."""
    for call in (
        lambda: crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name=HUGE, path="x")),
        lambda: crowd.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name=HUGE)),
        lambda: crowd.adapters.GetAdapter(pb.GetAdapterRequest(name=HUGE)),
        lambda: crowd.adapters.PinAdapter(pb.PinAdapterRequest(name=HUGE, pinned=True)),
    ):
        with refused(CODE.INVALID_ARGUMENT, "name = ", "at most 128", "got 100000") as error:
            call()
        assert len(error.value.details()) <= 500


def test_a_message_that_quotes_a_long_value_keeps_its_ends(crowd: Served):
    for path in ("𝄞" * 4096, "/" + "é" * 4095):  # each character takes several bytes in a header
        with refused(CODE.NOT_FOUND, "adapter directory", "…", "File name too long") as error:
            crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="x", path=path))
        assert len(error.value.details()) <= 500
    chat = pb.Chat(messages=[pb.ChatMessage(role=HUGE[:20_000], content="hi")])
    for call in (crowd.generate, crowd.inference.Prefetch):
        with refused(CODE.INVALID_ARGUMENT, "chat template", "unknown role", "…") as error:
            call(request(chat))
        assert len(error.value.details()) <= 500


def test_a_message_about_a_file_is_whole(crowd: Served, text_model: Path, tmp_path: Path):
    """The client reads which file, in which directory, and what is wrong with it."""
    directory = tmp_path / ("d" * 250)
    shutil.copytree(text_model.parent / "adapters" / "upper", directory)
    _make.edit_json(directory / "adapter_config.json", **{f"option_{i}" * 10: True for i in range(20)})
    with refused(CODE.INVALID_ARGUMENT, f"{directory.name}/adapter_config.json: ", "option_0") as error:
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="x", path=str(directory)))
    assert "…" not in error.value.details() and str(tmp_path) not in error.value.details()


def test_a_file_name_that_is_not_utf8_can_be_told(crowd: Served, tmp_path: Path):
    (tmp_path / os.fsdecode(b"\xff.bin")).write_text("")
    with refused(CODE.INVALID_ARGUMENT, r"\udcff.bin: pickled weights"):
        crowd.adapters.LoadAdapter(pb.LoadAdapterRequest(name="x", path=str(tmp_path)))
