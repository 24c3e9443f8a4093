"""The demo is real: through a real server, base and adapters answer texts that training never saw."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping

import grpc
import pytest

from jlora.demo import assets, data
from jlora.demo.run import LATE, TEXT, server, transform_of
from jlora.demo.tasks import TASKS
from jlora.serve.proto import jlora_pb2, jlora_pb2_grpc

MODELS = ("", *TASKS)  # "" is the base
COUNT = 80  # texts per model
SEED = 1234


def texts_for(model: str) -> list[str]:
    return data.held_out_texts(SEED, COUNT)


async def answer(stub: jlora_pb2_grpc.InferenceStub, model: str, text: str) -> str:
    request = jlora_pb2.GenerateRequest(
        model=model,
        chat=jlora_pb2.Chat(messages=[jlora_pb2.ChatMessage(role="user", content=text)]),
        sampling=jlora_pb2.Sampling(temperature=0.0),
        stopping=jlora_pb2.Stopping(max_tokens=200),
    )
    return (await stub.Generate(request, timeout=200)).outputs[0].text


async def answer_everything() -> Mapping[str, list[tuple[str, str]]]:
    """All texts of all models at once through one server: model -> (text, answer) pairs."""
    async with server(list(TASKS)) as address, grpc.aio.insecure_channel(address) as channel:
        stub = jlora_pb2_grpc.InferenceStub(channel)
        asked = [(model, text) for model in MODELS for text in texts_for(model)]
        answers = await asyncio.gather(*(answer(stub, model, text) for model, text in asked))
    found: dict[str, list[tuple[str, str]]] = {model: [] for model in MODELS}
    for (model, text), told in zip(asked, answers, strict=True):
        found[model].append((text, told))
    return found


@pytest.fixture(scope="module")
def answered() -> Mapping[str, list[tuple[str, str]]]:
    return asyncio.run(answer_everything())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model or "base")
def test_at_least_95_percent_of_answers_are_exact(answered: Mapping[str, list[tuple[str, str]]], model: str):
    transform = transform_of(model)
    wrong = [(text, told, transform(text)) for text, told in answered[model] if told != transform(text)]
    assert len(answered[model]) == COUNT and all(data.held_out(text) for text, _ in answered[model])
    assert len(wrong) <= 0.05 * COUNT, wrong


@pytest.mark.parametrize("model", TASKS)
def test_adapter_changes_most_texts(model: str):
    """Exact answers mean nothing where the task is the base's own echo."""
    texts = texts_for(model)
    assert sum(TASKS[model].transform(text) != text for text in texts) >= 0.6 * len(texts)


def test_server_is_as_exact_as_training_measured(answered: Mapping[str, list[tuple[str, str]]]):
    stages = json.loads((assets.ASSETS / "training.json").read_text())["stages"]
    for model, pairs in answered.items():
        share = sum(told == transform_of(model)(text) for text, told in pairs) / COUNT
        assert abs(share - stages[model or "base"]["exact"]) <= 0.05


def test_demo_answers_loads_an_adapter_shows_the_cache_and_exits_0():
    done = subprocess.run([sys.executable, "-m", "jlora.demo"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for model in MODELS:
        assert transform_of(model)(TEXT) in done.stdout
    assert f"Loaded {LATE!r} into the running server" in done.stdout
    for words in ("ttft", "tpot", "adapters ", "history_kv", "free ", "drained and stopped"):
        assert words in done.stdout
    assert "WRONG" not in done.stdout
