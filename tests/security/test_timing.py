"""C19: a client cannot tell by time what another tenant has asked, and it can tell what its own tenant has.

The engine runs on a modelled device, whose clock has no noise: what an attacker can see here is all that there is to
see. Reuse within a tenant is the control. A cache that reuses nothing would pass without it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from benchmarks.micro.prefix_timing import told_apart
from jlora.sim.replica import Replica
from jlora.types import Request
from tests.sim._sim import ENGINE, replica_of, request, sized

PROMPTS, LENGTH = 40, 192  # a prompt of three steps
VICTIM, ATTACKER = {"tenant": "red"}, {"tenant": "blue"}
SALTED, OTHERWISE = {**VICTIM, "cache_salt": "one"}, {**VICTIM, "cache_salt": "two"}
NOISE = 0.5  # told_apart of what is drawn alike
SEEN = ("steps", "seconds", "computed")
ROOMY = replace(sized(4096, 4096), engine=ENGINE)


def seen(replica: Replica, asked: Request) -> tuple[float, ...]:
    """What whoever asks alone sees of an answer's first token: `SEEN`."""
    began, steps = replica.clock.now, 0
    replica.submit(asked, began)
    while replica.busy:
        steps += 1
        for event in replica.step(math.inf):
            assert event.usage is not None and event.timing is not None
            computed = event.usage.prompt_tokens - event.usage.cached_tokens
            return steps, round(replica.clock.now - began, 9), computed
    raise AssertionError("no answer")


def attacked(victim: dict[str, str], attacker: dict[str, str], adapter: int | None = None) -> dict[str, float]:
    """How well the attacker tells which of its prompts the victim has asked, by each thing that it sees."""
    replica, rng = replica_of(ROOMY), random.Random(1)
    prompts = [request(f"p{i}", LENGTH, 1, seed=i + 1, adapter=adapter) for i in range(PROMPTS)]
    known = set(rng.sample(range(PROMPTS), PROMPTS // 2))
    for i in sorted(known):
        seen(replica, replace(prompts[i], id=f"v{i}", **victim))
    found = {i: seen(replica, replace(prompts[i], **attacker)) for i in rng.sample(range(PROMPTS), PROMPTS)}

    def by(what: int, whose: Iterable[int]) -> list[float]:
        return [found[i][what] for i in whose]

    unknown = found.keys() - known
    return {name: told_apart(by(i, known), by(i, unknown)) for i, name in enumerate(SEEN)}


@pytest.mark.parametrize("adapter", [None, 1])
@pytest.mark.parametrize(("victim", "attacker"), [(VICTIM, ATTACKER), (SALTED, OTHERWISE), (SALTED, VICTIM)])
def test_what_another_salt_has_asked_cannot_be_told(
    victim: dict[str, str], attacker: dict[str, str], adapter: int | None
):
    assert attacked(victim, attacker, adapter) == dict.fromkeys(SEEN, NOISE)


@pytest.mark.parametrize("adapter", [None, 1])
@pytest.mark.parametrize("whose", [VICTIM, SALTED])
def test_what_the_same_salt_has_asked_is_answered_sooner_each_time(whose: dict[str, str], adapter: int | None):
    assert attacked(whose, whose, adapter) == dict.fromkeys(SEEN, 1.0)


def test_a_cache_without_salts_would_be_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Request, "salt", property(lambda self: ""))
    assert attacked(VICTIM, ATTACKER) == dict.fromkeys(SEEN, 1.0)


def test_the_measure_counts_pairs():
    assert told_apart([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert told_apart([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert told_apart([1.0, 3.0], [2.0, 3.0]) == (1 + 1 + 0 + 0.5) / 4
