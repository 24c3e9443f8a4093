"""A tenant beside one that asks ten times as much: it waits hardly longer than beside an equal."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import pytest

from jlora.cache.catalog import make_policy
from jlora.cache.transfer import Meter
from jlora.config import EngineConfig
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.replay import Replay
from jlora.sim.replica import Replica
from jlora.sim.scenario import Scenario, Work, replica_spec
from jlora.sim.trace import Trace, Turn

RATE = 8.0  # requests per second of one tenant: a quarter of what 32 slots serve
H200 = Hardware(CHIPS["h200"], 1, MODELS["llama-3-8b"])


@dataclass(frozen=True)
class Played:
    """What the first tenant waited for its first tokens, and tokens per second of all."""

    mean: float
    p99: float
    tokens: float


def asked(rate: float, seconds: float, number: int, tenant: str) -> list[Turn]:
    """Poisson arrivals of single questions: 370 tokens and 200 of answer on average."""
    rng = np.random.default_rng((1, number))
    times = np.cumsum(rng.exponential(1 / rate, int(2 * rate * seconds)))
    return [
        Turn(
            float(at), 10**5 * number + index, 0,
            tuple(rng.integers(3, 30000, int(np.clip(rng.lognormal(5.5, 0.9), 8, 2000))).tolist()),
            int(np.clip(rng.lognormal(5.0, 0.8), 4, 800)), number, tenant,
        )
        for index, at in enumerate(times[times < seconds])
    ]  # fmt: skip


def play(rates: tuple[float, float], names: tuple[str, str], seconds: float) -> Played:
    turns = [turn for number in (0, 1) for turn in asked(rates[number], seconds, number, names[number])]
    trace = Trace("tenants", tuple(sorted(turns, key=lambda turn: turn.at)), ("a", "b"))
    engine = EngineConfig(max_seqs=32, max_step_tokens=1024, max_queue=1 << 20)
    scenario = Scenario(H200, engine=engine)
    spec = replica_spec(scenario, Work.of(trace, [32, 32], H200), "jlora")
    replica = Replica(spec, make_policy(spec.cache, Meter(spec.link.block_s)))
    replay = Replay(replica, trace)
    replay.until(seconds)
    waited = [
        min(ask.first, seconds) - ask.sent for ask in replay.asks if ask.turn.adapter == 0 and ask.sent > seconds / 4
    ]
    tokens = replica.engine.stats().generated_tokens / seconds
    return Played(statistics.fmean(waited), float(np.percentile(waited, 99)), tokens)


@pytest.mark.parametrize("seconds", [10.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_tenant_that_asks_ten_times_as_much_slows_the_other_by_less_than_a_third(seconds: float):
    equal = play((RATE, RATE), ("a", "b"), seconds)
    beside = play((RATE, 10 * RATE), ("a", "b"), seconds)
    first_come = play((RATE, 10 * RATE), ("", ""), seconds)  # one tenant: the order of arrival
    print(f"{equal}\n{beside}\n{first_come}")
    assert beside.mean <= 1.3 * equal.mean
    assert seconds < 60 or beside.p99 <= 1.3 * equal.p99, "a short run has too few requests for a 99th percentile"
    assert first_come.mean > 50 * equal.mean, "the load is too light to show anything"
    assert beside.tokens >= 0.97 * first_come.tokens
