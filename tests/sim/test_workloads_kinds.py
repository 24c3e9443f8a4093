"""Each kind of traffic to many replicas is what it says."""

from __future__ import annotations

import pytest

from jlora.sim.trace import facts
from jlora.sim.workloads.kinds import KINDS

SECONDS = 20.0
FACTS = {
    name: facts(trace, 32, (1,) * len(trace.adapters))
    for name, trace in ((name, kind.trace(2, SECONDS, 1)) for name, kind in KINDS.items())
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_its_rate_and_a_seed_gives_one_trace(name: str):
    kind = KINDS[name]
    assert FACTS[name].requests == pytest.approx(2 * kind.rate * SECONDS, rel=0.6)
    digests = [kind.trace(2, SECONDS, seed).digest() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_each_differs_in_what_its_name_says():
    assert FACTS["long tail"].adapters > 2 * FACTS["Zipf"].adapters
    assert FACTS["sessions"].bound > 0.5 > 0.05 > FACTS["Zipf"].bound
    assert FACTS["bursts"].burstiness > 2 * FACTS["Zipf"].burstiness
    assert FACTS["pipelines"].bound_shared > FACTS["Zipf"].bound
    assert any(turn.acts_from is not None for turn in KINDS["pipelines"].trace(2, SECONDS, 1).turns)


def test_the_popular_adapters_of_a_shifting_skew_change():
    turns = KINDS["shifting skew"].trace(4, SECONDS, 1).turns
    tops = []
    for part in range(4):
        some = [turn.adapter for turn in turns if part * 4.0 <= turn.at < (part + 1) * 4.0]
        tops.append(max(set(some), key=some.count))
    assert len(set(tops)) > 1
