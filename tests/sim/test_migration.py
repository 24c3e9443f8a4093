"""Requests that move between simulated replicas: each resumes exactly, and equal runs are equal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jlora import cli
from jlora.cache import inspect
from jlora.cluster.balance import Terms
from jlora.cluster.routing.policy import Ask, Bookless
from jlora.cluster.view import View
from jlora.sim.fleet import Fleet
from jlora.sim.member import Member
from jlora.sim.parts import Live, Moves
from jlora.sim.wires import Balance, Wires
from tests import port
from tests.sim._sim import SPEC, chats, policy_of, takes

RANKS = (8, 16, 8)
BALANCE = Balance(Terms(queue_s=0.05, limit_s=float("inf")), every_s=0.2, solve_s=0.02)


class Crowding(Bookless):
    """Sends everything to the first replica."""

    def choose(self, view: View, ask: Ask) -> str | None:
        return next(iter(view))


class Checked(Fleet):
    """Looks at every answer."""

    exact = resumed = delayed = 0
    waiting: frozenset[int] = frozenset()  # whose moves wait for their adapters

    def __init__(self, *args: Any, **fields: Any):
        super().__init__(*args, **fields)
        # When the first move of an adapter to a replica was planned, and made.
        self.planned: dict[tuple[str, str | None], float] = {}
        self.came: dict[tuple[str, str | None], float] = {}

    def _put(self, at: float, kind: int, *what: Any) -> None:
        if what and isinstance(moves := what[0], Moves) and moves.asked >= 0:
            self.waiting |= {move.key for move in moves.moves}
            self.delayed += 1
        super()._put(at, kind, *what)

    def _move(self, at: float, moves: Moves) -> None:
        self.waiting -= {move.key for move in moves.moves}
        super()._move(at, moves)

    def _plan(self, at: float, balance: Balance) -> None:
        super()._plan(at, balance)
        for move in self.plans[-1].moves:
            self.planned.setdefault((move.target, move.adapter), at)
        assert self.waiting.isdisjoint(move.key for move in self.plans[-1].moves)

    def _migrate(self, at: float, live: Live, target: str) -> None:
        self.resumed += live.outputs is not None
        if live.asked.adapter is not None:
            self.came.setdefault((target, live.asked.adapter), at)
        super()._migrate(at, live, target)

    def _ended(self, live: Live, told: Sequence[int], now: float) -> None:
        assert live.routed.resumed().done[0].tokens == tuple(told)
        assert live.ask.usage is None or live.ask.usage.completion_tokens == live.turn.output
        self.exact += 1
        super()._ended(live, told, now)


def crowded(balance: Balance | None, fetch_s: float = 0.0, delay_s: float = 0.002) -> Checked:
    spec = replace(SPEC, engine=replace(SPEC.engine, max_seqs=4))
    members = [Member(f"r{i}", spec, policy_of("jlora", spec), takes(fetch_s)) for i in range(3)]
    fleet = Checked(members, chats(30, 2, rate=40.0), Crowding(), Wires(RANKS, delay_s, balance=balance))
    fleet.run()
    return fleet


@pytest.mark.parametrize("fetch_s", [0.0, 0.1])
def test_moved_requests_go_on_behind_what_they_have(fetch_s: float):
    fleet, alone = crowded(BALANCE, fetch_s), crowded(None, fetch_s)
    assert fleet.exact == len(fleet.asks) == len(alone.asks) and all(ask.usage for ask in fleet.asks)
    assert fleet.moved > 5 and alone.moved == 0
    mean, other = (sum(ask.first - ask.sent for ask in one.asks) for one in (fleet, alone))
    assert mean < 0.7 * other
    assert port.at_rest(fleet)
    for member in fleet.members.values():
        while member.busy:
            member.step(member.clock.now + 1.0)
        inspect.check_integrity(member.manager)


def test_no_plan_moves_a_request_whose_move_waits_for_its_adapter():
    fleet = crowded(BALANCE, 0.5)  # longer than between two plans
    assert fleet.delayed > 0 and fleet.moved > 0


def test_some_move_in_the_middle_of_their_answers_and_the_solver_plans_it():
    fleet = crowded(BALANCE)
    assert fleet.resumed > 0
    assert all(plan.after_s < 0.9 * plan.before_s for plan in fleet.plans if plan.moves)
    assert any(plan.solved for plan in fleet.plans)


def test_a_router_knows_of_an_adapter_when_a_message_has_told_it():
    """It asks for the adapter and hears of it, half a second each way."""
    fleet = crowded(BALANCE, fetch_s=0.1, delay_s=0.5)
    takes_s = [at - fleet.planned[pair] for pair, at in fleet.came.items() if pair[0] != "r0"]  # which had them all
    assert takes_s and min(takes_s) >= BALANCE.solve_s + 0.5 + 0.1 + 0.5


def test_no_plan_overlaps_another_however_often_they_are_asked_for():
    fleet = crowded(replace(BALANCE, every_s=0.01, solve_s=0.3))
    assert fleet.moved > 0 and fleet.exact == len(fleet.asks)
    assert len(fleet.plans) <= fleet.now / 0.31 + 1


def test_equal_runs_are_equal():
    runs = [
        [(ask.turn.session, ask.turn.turn, ask.first, ask.usage, ask.timing) for ask in crowded(BALANCE).asks]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_a_command_line_moves_requests(tmp_path: Path):
    out = tmp_path / "out.json"
    argv = ["sim", "--workload", "W2", "--seconds", "4", "--rate", "60", "--adapters", "5"]
    argv += ["--replicas", "3", "--hbm-gb", "9", "--host-gb", "12", "--route", "first-fit", "--migrate", "--migrate-s"]
    assert cli.main([*argv, "0.5", "--set", "engine.max_seqs=8", "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["summary"]["unfinished"] == 0 and run["service"]["moved"] > 0
    assert 0 < run["service"]["candidates_most"] <= 4 * 128
