"""A small replica and small traces to simulate with: a step and a copy take round numbers of seconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from jlora.cache import inspect
from jlora.cache.catalog import make_policy
from jlora.cache.manager import Sizes
from jlora.cache.policies import Policy
from jlora.cache.transfer import Meter
from jlora.config import CacheConfig, EngineConfig
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.link import LinkSpec
from jlora.sim.replica import Replica, ReplicaSpec, request_for
from jlora.sim.trace import Trace, Turn
from jlora.sim.uplink import Arrival
from jlora.step_model import StepModel
from jlora.types import Request, SamplingParams

BLOCK = 4
# 10 ms a step and 1 ms a prompt token; everything else is free unless a test says so.
MODEL = StepModel(0.01, 0.0, 0.001, 0.0, 0.0, 0.0, 0.0, 0.0)
LINK = LinkSpec(block_s=0.002, latency_s=0.0, groups=4)
ENGINE = EngineConfig(max_seqs=8, max_step_tokens=64, max_queue=1 << 20)
SPEC = ReplicaSpec(MODEL, LINK, Sizes(64, 256, BLOCK), (2, 4, 2), CacheConfig(), ENGINE)
NPU = Hardware(CHIPS["npu"], 1, MODELS["llama-2-7b"])


def sized(device: int, host: int = 256) -> ReplicaSpec:
    """`SPEC` with other tiers."""
    return replace(SPEC, sizes=Sizes(device, host, BLOCK))


def policy_of(name: str, spec: ReplicaSpec) -> Policy:
    return make_policy(replace(spec.cache, policy=name), Meter(spec.link.block_s))


def takes(seconds: float) -> Callable[[int, float], Arrival]:
    """A way to a replica on which every adapter takes as long."""
    return lambda adapter, now: Arrival(now + seconds)


def replica_of(spec: ReplicaSpec = SPEC, policy: str = "jlora") -> Replica:
    return Replica(spec, policy_of(policy, spec))


def sound(replica: Replica) -> None:
    """An observer that checks every invariant of the cache."""
    inspect.check_integrity(replica.manager)


def request(
    name: str, length: int, output: int, seed: int = 1, adapter: int | None = None, activation: int | None = None
) -> Request:
    prompt = tuple(range(1000 * seed, 1000 * seed + length))
    sampling = SamplingParams(max_tokens=output, ignore_eos=True, seed=seed)
    return request_for(name, prompt, adapter, activation, sampling=sampling)


def chats(sessions: int, turns: int, adapters: int = 3, seed: int = 0, rate: float = 4.0) -> Trace:
    """Sessions of several turns on random adapters, a third of them begun before time 0."""
    rng = random.Random(seed)
    made = []
    for session in range(sessions):
        at = (session - sessions / 3) / rate
        adapter = rng.choice([None, *range(adapters)])
        for turn in range(turns):
            adds = tuple(rng.randrange(3, 30000) for _ in range(rng.randint(2, 40)))
            made.append(Turn(at, session, turn, adds, rng.randint(1, 12), adapter))
            at += rng.expovariate(1.0)
    return Trace("chats", tuple(sorted(made, key=lambda t: (t.at, t.session))), tuple(f"a{i}" for i in range(adapters)))
