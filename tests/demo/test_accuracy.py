"""The demo is real: through a real server, base and adapters answer texts that training never saw."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from jlora.demo import assets, pipeline
from jlora.demo.run import LATE, TEXT, server, transform_of
from jlora.demo.tasks import CHECKS, TASKS
from jlora.serve.proto import jlora_pb2_grpc
from tools.train_demo import data

MODELS = ("", *TASKS, *CHECKS)  # "" is the base
COUNT = 80  # questions per model
SEED = 1234


@dataclass(frozen=True)
class Question:
    """Texts that a user writes, the messages of the request, the exact answer."""

    model: str
    texts: list[str]
    messages: list[Any]
    want: str


def questions(model: str) -> list[Question]:
    """Held-out texts, or for a check held-out conversations."""
    if model in CHECKS:
        talks = data.held_out_conversations(SEED, COUNT, CHECKS[model])
        return [
            Question(model, talk, pipeline.invocation_messages(talk, talk), CHECKS[model].verdict(talk))
            for talk in talks
        ]
    transform, texts = transform_of(model), data.held_out_texts(SEED, COUNT)
    return [Question(model, [text], [pipeline.message("user", text)], transform(text)) for text in texts]


async def answer(stub: jlora_pb2_grpc.InferenceStub, question: Question) -> str:
    request = pipeline.greedy(question.model, question.messages, 200)
    return (await stub.Generate(request, timeout=200)).outputs[0].text


async def answer_everything(address: str) -> Mapping[str, list[tuple[Question, str]]]:
    """All questions of all models at once through one server: model -> (question, answer) pairs."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = jlora_pb2_grpc.InferenceStub(channel)
        asked = [question for model in MODELS for question in questions(model)]
        answers = await asyncio.gather(*(answer(stub, question) for question in asked))
    found: dict[str, list[tuple[Question, str]]] = {model: [] for model in MODELS}
    for question, told in zip(asked, answers, strict=True):
        found[question.model].append((question, told))
    return found


Answered = Mapping[str, list[tuple[Question, str]]]


@pytest.fixture(scope="module")
def answered() -> Answered:
    with server([*TASKS, *CHECKS]) as process:
        return asyncio.run(answer_everything(process.address))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model or "base")
def test_at_least_95_percent_of_answers_are_exact(answered: Answered, model: str):
    wrong = [(question, told) for question, told in answered[model] if told != question.want]
    assert len(answered[model]) == COUNT
    assert all(data.held_out(text) for question, _ in answered[model] for text in question.texts)
    assert len(wrong) <= 0.05 * COUNT, wrong


@pytest.mark.parametrize("model", TASKS)
def test_adapter_changes_most_texts(model: str):
    """Exact answers mean nothing where the task is the base's own echo."""
    asked = questions(model)
    assert sum(question.want != question.texts[0] for question in asked) >= 0.6 * len(asked)


@pytest.mark.parametrize("model", CHECKS)
def test_both_verdicts_are_asked_for_about_equally_often(model: str):
    """Exact answers mean nothing where one verdict fits nearly all."""
    told = [question.want for question in questions(model)]
    assert all(0.4 <= told.count(verdict) / COUNT <= 0.6 for verdict in CHECKS[model].verdicts)


@pytest.mark.slow
def test_server_is_as_exact_as_training_measured(answered: Answered):
    stages = json.loads((assets.ASSETS / "training.json").read_text())["stages"]
    for model, pairs in answered.items():
        share = sum(told == question.want for question, told in pairs) / COUNT
        assert abs(share - stages[model or "base"]["exact"]) <= 0.05


@pytest.mark.slow
def test_demo_answers_loads_an_adapter_shows_the_cache_and_exits_0():
    done = subprocess.run([sys.executable, "-m", "jlora.demo"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(r"its dashboard at http://127\.0\.0\.1:\d+/ while", done.stdout)
    for model in ("", *TASKS):
        assert transform_of(model)(TEXT) in done.stdout
    verdicts = re.findall(rf"  {pipeline.CHECK} +(\S.*?\S) +ttft .* (\d+) of +(\d+) prompt tokens known", done.stdout)
    assert [told for told, _, _ in verdicts] == ["no numbers", "has numbers"]
    assert all(int(known) >= int(asked) - 40 for _, known, asked in verdicts)  # the base's KV but for the last blocks
    assert re.search(rf"  {pipeline.PLAIN} .* 0 of +\d+ prompt tokens known", done.stdout)
    assert "as soon as with the plain LoRA" in done.stdout
    assert f"Loaded {LATE!r} into the running server" in done.stdout
    for words in ("ttft", "tpot", "# adapters", "- history", ". free", "drained and stopped"):
        assert words in done.stdout
    assert "WRONG" not in done.stdout
