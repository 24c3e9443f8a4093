"""Many simulated replicas behind a router: no request is lost, and a service of one is that replica."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jlora import cli
from jlora.cluster.routing.policy import Ask
from jlora.cluster.routing.routes import ROUTES
from jlora.cluster.routing.simple import MostIdle, RoundRobin
from jlora.cluster.routing.ways import PATH_BPS
from jlora.cluster.view import View
from jlora.model.spec import PROJECTIONS
from jlora.sim.fleet import Fleet
from jlora.sim.kernels import Kernel, costs_of
from jlora.sim.member import Member
from jlora.sim.replay import Replay
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import Service, simulate_service
from jlora.sim.trace import Trace, Turn
from jlora.sim.wires import Wires
from tests import port
from tests.sim._sim import NPU, SPEC, chats, policy_of, replica_of, takes

ROOT = Path(__file__).resolve().parents[2]
RANKS = (8, 16, 8)


def fleet_of(count: int, trace, policy=None, delay_s: float = 0.0, fetch_s: float = 0.0) -> Fleet:
    members = [Member(f"r{i}", SPEC, policy_of("jlora", SPEC), takes(fetch_s)) for i in range(count)]
    return Fleet(members, trace, policy or RoundRobin(), Wires(RANKS, delay_s))


def times(asks) -> list[tuple]:
    return [(ask.turn.session, ask.turn.turn, ask.sent, ask.first, ask.usage, ask.timing) for ask in asks]


def test_a_service_of_one_replica_without_delay_does_what_the_replica_does_alone():
    trace = chats(20, 3)  # without adapters: a replica alone has them from the start
    base = replace(trace, turns=tuple(replace(turn, adapter=None) for turn in trace.turns))
    alone = Replay(replica_of(replace(SPEC, adapters=())), base)
    alone.run()
    fleet = fleet_of(1, base)
    fleet.run()
    assert times(fleet.asks) == times(alone.asks)


@pytest.mark.parametrize("delay_s", [0.0, 0.004])
def test_every_turn_is_answered_once_and_equal_runs_are_equal(delay_s: float):
    runs = []
    for _ in range(2):
        fleet = fleet_of(3, chats(30, 3), delay_s=delay_s, fetch_s=0.05)
        fleet.run()
        runs.append(times(fleet.asks))
        assert len(fleet.asks) == len(chats(30, 3).turns) and all(ask.usage for ask in fleet.asks)
        assert port.at_rest(fleet)
    assert runs[0] == runs[1]


def test_a_fetch_delays_the_first_request_for_an_adapter_and_no_other():
    trace = chats(12, 1)
    slow = fleet_of(1, trace, fetch_s=0.5)
    slow.run()
    known: set[int] = set()
    later = 0
    for ask in slow.asks:
        adapter = ask.turn.adapter
        if adapter is not None and adapter not in known:
            assert ask.first - ask.sent > 0.5
            known.add(adapter)
        later += adapter in known
    assert known and later > len(known)
    member = slow.members["r0"]
    assert member.fetched == sum(SPEC.adapters[adapter] for adapter in known)


class Watching(MostIdle):
    """Notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, dict]] = []
        self.now: Callable[[], float] = lambda: 0.0

    def choose(self, view: View, ask: Ask) -> str | None:
        self.seen.append((self.now(), {name: (r.sent, r.running, r.waiting) for name, r in view.items()}))
        return super().choose(view, ask)


def test_a_view_is_as_old_as_its_messages_and_knows_what_the_router_sent():
    policy = Watching()
    fleet = fleet_of(2, chats(40, 1, rate=30.0), policy, delay_s=1.0)
    policy.now = lambda: fleet.now
    fleet.run()
    first = policy.seen[0][0]
    early = [state for now, state in policy.seen if now < first + 2.0]  # a request goes 1 s there, its token 1 s back
    assert len(early) > 2
    for count, state in enumerate(early):
        assert sum(sent for sent, _, _ in state.values()) == count
        assert all(running == waiting == 0 for _, running, waiting in state.values())


def test_goodput_is_of_the_seconds_in_which_requests_come():
    """A last answer that takes long lowers nothing."""
    turns = tuple(Turn(0.5 * i, i, 0, tuple(range(50 * i, 50 * i + 12)), 4 if i < 8 else 2000, None) for i in range(9))
    work = Work.of(Trace("long", turns, ()), (), NPU)
    result = simulate_service(Scenario(NPU), Service(1, (), slo_s=1.0), work, "jlora", "most-idle")
    assert result["device"]["seconds"] > 10 > turns[-1].at == 4.0
    assert result["service"]["goodput"] == pytest.approx(9 / 4.0)


def test_a_replica_tells_how_fast_adapters_come():
    spec = replace(SPEC, block_bytes=1 << 20)
    member = Member("r0", spec, policy_of("jlora", spec), takes(0.5))
    Fleet([member], chats(12, 1), RoundRobin(), Wires(RANKS)).run()
    seen = member.seen(member.clock.now)
    sizes = [size << 20 for size in SPEC.adapters]
    assert seen.peer_bps == 0.0 and min(sizes) / 0.5 < seen.path_bps < PATH_BPS


def test_a_fetch_that_takes_no_time_tells_no_rate():
    spec = replace(SPEC, block_bytes=1 << 20)
    member = Member("r0", spec, policy_of("jlora", spec), takes(0.0))
    Fleet([member], chats(12, 1), RoundRobin(), Wires(RANKS)).run()
    assert member.fetched and member.seen(member.clock.now).path_bps == member.seen(member.clock.now).peer_bps == 0.0


def test_requests_that_all_come_at_once_have_a_goodput():
    turns = tuple(Turn(0.0, i, 0, tuple(range(50 * i, 50 * i + 12)), 4, None) for i in range(3))
    work = Work.of(Trace("burst", turns, ()), (), NPU)
    result = simulate_service(Scenario(NPU), Service(1, (), slo_s=1.0), work, "jlora", "most-idle")
    assert result["service"]["goodput"] == pytest.approx(3 / result["device"]["seconds"], rel=1e-3)


def test_padded_kernels_cost_the_largest_rank_and_unpadded_ones_the_sum():
    step = NPU.step_model()
    padded, unpadded = (costs_of(NPU, step, kernel) for kernel in ("padded", "unpadded"))
    ranks = {64: 1, 8: 9}
    assert padded.step_s(ranks) - padded.step_s({}) == pytest.approx(640 * padded.rank_s)
    assert unpadded.step_s(ranks) - unpadded.step_s({}) == pytest.approx(136 * padded.rank_s)
    base, *both = (
        _tpot_s(kernel, adapted) for kernel, adapted in (("own", False), ("unpadded", True), ("padded", True))
    )
    assert [tpot_s - base for tpot_s in both] == pytest.approx([72 * padded.rank_s, 128 * padded.rank_s], rel=0.05)


def _tpot_s(kernel: Kernel, adapted: bool) -> float:
    """Of two requests that decode together, of ranks 64 and 8 if they have adapters."""
    turns = tuple(Turn(0.0, i, 0, tuple(range(50 * i, 50 * i + 20)), 200, i if adapted else None) for i in range(2))
    ranks = (64, 8)
    work = Work.of(Trace("two", turns, ("a", "b")), ranks, NPU)
    return simulate_service(Scenario(NPU), Service(1, ranks, kernel), work, "jlora", "most-idle")["summary"]["tpot_s"]


def test_a_rank_costs_the_projections_that_its_adapters_act_on():
    step = NPU.step_model()
    every, two = (costs_of(replace(NPU, projections=names), step, "unpadded") for names in (PROJECTIONS, ("q", "o")))
    shapes = NPU.spec.projection_shapes
    assert two.rank_s / every.rank_s == pytest.approx(
        sum(sum(shapes[name]) for name in ("q", "o")) / sum(map(sum, shapes.values()))
    )


def test_what_is_sent_before_a_service_is_warm_is_played_and_not_counted():
    work = Work.of(chats(60, 1, rate=20.0), RANKS, NPU)
    service = Service(2, RANKS, fetch_gbps=0.05)
    cold, warm = (
        simulate_service(Scenario(NPU), replace(service, warm_s=warm_s), work, "jlora", "round-robin")
        for warm_s in (0.0, 1.5)
    )
    late = sum(turn.at >= 1.5 for turn in work.trace.turns)
    assert warm["summary"]["requests"] == late < cold["summary"]["requests"]
    assert cold["requests"]["rows"][-late:] == warm["requests"]["rows"]
    assert warm["service"]["bytes_fetched"] < cold["service"]["bytes_fetched"]
    assert warm["device"]["seconds"] == pytest.approx(cold["device"]["seconds"] - 1.5)


def test_every_policy_serves_all_from_the_command_line(tmp_path):
    out = tmp_path / "out.json"
    argv = ["sim", "--workload", "W2", "--seconds", "3", "--rate", "6", "--adapters", "5", "--shrink", "8"]
    argv += ["--replicas", "3", "--hbm-gb", "2", "--host-gb", "4", "--kernel", "padded", "--slo-ms", "60"]
    assert cli.main([*argv, "--route", *ROUTES, "--json", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["route"] for run in runs] == list(ROUTES)
    for run in runs:
        assert run["setting"]["replicas"] == 3
        assert run["summary"]["unfinished"] == run["summary"]["refused"] == 0
        assert 0 < run["service"]["attainment"] <= 1
        assert sum(run["service"]["requests"]) >= run["summary"]["requests"] > 10


@pytest.mark.parametrize(
    ("flags", "strikes"),
    [
        (["--route", "first-fit", "--migrate", "--migrate-s", "0.5", "--set", "engine.max_seqs=8"], "moved"),
        (["--place", "loraserve", "--place-s", "1", "--fetch-gbps", "10"], "bytes_fetched"),
    ],
)
def test_one_seed_replays_byte_for_byte_in_another_process(flags: list[str], strikes: str, tmp_path: Path):
    """Also when strings and objects hash otherwise, and a replica is lost."""
    argv = ["--workload", "W2", "--seconds", "4", "--rate", "60", "--adapters", "5", "--fail", "2:r1:1"]
    argv += ["--replicas", "3", "--hbm-gb", "9", "--host-gb", "12", *flags]
    made = [tmp_path / f"{seed}.json" for seed in "12"]
    for out in made:
        environment = {"PYTHONHASHSEED": out.stem, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "jlora", "sim", *argv, "--json", out.name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr.decode()
    first, second = (json.loads(out.read_text())["runs"] for out in made)
    assert first == second and first[0]["service"]["lost"] == 1 and first[0]["service"][strikes] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "0"], "--replicas 0: must be at least 1"),
        (["--replicas", "2", "--route", "idle"], "the nearest is 'most-idle'"),
        (["--replicas", "2", "--route", "table"], "--route table: needs a placement"),
        (["--replicas", "2", "--route", "turns"], "--route turns: needs a placement"),
        (["--replicas", "2", "--route", "loraserve", "--place", "dlora"], "needs loraserve's placement"),
        (["--replicas", "2", "--migrate", "--migrate-s", "0"], "--migrate-s 0: must be above 0"),
        (["--replicas", "2", "--migrate", "--migrate-s", "nan"], "--migrate-s nan: must be above 0"),
        (["--replicas", "2", "--place", "loraserve", "--place-s", "0"], "--place-s 0: must be above 0"),
        (["--replicas", "2", "--delay-ms", "nan"], "--delay-ms nan: must be at least 0"),
        (["--replicas", "2", "--delay-ms", "-1"], "--delay-ms -1: must be at least 0"),
        (["--replicas", "2", "--hint-s", "1"], "--hint-s 1: must be 0"),
        (["--replicas", "2", "--late"], "--late: means nothing without --place loraserve or dlora"),
        (["--replicas", "2", "--late", "--place", "random"], "--late: means nothing without --place"),
        (["--replicas", "2", "--place-s", "5", "--route", "jlora"], "--place-s: means nothing without --place"),
        (["--replicas", "2", "--place-s", "5", "--place", "contiguous"], "--place-s: means nothing without --place"),
        (["--replicas", "2", "--migrate-s", "5"], "--migrate-s: means nothing without --migrate"),
    ],
)
def test_wrong_flags_are_named(flags, said, capsys):
    assert cli.main(["sim", "--seconds", "5", *flags]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--place", "dlora", "--place-s", "5", "--late"],
        ["--route", "loraserve", "--place-s", "5", "--late"],
        ["--migrate", "--migrate-s", "5"],
        ["--place-s", "60", "--migrate-s", "1"],
    ],
)
def test_flags_that_mean_something_and_defaults_are_taken(flags: list[str]):
    argv = ["sim", "--workload", "W2", "--seconds", "2", "--rate", "4", "--adapters", "4", "--shrink", "8"]
    assert cli.main([*argv, "--replicas", "2", *flags]) == 0
