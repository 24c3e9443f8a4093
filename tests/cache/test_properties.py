"""Whatever happens, in whatever order: the books balance, what is read is right, nobody waits forever.

The same operations twice: long runs of a seeded driver, and hypothesis, which looks for a short
sequence that breaks something. What is checked after every operation is in `_world`.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.cache._world import ACTIONS, POLICIES, UNBOUND, World, drive

SEEDS, OPERATIONS = 6, 700  # with nine policies: 37,800 operations
HYPOTHESIS = 20_000  # at least, over all policies


# Where time is short, the default and what FASTLIBRA published stand for the other policies.
BRIEF = ("jlora", "fastlibra")
EACH = [pytest.param(policy, marks=[] if policy in BRIEF else pytest.mark.slow) for policy in POLICIES]


@pytest.mark.parametrize("policy", EACH)
def test_long_random_runs_keep_every_invariant_and_end_at_rest(policy: str):
    worlds = [drive(policy, seed, OPERATIONS) for seed in range(SEEDS)]
    assert sum(world.operations for world in worlds) == SEEDS * OPERATIONS
    assert all(world.finished > 10 for world in worlds)
    # The runs are no idle talk: history is found in both tiers, copies go both ways, room is made.
    totals = [world.manager.counters for world in worlds]
    assert sum(c.adapter_hits for c in totals) and sum(c.blocks_in for c in totals)
    if policy != "slora":
        assert sum(c.kv_hit_tokens for c in totals) > sum(c.kv_host_hit_tokens for c in totals) > 0
        assert sum(c.blocks_out for c in totals) and sum(c.blocks_lost for c in totals)
    assert sum(c.clean_evictions for c in totals) and sum(c.streamed for c in totals)
    if policy != "slora":  # the base and activated LoRAs went through the same blocks at the same time
        assert sum(world.shared for world in worlds) > 0
    assert sum(world.ahead for world in worlds) > 0  # and some ran before their adapter had come
    assert sum(world.tight for world in worlds) > 0  # with too little memory on the host at times


@pytest.mark.parametrize("policy", POLICIES)
def test_invalid_kv_is_seen_where_dependencies_are_not_kept_and_nowhere_else(policy: str):
    worst = max(drive(policy, seed, 300).invalid for seed in range(10, 14))
    assert (worst > 0) == (policy in UNBOUND)


class Machine(RuleBasedStateMachine):
    """Hypothesis draws the operations of `_world`; `counts` gets how many each sequence had."""

    def __init__(self, policy: str, counts: list[int]) -> None:
        super().__init__()
        self.world = World(policy, device_blocks=20, host_blocks=20, streams=True)
        self._counts = counts

    @rule(action=st.sampled_from(list(ACTIONS)), numbers=st.tuples(*[st.integers(0, 99)] * 3))
    def act(self, action: str, numbers: tuple[int, ...]) -> None:
        self.world.do(action, numbers)

    def teardown(self) -> None:
        self._counts.append(self.world.operations)
        self.world.close()


@pytest.mark.parametrize("policy", EACH)
def test_hypothesis_finds_no_sequence_that_breaks_it(policy: str):
    counts: list[int] = []
    sequences = settings(
        max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Machine(policy, counts), settings=sequences)
    assert sum(counts) * len(POLICIES) >= HYPOTHESIS
