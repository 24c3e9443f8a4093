"""Activated LoRAs in the simulator: the base's KV before the invocation, and no adapter's work there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jlora.cache.inspect import state
from jlora.cache.transfer import Meter
from jlora.cache.tree import Origin
from jlora.config import POLICIES
from jlora.sim.clairvoyant import Clairvoyant
from jlora.sim.clock import START_S
from jlora.sim.replay import Ask, Hinted, Replay
from jlora.sim.replica import Replica
from jlora.sim.scenario import foresee
from jlora.sim.trace import Trace, Turn, facts, shrunk
from jlora.sim.workloads import SOURCES, Load, play
from tests.sim._sim import BLOCK, MODEL, SPEC, policy_of, replica_of, request, sized, sound

EARLY = 1e-9
TALK = tuple(range(3, 24))  # five blocks and a token
LOAD = Load(rate=8, seconds=10, gap_s=4, adapters=3, shrink=8, vocab=300, max_len=400)


def quiet(replica: Replica) -> Replica:
    """With the copies of its start done."""
    for _ in range(100):
        replica.idle(math.inf)
    return replica


def run(replica: Replica) -> list[float]:
    """When tokens came, since now."""
    began, found = replica.clock.now, []
    while replica.busy:
        found += [replica.clock.now - began for _ in replica.step(math.inf)]
    return found


def replayed(trace: Trace, replica: Replica, checked: bool = True) -> list[Ask]:
    replay = Replay(replica, trace, [sound] if checked else [])
    replay.history()
    replay.run()
    return replay.asks


def cached(asks: list[Ask]) -> list[int]:
    return [ask.usage.cached_tokens for ask in asks if ask.usage is not None]


def pipeline() -> Trace:
    """The base answers 9 tokens, two checkers look at that, one of them as a plain LoRA, and the base goes on."""
    return Trace(
        "pipeline",
        (
            Turn(0.0, 1, 0, TALK, 9, None),  # 30 tokens then, of which 29 have KV: 7 blocks
            Turn(1.0, 1, 1, (90, 91), 4, 0, aside=True, acts_from=0),
            Turn(2.0, 1, 2, (80, 81), 4, 1, aside=True, acts_from=0),
            Turn(3.0, 1, 3, (90, 91), 4, 2, aside=True),
            Turn(4.0, 1, 4, (70,) * 6, 1, None),
        ),
        ("a0", "a1", "a2"),
    )


@pytest.mark.parametrize(
    "activation, prompt_tokens, blocks", [(None, 32, 4), (0, 32, 4), (28, 4, 4), (31, 1, 4)], ids=str
)
def test_only_activated_tokens_cost_adapter_work(activation: int | None, prompt_tokens: int, blocks: int):
    model = replace(MODEL, adapter_token_s=0.001)
    replica = quiet(replica_of(replace(SPEC, model=model)))
    replica.submit(request("r", 32, 3, adapter=1, activation=activation), replica.clock.now)
    decode = MODEL.fixed_s + 0.001 * blocks
    first = MODEL.fixed_s + 0.032 + 0.001 * blocks * prompt_tokens
    assert run(replica) == pytest.approx([first, first + decode, first + 2 * decode])


def test_a_chunk_before_the_invocation_does_not_even_read_the_adapter():
    model = replace(MODEL, adapter_block_s=0.1)
    replica = quiet(replica_of(replace(SPEC, model=model)))
    replica.submit(request("r", 100, 1, adapter=1, activation=99), replica.clock.now)  # chunks of 64 and 36 tokens
    assert run(replica) == pytest.approx([2 * MODEL.fixed_s + 0.1 + 4 * 0.1])


def test_base_and_activated_loras_find_each_others_kv_and_a_plain_lora_does_not():
    asks = replayed(pipeline(), replica_of())
    assert cached(asks) == [0, 28, 28, 0, 28]


def test_a_hint_for_an_activated_lora_names_the_bases_kv():
    replica = replica_of(sized(device=20))
    replay = Hinted(replica, pipeline(), [sound], ahead_s=0.5)
    replay.run()
    assert cached(replay.asks) == [0, 28, 28, 0, 28]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cache_is_sound_after_every_event_of_activated_pipelines(policy: str):
    trace = play(SOURCES["W6a"](None), LOAD)
    replica = replica_of(sized(device=140, host=300), policy)
    asks = replayed(trace, replica)
    assert len(asks) == len(trace.turns) and all(ask.usage is not None for ask in asks)
    found = state(replica.manager, 1)
    assert (found.kv_base_hit_tokens > 0) == (policy != "slora")  # which keeps no KV of finished requests


def test_activated_pipelines_are_the_plain_ones_and_find_what_one_kv_for_all_would():
    plain, activated = (play(SOURCES[name](None), LOAD) for name in ("W6", "W6a"))
    assert [replace(turn, acts_from=None) for turn in activated.turns] == list(plain.turns)
    assert {turn.aside for turn in activated.turns if turn.acts_from is not None} == {True}
    before, after = (facts(trace, BLOCK, SPEC.adapters) for trace in (plain, activated))
    assert before.bound + 0.03 < after.bound == pytest.approx(after.bound_shared, abs=0.03)
    assert after.kv_blocks < before.kv_blocks
    roomy = sized(device=3000, host=3000)
    hits = [sum(cached(replayed(trace, replica_of(roomy), checked=False))) for trace in (plain, activated)]
    assert hits[1] > 1.05 * hits[0]


def test_who_knows_the_future_knows_suffixes_and_whose_kv_comes_before():
    turns = (
        Turn(0.0, 1, 0, (*TALK, 90, 91, 92), 1, 0, acts_from=21),
        Turn(5.0, 2, 0, (*TALK, 80), 1, 1, acts_from=21),
        Turn(7.0, 3, 0, (*TALK, 90, 91, 92), 1, 0, acts_from=20),  # invoked elsewhere: another suffix
        Turn(9.0, 4, 0, (*TALK, 90, 91, 92, 93), 1, 0, acts_from=21),
    )
    trace = Trace("checks", turns, ("a0", "a1"))
    replica = Replica(sized(64), Clairvoyant(Meter(SPEC.link.block_s), foresee(trace, BLOCK)))
    replay = Replay(replica, trace)
    replay.until(1.0)
    path = replica.manager.tree.match(Origin(replica.manager.adapters[1], "", 21), [*TALK, 90, 91, 92], 24)
    assert [node.count - START_S for node in path] == pytest.approx([5.0] * 5 + [9.0])
    replay.until(8.0)
    assert [node.count - START_S for node in path] == pytest.approx([9.0] * 6)
    replay.run()
    assert cached(replay.asks) == [0, 20, 20, 24]


def test_a_foreseeing_policy_plays_activated_pipelines():
    trace, spec = play(SOURCES["W6a"](None), LOAD), sized(device=140, host=300)
    foreseen = Clairvoyant(Meter(SPEC.link.block_s), foresee(trace, BLOCK))
    policies = {"lru": policy_of("lru", spec), "clairvoyant": foreseen}
    hits = {name: sum(cached(replayed(trace, Replica(spec, made), False))) for name, made in policies.items()}
    assert hits["clairvoyant"] > 0.9 * hits["lru"] > 0


def test_a_trace_made_shorter_keeps_its_invocations_inside_of_what_is_added():
    turns = (Turn(0.0, 1, 0, TALK, 9, 0, acts_from=19), Turn(1.0, 2, 0, TALK, 9, 0))
    short = shrunk(Trace("t", turns, ("a",)), 4).turns
    assert [(len(turn.adds), turn.acts_from) for turn in short] == [(5, 4), (5, None)]


def test_a_traces_name_knows_whether_its_loras_are_activated():
    plain = Trace("t", (Turn(0.0, 1, 0, TALK, 9, 0),), ("a",))
    others = [replace(plain, turns=(replace(plain.turns[0], acts_from=at),)) for at in (0, 1, 20)]
    assert len({plain.digest(), *(other.digest() for other in others)}) == 4
