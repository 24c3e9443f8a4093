"""Whole steps under `jlora doctor`: what a slow, a hanging or a refused program costs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jlora.doctor import engine, journal, model, steps
from jlora.doctor.engine import World
from jlora.doctor.fit import Link, Rates
from jlora.doctor.journal import Found, Journal
from jlora.doctor.model import StepCase, decode, prefill
from jlora.doctor.steps import Steps
from jlora.engine.batch import BatchBuilder, Form
from jlora.pallas.cases import TINY

RATES = Rates(4e12, 7e14, Link(5e10, 1e-5), Link(5e10, 1e-5))
PLAN = Steps(replace(TINY, max_len=128), (2, 4, 8), (64,), 32, (1,))
SLOW = "prefill 64"


def form_of(case: StepCase) -> Form:
    return Form(*case.shape, bare=not case.ranks and case.shape[1] == 1)


class Imagined(World):
    """Cases are plans and launches; `how` compiles one."""

    def __init__(self, how: Callable[[StepCase], None], builder: BatchBuilder | None = None):
        self.compiled: list[Form] = []
        self._how = how
        self._prepared: Any = SimpleNamespace(ahead=SimpleNamespace(compile=self._compile), builder=builder)
        self.chosen: Any = SimpleNamespace(choices=())

    def plan(self, case: StepCase) -> Any:
        return case

    def forms(self, plans: Sequence[Any]) -> dict[Form, Any]:
        return {form_of(case): case for case in plans}

    def _compile(self, case: StepCase) -> None:
        self.compiled.append(form_of(case))
        self._how(case)

    def close(self) -> None:
        pass


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def done(
    path: Path, how: Callable[[StepCase], None], monkeypatch: pytest.MonkeyPatch, left_s: float = 1000.0
) -> tuple[Imagined, Found]:
    """One process of the part: its world, and what the file says then."""
    world = Imagined(how)
    monkeypatch.setattr(steps, "World", lambda *_: world)
    monkeypatch.setattr(steps, "whole_engine", lambda *_: None)
    monkeypatch.setattr(steps, "alone", lambda bench, case: {"case": case.name})
    monkeypatch.setattr(steps, "against_base", lambda bench, case: {"case": case.name})
    before = journal.read(path)
    steps.run(PLAN, "auto", RATES, Journal(path), lambda: left_s, before)
    return world, journal.read(path)


def timed(found: Found) -> set[str]:
    return {row["case"] for rows in ("steps", "adapters") for row in found.values.get(rows, [])}


ALL = {case.name for case in (*PLAN.base(), *PLAN.adapted())}
LONG = {name for name in ALL if name.startswith(SLOW)}


def test_a_program_that_does_not_end_costs_its_own_cases(
    tmp_path: Path, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine, "PROGRAM_S", 0.3)

    def how(case: StepCase) -> None:
        if case.name.startswith(SLOW):
            ended.wait(60)

    _, found = done(tmp_path / "part.jsonl", how, monkeypatch)
    assert timed(found) == ALL - LONG
    assert len(found.skipped) == len(LONG) and all("2x32: took too long" in reason for reason in found.skipped)
    assert found.unfinished == ["compile 2x32"]
    assert {row["program"] for row in found.values["compile"]} >= {"compile 8x1", "compile 8x1, no adapters"}


def test_a_refused_program_costs_its_own_cases_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def how(case: StepCase) -> None:
        if case.name.startswith(SLOW):
            raise ValueError("no such\ninstruction")

    _, found = done(tmp_path / "part.jsonl", how, monkeypatch)
    assert timed(found) == ALL - LONG and found.unfinished == []
    assert len(found.skipped) == len(LONG) and all("ValueError: no such" in reason for reason in found.skipped)


def interrupted(path: Path, begun: Sequence[str], compiled: Mapping[str, Form]) -> None:
    """A process that was killed while programs compiled."""
    written = Journal(path)
    for name in begun:
        written.begin(f"compile {name}")
    for name, form in compiled.items():
        written.row("compile", {"program": f"compile {name}", "form": list(form), "seconds": 1.0})


def test_after_a_hang_the_other_programs_come_first_and_what_had_compiled_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "part.jsonl"
    bare = {"8x1, no adapters": Form(8, 1, True)}
    interrupted(path, ["2x32", "8x1, no adapters", "8x1"], bare)
    world, found = done(path, lambda case: None, monkeypatch)
    assert timed(found) == ALL and found.skipped == []
    assert {form.rows for form in world.compiled[:2]} == {2, 4} and len(world.compiled) == 5


def test_a_program_that_hung_twice_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "part.jsonl"
    interrupted(path, ["2x32", "2x32"], {})
    world, found = done(path, lambda case: None, monkeypatch)
    assert timed(found) == ALL - LONG and Form(2, 32) not in world.compiled
    assert all("2x32: did not end before" in reason for reason in found.skipped)


def test_the_engine_takes_no_form_but_those_that_are_compiled():
    """A prompt's tail would else meet a small form, which compiles for as long as the engine has."""
    spec, config = replace(TINY, max_len=256), engine.settings(8, 256, "auto").engine
    layout = model.layout_for(spec, [decode(8, 128, (16,)), prefill(256)], "auto")
    builder = BatchBuilder(layout, config, spec, lambda uid: model.projections(layout, 16), bare=True)
    world = Imagined(lambda case: None, builder)

    def form(case: StepCase) -> Form:
        (launch,) = builder.launches(model.plan_of(layout, case, itertools.count(1)))
        return launch.form

    tail, few, adapted = prefill(40), decode(1, 64), decode(1, 64, (16,))
    assert (form(tail), form(few), form(adapted)) == (Form(2, 32), Form(2, 1, True), Form(2, 1))
    world.keep_to({Form(8, 32), Form(8, 1, True), Form(8, 1)})
    assert (form(tail), form(few), form(adapted)) == (Form(8, 32), Form(8, 1, True), Form(8, 1))
    assert world.serves(decode(8, 64)) and world.serves(decode(8, 64, (16,)))
    world.keep_to({Form(8, 32), Form(8, 1, True)})
    assert world.serves(decode(8, 64)) and not world.serves(decode(8, 64, (16,)))
    world.keep_to({Form(2, 32), Form(8, 1, True)})
    assert not world.serves(decode(8, 64))
