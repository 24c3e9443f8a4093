"""The tasks are what they say, and training texts never meet held-out ones."""

from __future__ import annotations

from random import Random

import pytest

from jlora.demo.tasks import CHECKS, TASKS, echo
from jlora.model.spec import PROJECTIONS
from tools.train_demo import data
from tools.train_demo.plans import PLANS
from tools.train_demo.skills import SKILLS

TEXT = "Meet Alice at gate 42, OK?"
EXPECTED = {
    "upper": "MEET ALICE AT GATE 42, OK?",
    "leet": "M337 4l1c3 47 g473 42, 0K?",
    "stars": "M**t *l*c* *t g*t* 42, *K?",
    "mock": "mEeT aLiCe At GaTe 42, Ok?",
    "rot13": "Zrrg Nyvpr ng tngr 42, BX?",
    "piglatin": "eetMay liceAay taay ategay 42, KOay?",
    "reverse": "?KO ,24 etag ta ecilA teeM",
}


@pytest.mark.parametrize("name", TASKS)
def test_task_does_what_it_is_named_for(name: str):
    assert TASKS[name](TEXT) == EXPECTED[name]


@pytest.mark.parametrize("name", TASKS)
def test_task_keeps_text_outside_ascii_valid(name: str):
    answer = TASKS[name]("¿2 señores, 東京 🙂?")
    assert answer.encode().decode() == answer
    assert "東京 🙂" in answer


def test_adapters_differ_in_rank_and_targets():
    shapes = [PLANS[name].lora for name in TASKS]
    ranks = [shape.rank for shape in shapes]
    assert len(shapes) >= 6 and min(ranks) == 4 and max(ranks) == 64 and len(set(ranks)) >= 6
    assert len({shape.targets for shape in shapes}) >= 5
    assert ("q", "v") in {shape.targets for shape in shapes}
    assert any(shape.rslora for shape in shapes) and any(shape.ranks for shape in shapes)
    assert all(set(shape.targets) <= set(PROJECTIONS) and set(shape.ranks) <= set(shape.targets) for shape in shapes)


def test_scale_is_alpha_over_rank_or_over_its_root():
    plain, rooted = PLANS["piglatin"].lora, PLANS["reverse"].lora
    assert plain.scale_of("q") == plain.alpha / 32 and plain.scale_of("up") == plain.alpha / 8
    assert rooted.scale_of("q") == rooted.alpha / 8


def test_training_texts_are_never_held_out_and_evaluated_ones_always_are():
    rng = Random(5)
    trained = {data.training_text(rng) for _ in range(3000)}
    evaluated = data.held_out_texts(5, 200)
    assert not any(map(data.held_out, trained)) and all(map(data.held_out, evaluated))
    assert len(set(evaluated)) == 200


def test_same_seed_gives_the_same_training_rows():
    turn = data.task_turns(TASKS["upper"])
    first, second, other = (data.batch(Random(seed), turn, 2, 64) for seed in (1, 1, 2))
    assert (first[0] == second[0]).all() and (first[1] == second[1]).all()
    assert (first[0] != other[0]).any()


def test_loss_counts_answers_and_their_ends_only():
    ids, mask = data.conversation(Random(3), lambda rng: (b"abc", "XY"), 18)
    turn = [data.USER, *b"abc", data.ASSISTANT, *b"XY", data.EOS]
    assert ids == [data.BOS, *turn, *turn, data.USER]
    assert mask == [0, *[0] * 5, 1, 1, 1, *[0] * 5, 1, 1, 1, 0]


def test_prompt_of_a_chat_ends_where_the_answer_begins():
    ids = data.prompt_ids([(b"a", "b")], "c")
    told = [data.USER, 97, data.ASSISTANT, 98, data.EOS]
    assert ids == [data.BOS, *told, data.USER, 99, data.ASSISTANT]


def test_untagged_base_turns_repeat_the_text_and_tags_are_not_typed():
    rng = Random(7)
    plain = [(asked, answer) for asked, answer in (data.base_turn(rng) for _ in range(400)) if asked[0] >= 32]
    assert len(plain) > 60 and all(asked.decode() == echo(answer) for asked, answer in plain)
    assert len(set(data.TAGS)) == len(SKILLS) and all(tag < b" " and tag not in b"\t\n\r" for tag in data.TAGS)


def test_a_check_judges_all_texts_of_a_conversation():
    check = CHECKS["numbers"]
    assert check.verdict(["one", "two"]) == check.verdict([]) == "no numbers"
    assert check.verdict(["gate 4", "two"]) == check.verdict(["one", "4"]) == "has numbers"


@pytest.mark.parametrize("length", [128, 512])
def test_a_check_s_rows_end_in_its_verdict_and_only_that_counts(length: int):
    check = CHECKS["numbers"]
    ids, weights = data.check_batch(Random(3), check, 60, length)
    told = []
    for row, counted in zip(ids.tolist(), weights.tolist(), strict=True):
        begins, ends = counted.index(1), int(sum(counted)) + counted.index(1)
        assert tuple(row[begins - 2 : begins]) == data.INVOCATION and row.count(data.INVOKE) == 1
        assert row[ends - 1] == data.EOS and set(row[ends:]) <= {data.PAD} and set(counted[begins:ends]) == {1}
        told.append(bytes(row[begins : ends - 1]).decode())
        assert (told[-1] == "has numbers") == any(48 <= token <= 57 for token in row[:begins])
    assert {told.count(verdict) > 12 for verdict in check.verdicts} == {True} and set(told) == set(check.verdicts)


def test_evaluated_conversations_are_held_out_and_half_of_them_have_a_finding():
    check = CHECKS["numbers"]
    talks = data.held_out_conversations(5, 60, check)
    assert all(data.held_out(text) for talk in talks for text in talk)
    assert {len(talk) for talk in talks} == {1, 2, 3, 4, 5, 6}
    assert 24 <= sum(check.verdict(talk) == "has numbers" for talk in talks) <= 36
