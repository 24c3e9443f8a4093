"""A simulated replica does what the engine does, when the engine would do it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jlora.errors import ConfigError
from jlora.sim.device import answer, token
from jlora.sim.replica import IDLE_ROUNDS, Replica
from jlora.types import TokenEvent
from tests.sim._sim import BLOCK, MODEL, SPEC, replica_of, request, sized

STEP = MODEL.fixed_s  # of a decode step
CHUNK = 64  # tokens, one step
EARLY = 1e-9


def run(replica: Replica) -> list[tuple[float, TokenEvent]]:
    """Steps until nothing is left; events and when they came."""
    found = []
    while replica.busy:
        found += [(replica.clock.now, event) for event in replica.step(math.inf)]
    return found


def quiet(replica: Replica) -> Replica:
    """With the copies of its start done."""
    for _ in range(100):
        replica.idle(math.inf)
    assert not replica.manager.flying
    return replica


def test_a_request_alone_waits_for_its_prompt_and_then_one_step_per_token():
    replica = quiet(replica_of())
    replica.submit(request("r", 32, 5), replica.clock.now)
    began = replica.clock.now
    events = run(replica)
    times = [at - began for at, _ in events]
    assert times == pytest.approx([STEP + 0.032 + i * STEP for i in range(5)])
    timing = events[-1][1].timing
    assert timing is not None
    assert (timing.ttft, timing.tpot, timing.queue) == pytest.approx((STEP + 0.032, STEP, 0.0))


def test_a_long_prompt_takes_as_many_steps_as_chunks():
    replica = quiet(replica_of())
    began = replica.clock.now
    replica.submit(request("r", 2 * CHUNK + 8, 1), began)
    ((at, _),) = run(replica)
    assert at - began == pytest.approx(3 * STEP + 0.001 * (2 * CHUNK + 8))


@pytest.mark.parametrize("overlap", [True, False])
def test_who_comes_during_a_step_is_planned_at_its_end_and_with_overlap_runs_one_step_later(overlap: bool):
    spec = replace(SPEC, engine=replace(SPEC.engine, overlap=overlap))
    replica = quiet(replica_of(spec))
    began = replica.clock.now
    replica.submit(request("first", 32, 9), began)
    if overlap:
        replica.step(math.inf)  # dispatches, and does not wait
        assert replica.clock.now == began
    replica.step(math.inf)
    assert replica.clock.now == pytest.approx(began + STEP + 0.032)  # the first prompt is done
    replica.submit(request("second", 32, 1, seed=2), began + 0.02)
    events = run(replica)
    at = next(at for at, event in events if event.request_id == "second")
    waited = STEP if overlap else 0.0  # the first one's next token was planned already
    assert at - began == pytest.approx(STEP + 0.032 + waited + STEP + 0.032)


def test_tokens_are_a_hash_of_request_and_position_also_after_preemption():
    replica = quiet(replica_of(sized(device=24)))
    for seed in range(1, 5):  # four times 8 blocks at the end: they cannot all stay
        replica.submit(request(f"r{seed}", 8, 24, seed), replica.clock.now)
    told: dict[str, list[int]] = {}
    for _, event in run(replica):
        assert event.token_id is not None
        told.setdefault(event.request_id, []).append(event.token_id)
    assert replica.scheduler.preemptions > 0
    for seed in range(1, 5):
        assert told[f"r{seed}"] == list(answer(seed, 8, 24))


def test_tokens_differ_between_requests_and_positions():
    drawn = {token(seed, position) for seed in range(200) for position in range(200)}
    assert len(drawn) > 0.999 * 200 * 200
    assert all(0 <= each < 2**30 for each in drawn)


def test_the_meter_learns_what_the_model_and_the_link_are_made_of():
    spec = sized(device=40)  # 3 prompts of 16 blocks do not fit: they come and go
    replica = quiet(replica_of(spec, "lru"))
    for turn in range(30):
        replica.submit(request(f"r{turn}", CHUNK + 1, 1, seed=turn % 3, adapter=turn % 3), replica.clock.now)
        run(replica)
    for seed in range(10, 50):  # prompts that nobody knows
        replica.submit(request(f"n{seed}", CHUNK, 1, seed), replica.clock.now)
        run(replica)
    meter = replica.manager.policy.meter
    assert replica.manager.counters.blocks_in > 30
    assert meter.load_s(1, 10) == pytest.approx(10 * spec.link.block_s, rel=0.05)
    assert meter.token_s == pytest.approx(MODEL.prompt_token_s + STEP / CHUNK, rel=0.05)


def test_a_step_that_waits_for_a_copy_teaches_nothing_of_prompts():
    spec = sized(device=40)
    spec = replace(spec, link=replace(spec.link, groups=4, adapter_s=0.5))
    replica = quiet(replica_of(spec, "lru"))
    for turn in range(6):
        replica.submit(request(f"r{turn}", CHUNK + 1, 3, seed=turn, adapter=turn % 3), replica.clock.now)
        run(quiet(replica))
    meter, streamed = replica.manager.policy.meter, replica.manager.counters.streamed
    assert meter.decode_s == pytest.approx(STEP, rel=0.05)
    meter.token_s = 1.0  # a step may follow any copy
    replica.submit(request("cold", CHUNK, 1, 9, adapter=0), replica.clock.now)
    run(replica)
    assert replica.manager.counters.streamed == streamed + 1 and meter.token_s == 1.0
    replica.submit(request("warm", CHUNK, 1, 10, adapter=0), replica.clock.now)
    run(replica)
    assert meter.token_s < 1.0


def test_a_request_waits_for_its_adapter_and_its_prefix_and_says_how_long():
    spec = replace(sized(device=40), link=replace(SPEC.link, groups=1))  # nothing is streamed
    replica = quiet(replica_of(spec, "lru"))
    for seed in (1, 2, 3):  # the third one's prompt pushes the first one's out
        replica.submit(request(f"r{seed}", CHUNK + 1, 1, seed), replica.clock.now)
        run(quiet(replica))
    replica.submit(request("again", CHUNK + 1, 1, 1), replica.clock.now)
    ((_, event),) = run(replica)
    assert event.timing is not None and event.usage is not None
    assert event.usage.cached_tokens == CHUNK
    assert 0 < event.timing.kv_cold_start <= CHUNK // BLOCK * spec.link.block_s + EARLY
    assert event.timing.ttft == pytest.approx(event.timing.kv_cold_start + STEP)  # its one token runs at once


def test_a_streamed_copy_hides_behind_the_step_that_reads_it():
    """The same request with streaming comes sooner, and not before its last layers could have been computed."""
    ends = {}
    for groups in (1, 4):
        spec = replace(sized(device=40), link=replace(SPEC.link, groups=groups))
        replica = quiet(replica_of(spec, "lru"))
        for seed in (1, 2, 3):
            replica.submit(request(f"r{seed}", CHUNK + 48, 1, seed), replica.clock.now)
            run(quiet(replica))
        # 4 of 28 blocks are known; the step computes 48 tokens in 58 ms, copying takes less.
        began = replica.clock.now
        known = request("again", CHUNK, 1, 1)
        replica.submit(replace(known, prompt=known.prompt + tuple(range(48))), began)
        ((at, _),) = run(replica)
        ends[groups] = at - began
        assert bool(replica.manager.counters.streamed) == (groups > 1)
    assert ends[4] < ends[1]
    assert ends[4] >= STEP + 0.001 * 48


def test_an_idle_replica_moves_to_the_next_event_and_no_further():
    replica = quiet(replica_of())
    now = replica.clock.now
    replica.idle(now + 0.03)
    assert replica.clock.now == now + 0.03
    replica.idle(math.inf)
    assert replica.clock.now == pytest.approx(now + 0.03 + IDLE_ROUNDS * SPEC.cache.monitor_s)
    replica.submit(request("r", 32, 1), replica.clock.now)
    run(replica)
    now = replica.clock.now
    replica.idle(math.inf)  # its KV is copied out meanwhile
    assert replica.clock.now <= now + SPEC.cache.monitor_s


def test_adapters_that_do_not_fit_the_host_are_refused():
    with pytest.raises(ConfigError, match="need 8 blocks.*has 7; raise --host-gb"):
        replica_of(sized(device=16, host=7))


@pytest.mark.parametrize("monitor_s, adapters", [(0.1, 3), (30.0, 1)])
def test_the_monitor_has_its_rounds_as_often_as_configured(monitor_s: float, adapters: int):
    """Of adapters that are loaded at once the first is brought in at once, and the monitor brings in the others."""
    replica = replica_of(replace(SPEC, cache=replace(SPEC.cache, monitor_s=monitor_s)))
    replica.idle(replica.clock.now + 0.05)  # the first round is due at once
    replica.submit(request("r", 32, 60), replica.clock.now)
    while replica.busy:
        replica.step(math.inf)
    assert sum(node.ready for uid, node in replica.manager.adapters.items() if uid) == adapters
