"""A simulated replay keeps the trace's order, counts everything once, and is the same every time."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from jlora.cache.transfer import Meter
from jlora.sim import replay as replays
from jlora.sim.clairvoyant import Clairvoyant
from jlora.sim.observe import Series
from jlora.sim.replay import Ask, Hinted, Replay, seed_of, start_of
from jlora.sim.replica import Replica
from jlora.sim.scenario import POLICIES, foresee
from jlora.sim.trace import Trace, Turn
from jlora.sim.workloads import closed
from tests.sim._sim import BLOCK, NPU, SPEC, chats, replica_of, sized, sound

ROOT = Path(__file__).resolve().parents[2]


def played(trace: Trace, policy: str = "jlora", device: int = 64, host: int = 256) -> tuple[Replay, list[Ask]]:
    replay = Replay(replica_of(sized(device, host), policy), trace)
    replay.history()
    replay.run()
    return replay, replay.counted


def ended(ask: Ask) -> float:
    """When its answer was whole."""
    assert ask.timing is not None and ask.usage is not None
    return ask.first + ask.timing.tpot * (ask.usage.completion_tokens - 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cache_is_sound_after_every_event_under_every_policy(policy: str):
    """A device and a host that are both too small: evictions, backups, drops and preemptions on the way."""
    trace = chats(sessions=14, turns=3, seed=30, rate=8.0)
    spec = sized(device=40, host=80)
    if policy == Clairvoyant.name:
        replica = Replica(spec, Clairvoyant(Meter(spec.link.block_s), foresee(trace, BLOCK)))
    else:
        replica = replica_of(spec, policy)
    replay = Replay(replica, trace, [sound])
    replay.history()
    replay.run()
    assert all(ask.usage is not None for ask in replay.asks) and len(replay.asks) == len(trace.turns)
    counters = replica.manager.counters
    assert counters.clean_evictions > 0 and counters.blocks_in > 0 and replica.scheduler.preemptions > 0
    if policy != "slora":  # it keeps no history: there is nothing to back up, and nothing to drop
        assert counters.blocks_out > 0 and counters.blocks_lost > 0


def test_every_turn_is_sent_once_and_no_session_asks_on_before_its_answer():
    trace = chats(sessions=20, turns=4)
    replay, _ = played(trace)
    assert sorted(ask.turn.at for ask in replay.asks) == [turn.at for turn in sorted(trace.turns, key=lambda t: t.at)]
    sessions: dict[int, list[Ask]] = {}
    for ask in replay.asks:
        sessions.setdefault(ask.turn.session, []).append(ask)
    for asks in sessions.values():
        assert [ask.turn.turn for ask in asks] == list(range(4))
        for before, after in zip(asks, asks[1:], strict=False):
            assert after.sent == pytest.approx(max(after.turn.at, ended(before)))


def test_history_is_played_at_its_times_and_counted_by_nobody():
    trace = chats(sessions=20, turns=2)
    replay, asks = played(trace)
    past = [ask for ask in replay.asks if ask not in asks]
    assert min(ask.sent for ask in past) == trace.turns[0].at < 0 <= min(ask.sent for ask in asks)
    assert len(asks) == sum(turn.at >= 0 for turn in trace.turns)
    assert start_of(trace) + trace.turns[0].at == pytest.approx(1.0)  # the clock's start


def test_a_prompt_holds_the_answers_and_finds_them_in_the_cache():
    """Alone on a device with room for all, a turn finds every full block of the turn before and its answer."""
    turns = (Turn(0.0, 1, 0, tuple(range(3, 13)), 10, None), Turn(9.0, 1, 1, (5,) * 4, 1, None))
    _, asks = played(Trace("two", turns, ()))
    first, second = (ask.usage for ask in asks)
    assert first is not None and second is not None
    assert second.prompt_tokens == 10 + 10 + 4
    assert second.cached_tokens == 16  # 19 of 20 tokens have KV: the last answer token was never an input


def test_closed_loop_turns_wait_for_the_answer_and_then_think():
    turns = (Turn(0.0, 1, 0, (3,) * 40, 20, None), Turn(1.0, 1, 1, (5,) * 4, 1, None, after=1.0))
    _, (first, second) = played(Trace("two", turns, ()))
    assert second.sent == pytest.approx(ended(first) + 1.0)


def test_a_closed_loop_goes_on_until_all_is_answered():
    """Its times say nothing of its length: all are 0 here, and the answers take some minutes."""
    turns = tuple(Turn(0.0, i, 0, (i + 3,) * 60, 100, None) for i in range(400))
    trace = closed(Trace("rush", turns, ()), 2)
    assert all(turn.at == 0 for turn in trace.turns) and trace.users == 2
    replay, asks = played(trace)
    assert len(asks) == 400 and replay.unsent == 0 and all(ask.usage is not None for ask in asks)
    assert replay.now > 100
    assert max(sum(a.sent <= b.sent < ended(a) for a in asks) for b in asks) == 2


def test_a_closed_loop_that_stands_still_is_cut(monkeypatch: pytest.MonkeyPatch):
    """An adapter that takes a day to load, and two users who want it."""
    monkeypatch.setattr(replays, "STALLED_S", 5.0)
    spec = sized(device=64)
    spec = replace(spec, link=replace(spec.link, block_s=86400.0))
    turns = (Turn(0.0, 1, 0, (3,) * 40, 2, None), *(Turn(0.0, i, 0, (i,) * 40, 2, 0) for i in range(2, 6)))
    replay = Replay(replica_of(spec), closed(Trace("stuck", turns, ("a0",)), 2))
    replay.run()
    assert len(replay.asks) == 3 and replay.unsent == 2  # one is answered, two wait
    assert 5.0 < replay.now < 6.0


def test_times_to_first_token_are_those_that_the_engine_reports():
    _, asks = played(chats(sessions=20, turns=3))
    for ask in asks:
        assert ask.timing is not None
        assert ask.first - ask.sent == pytest.approx(ask.timing.ttft)
        parts = ask.timing.queue + max(ask.timing.adapter_cold_start, ask.timing.kv_cold_start) + ask.timing.prefill
        assert parts == pytest.approx(ask.timing.ttft)


def test_what_can_never_fit_is_refused_and_its_session_goes_on():
    turns = (Turn(0.0, 1, 0, (3,) * 400, 2, None), Turn(1.0, 2, 0, (4,) * 40, 2, None))
    _, (long, short) = played(Trace("two", turns, ()), device=20)
    assert long.refused and long.usage is None
    assert not short.refused and short.usage is not None


def test_an_overload_is_cut_and_what_waits_has_no_answer():
    turns = tuple(Turn(i / 1000, i, 0, (i + 3,) * 60, 10, None) for i in range(3000))
    replay, asks = played(Trace("flood", turns, ()), device=20)
    assert len(asks) == 3000 and not any(ask.refused for ask in asks)
    assert any(ask.usage is None for ask in asks) and any(ask.usage is not None for ask in asks)
    assert replay.now < 100


def test_a_series_has_a_sample_per_interval_and_its_parts_are_shares():
    trace = chats(sessions=20, turns=3)
    replica = replica_of(sized(device=64), "fastlibra-wom")
    series = Series(start_of(trace), 0.5)
    replay = Replay(replica, trace, [series])
    replay.history()
    assert len(series.at) <= 1  # the event that ends it may end at time 0
    replay.run()
    assert len(series.at) > 5
    assert all(b - a >= 0.5 for a, b in zip(series.at, series.at[1:], strict=False))
    parts = zip(series.adapters, series.history_kv, series.running_kv, strict=True)
    assert all(0 <= sum(part) <= 1 and min(part) >= 0 for part in parts)
    assert max(series.adapters) > 0 and max(series.history_kv) > 0 and max(series.running_kv) > 0


def test_a_series_keeps_so_many_samples_at_most():
    trace = chats(sessions=20, turns=3)
    series = Series(start_of(trace), 0.01, most=32)
    Replay(replica_of(sized(device=64)), trace, [series]).run()
    assert 16 <= len(series.at) <= 32 and series.every_s > 0.01
    assert all(len(column) == len(series.at) for column in series.describe().values())
    assert all(b - a >= series.every_s / 2 for a, b in zip(series.at, series.at[1:], strict=False))


def test_no_two_turns_of_a_trace_share_their_tokens():
    trace = chats(sessions=30, turns=5)
    assert len({seed_of(turn) for turn in trace.turns}) == len(trace.turns)


CODE = """
import json
from jlora.sim.scenario import Scenario, Work, simulate
from tests.sim._sim import NPU, chats
trace = chats(sessions=40, turns=4, seed=5)
work = Work.of(trace, [32, 64, 32], NPU)
scenario = Scenario(NPU, hbm_gb=0.6, host_gb=1.2, link_gbps=2)
print(json.dumps([simulate(scenario, work, policy) for policy in ("jlora", "fastlibra", "vllm", "clairvoyant")]))
"""


def test_one_seed_replays_byte_for_byte_in_another_process():
    """Also when strings and objects hash otherwise."""
    digests = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}
        )
        assert done.returncode == 0, done.stderr.decode()
        runs: list[Mapping] = json.loads(done.stdout)
        assert all(run["cache"]["bytes_in"] > 0 for run in runs)
        digests.add(hashlib.sha256(done.stdout).hexdigest())
    assert len(digests) == 1


def test_a_slower_link_makes_requests_wait_longer_for_the_same_hits():
    trace = chats(sessions=40, turns=4, rate=1.0)
    waits = []
    for factor in (1, 4):  # and computing again would still take longer
        link = replace(SPEC.link, block_s=factor * SPEC.link.block_s)
        replay = Replay(replica_of(replace(sized(device=40), link=link), "lru"), trace)
        replay.run()
        waits.append(sum(ask.timing.kv_cold_start for ask in replay.asks if ask.timing is not None))
    assert waits[1] > 2 * waits[0] > 0


def test_a_hint_in_time_brings_in_what_the_turn_needs():
    """Between a session's turns others push its KV out; who is told of the next turn has it back by then."""
    session = [Turn(10.0 * i, 0, i, (i + 3,) * 20, 1, 0) for i in range(3)]
    others = [Turn(5.0 * i + 2.0, i + 1, 0, (i + 50,) * 200, 1, None) for i in range(5)]
    trace = Trace("hinted", tuple(sorted((*session, *others), key=lambda turn: turn.at)), ("a0",))
    waits, found = {}, {}
    for ahead in (0.0, 3.0):
        replica = replica_of(sized(device=64), "lru")
        replay = Hinted(replica, trace, (sound,), ahead) if ahead else Replay(replica, trace)
        replay.run()
        timings = [ask.timing for ask in replay.asks if ask.turn.session == 0 and ask.timing is not None]
        waits[ahead] = sum(max(timing.adapter_cold_start, timing.kv_cold_start) for timing in timings[1:])
        counters = replica.manager.counters
        found[ahead] = counters.kv_hit_tokens - counters.kv_host_hit_tokens
    assert waits[0.0] > 0 == waits[3.0]
    assert found[3.0] > found[0.0]


def test_the_papers_card_has_room_for_what_the_paper_runs():
    assert NPU.pool_bytes // NPU.layout.block_bytes > 2700
