"""Replicas that are killed by schedule: every request goes on elsewhere exactly, and equal runs are equal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from jlora import cli
from jlora.cluster.homes import Rule
from jlora.cluster.requests import PATIENCE_S
from jlora.cluster.routing.simple import RoundRobin
from jlora.errors import ConfigError
from jlora.sim.fleet import Fleet, Live
from jlora.sim.losses import Loss, parse
from jlora.sim.member import Member
from jlora.sim.placing import Placed, Placing
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import Service
from jlora.sim.service import fleet_of as services_fleet
from jlora.sim.trace import Trace, Turn
from jlora.sim.wires import Wires
from jlora.types import TokenEvent
from tests import port
from tests.sim._sim import NPU, SPEC, chats, policy_of, takes

RANKS = (8, 16, 8)
DELAY_S = 0.002
LOSSES = [Loss(0.3, 0, 0.2), Loss(0.6, 1)]


class Checked(Fleet):
    """Looks at every answer."""

    exact = 0

    def _take(self, live: Live, event: TokenEvent, now: float) -> None:
        sent = self._start + now - DELAY_S
        assert sent <= self._sides[live.routed.replica].killed + 1e-9  # nothing that it would have said later
        super()._take(live, event, now)

    def _ended(self, live: Live, told: Sequence[int], now: float) -> None:
        assert live.routed.resumed().done[0].tokens == tuple(told)
        assert live.ask.usage is not None and live.ask.usage.completion_tokens == live.turn.output
        self.exact += 1
        super()._ended(live, told, now)


def member(name: str) -> Member:
    return Member(name, SPEC, policy_of("jlora", SPEC), takes(0.05))


def fleet_of(count: int, losses: Sequence[Loss], trace: Trace | None = None) -> Checked:
    members = [member(f"r{i}") for i in range(count)]
    wires = Wires(RANKS, DELAY_S, losses=losses, again=member)
    fleet = Checked(members, trace or chats(60, 2, rate=60.0), RoundRobin(), wires)
    fleet.run()
    return fleet


@pytest.mark.parametrize("down_s", [math.inf, 0.0, 0.3])
def test_requests_of_a_killed_replica_go_on_behind_what_they_have(down_s: float):
    fleet = fleet_of(3, [Loss(0.4, 1, down_s), Loss(0.8, 2, down_s)])
    assert fleet.exact == len(fleet.asks) and all(ask.usage for ask in fleet.asks)
    assert fleet.resumed > 3 and len(fleet.dead) == 2
    up = {"r0"} if math.isinf(down_s) else {"r0", "r1", "r2"}
    assert {name for name, seen in port.seen(fleet).items() if seen.health == "up"} == set(fleet.members) == up
    assert port.at_rest(fleet)
    if not math.isinf(down_s):
        assert all(fleet.members[name].received for name in up)  # who is back takes part


def test_equal_runs_are_equal():
    runs = [
        [(ask.turn.session, ask.turn.turn, ask.first, ask.usage, ask.timing) for ask in fleet_of(3, LOSSES).asks]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_without_a_replica_requests_wait_and_then_go_on():
    fleet = fleet_of(2, [Loss(0.4, 0, 5.0), Loss(0.4, 1, 6.0)])
    assert fleet.exact == len(fleet.asks) and fleet.resumed > 0
    between = [ask for ask in fleet.asks if 0.41 < ask.sent < 5.0]
    assert between and all(ask.first > 5.4 for ask in between)


def test_without_a_replica_for_a_minute_they_end_without_an_answer():
    fleet = fleet_of(1, [Loss(0.4, 0)], chats(20, 1, rate=20.0))
    missing = [ask for ask in fleet.asks if ask.usage is None]
    given_up = [ask for ask in missing if ask.sent < 0.4]
    assert given_up and port.live(fleet) <= len(missing) - len(given_up)
    assert fleet.now > PATIENCE_S


def placed_on(members: Sequence[Member], every_s: float) -> Placing:
    points = {8: 400.0, 16: 200.0}
    return Placing(Placed(Rule("loraserve"), RANKS, SPEC.adapters, points, 100, 100, every_s=every_s), members)


@pytest.mark.parametrize("every_s", [1.0, 60.0])
def test_a_placement_gives_a_lost_replicas_adapters_to_others(every_s: float):
    """At once: no time step of a minute ends here."""
    members = [member(f"r{i}") for i in range(3)]
    placing = placed_on(members, every_s)
    wires = Wires(RANKS, DELAY_S, placing, every_s, losses=[Loss(0.5, 0)], again=member)
    fleet = Checked(members, chats(60, 2, rate=10.0), placing.table, wires)
    fleet.run()
    assert fleet.exact == len(fleet.asks)
    assert set(placing.table.parts) == set("012")
    assert all(parts and "r0" not in parts for parts in placing.table.parts.values())


@pytest.mark.parametrize("back", ["r0", "r1"])
def test_a_replica_that_is_back_is_asked_for_adapters_before_the_time_step_ends(back: str):
    """Also one that was asked before it was lost, and that no look has missed."""
    placing = placed_on([member(f"r{i}") for i in range(2)], 60.0)
    homes = {name: {key for key, parts in placing.table.parts.items() if name in parts} for name in ("r0", "r1")}
    placing.lost("r0")
    assert {name for _, name in placing.round({"r1": homes["r1"]}, 1.0).fetch} == {"r1"}, "what r0 had"
    if back == "r1":
        placing.lost("r1")
    assert back in {name for _, name in placing.round({"r1": homes["r1"], back: set()}, 2.0).fetch}


def test_an_adapter_that_only_the_dead_one_had_comes_from_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, fetched, fetch_s = tmp_path / "out.json", list[bool](), Service.fetch_s

    def counted(self: Service, size: int, held: bool) -> float:
        fetched.append(held)
        return fetch_s(self, size, held)

    monkeypatch.setattr(Service, "fetch_s", counted)
    from_path = []
    for fail in ([], ["--fail", "2:r0:1"]):
        fetched.clear()
        argv = ["sim", "--workload", "W2", "--seconds", "4", "--rate", "8", "--adapters", "30", "--shrink", "8"]
        argv += ["--replicas", "2", "--hbm-gb", "2", "--host-gb", "4", "--route", "most-idle", "--json", str(out)]
        assert cli.main([*argv, "--fetch-gbps", "50", "--path-gbps", "20", *fail]) == 0
        (run,) = json.loads(out.read_text())["runs"]
        assert run["service"]["lost"] == bool(fail) and run["summary"]["unfinished"] == 0
        assert len(run["service"]["requests"]) == 2 and any(fetched)
        from_path.append(fetched.count(False))
    assert from_path[1] > from_path[0]


@pytest.mark.parametrize(("killed", "of", "came"), [(0, 1, 32.0 + 20.0), (1, 2, 32.0 + 9.0)], ids=["lender", "other"])
def test_transfers_of_a_killed_replica_end(killed: int, of: int, came: float):
    """From the path an adapter takes 20 s, and 10 s from r0, which lends it to r1 and r2 at once from 30 s on.

    Without r0, both take the path. Without r1, the rest of r2's, 9 s of 10, has all of r0's link.
    """
    turns = tuple(Turn(at, i, 0, tuple(range(50 * i, 50 * i + 9)), 1, 0) for i, at in enumerate((0.0, 30.0, 30.0)))
    trace = Trace("one adapter", turns, ("a",))
    work = Work.of(trace, (8,), NPU)
    gbps = work.sizes[0] * NPU.layout.block_bytes / 10.0 / 1e9
    service = Service(3, (8,), fetch_gbps=gbps, path_gbps=gbps / 2, fetch_latency_s=0.0, losses=(Loss(32.0, killed),))
    fleet = services_fleet(Scenario(NPU), service, work, "jlora", "round-robin")
    fleet.run()
    assert fleet.asks[of].first == pytest.approx(came, abs=0.2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1", "must be T:REPLICA"),
        ("-1:0", "T and DOWN_S must be at least 0"),
        ("1:r1:-3", "T and DOWN_S must be at least 0"),
        ("nan:0", "must be T:REPLICA"),
        ("1:r3", "must name one of r0 to r2"),
        ("1:0:x", "must be T:REPLICA"),
    ],
)
def test_a_wrong_schedule_is_named(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse([text], 3)


def test_a_loss_that_nobody_would_notice_is_refused(capsys: pytest.CaptureFixture[str]):
    argv = ["sim", "--workload", "W2", "--seconds", "4", "--rate", "8", "--shrink", "8", "--replicas", "2"]
    assert cli.main([*argv, "--fail", "500:r1"]) == 1
    assert "--fail 500:r1: must come before the run ends" in capsys.readouterr().err


def test_a_schedule_is_in_order_and_kills_no_dead_one():
    assert parse(["9:1:2", "3:r0"], 2) == (Loss(3.0, 0), Loss(9.0, 1, 2.0))
    with pytest.raises(ConfigError, match="4:r0: must come when the replica is back"):
        parse(["3:0:2", "4:0"], 2)


def test_one_replica_must_be_left_or_come_back():
    assert len(parse(["1:0", "2:1:5"], 2)) == 2
    with pytest.raises(ConfigError, match="2:r1: no replica would be left"):
        parse(["2:1", "1:0:0.5", "1.7:0"], 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fail", "1:0"], "--fail: needs --replicas"),
        (["--replicas", "2", "--fail", "1:2"], "must name one of r0 to r1"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["sim", "--seconds", "5", *flags]) != 0
    assert said in capsys.readouterr().err
