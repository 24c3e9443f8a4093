"""Whether an attacker can tell by time which prompts others have asked (C19 of docs/security.md).

A server of the product answers with two keys. For each pair of new prompts, a victim asks one of them. Then the
attacker asks both, in random order, and times the first token. `told_apart` is the share of (asked, unasked) pairs in
which the asked prompt came sooner: 0.5 is a blind guess. With the victim's own key it must be high, or the study would
see nothing; with another tenant's key the goal is 0.45 to 0.55.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.clients import connection
from benchmarks.runner import Options
from jlora.loadgen.checkpoints import TINY, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.loadgen.server import ServerProcess, exactly, flags_of
from jlora.serve.access import keys
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

PAIRS, QUICK = 1000, 12
PROMPT = 512  # tokens: four steps
ANSWER_S = 60.0  # a guard against hanging
SPEC = dataclasses.replace(TINY, max_len=1024)
SETTINGS = {
    "engine.max_seqs": 4, "engine.max_step_tokens": 128, "engine.layers": "scan", "cache.block_tokens": 16,
    "cache.hbm_blocks": 2000, "serve.log_level": "warning", "model.name": SPEC.name,
}  # fmt: skip

Login = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Heard:
    """Seconds until the first token, and prompt tokens that the server says it had."""

    seconds: float
    cached: int


def told_apart(asked: Sequence[float], unasked: Sequence[float]) -> float:
    """The share of all pairs (one of `asked`, one of `unasked`) in which the asked one is less; an equal pair is half.

    The area under the curve of whoever takes what is less for asked: 0.5 is a blind guess, 1 is certainty.
    """
    first, second = np.asarray(asked)[:, None], np.asarray(unasked)[None, :]
    return float(((first < second) + 0.5 * (first == second)).mean())


def run(options: Options) -> None:
    """Plays both attackers, at one server."""
    pairs = QUICK if options.quick else PAIRS
    folder = options.folder("prefix-timing")
    write_model(folder / "model", SPEC, 0)
    made = [keys.new(tenant, "user", ["*"]) for tenant in ("victim", "another")]
    (folder / "keys.toml").write_text("\n".join(entry for _, entry in made))
    victim, another = ((("authorization", f"Bearer {key}"),) for key, _ in made)
    records = options.records("prefix-timing-python", {"pairs": pairs, "prompt": PROMPT})
    flags = ["--model", str(folder / "model"), "--keys", str(folder / "keys.toml")]
    with ServerProcess([*flags, *flags_of({}, {**SETTINGS, **options.settings})]) as server:
        attackers = {"the same tenant": victim, "another tenant": another}
        sides = [
            Side(name, lambda login=login: asyncio.run(_attack(server.address, victim, login, pairs)))
            for name, login in attackers.items()
        ]
        records.measure("attacks", sides, options.budget(1, quick=1))


async def _attack(address: str, victim: Login, attacker: Login, pairs: int) -> Sample:
    rng = random.Random(time.time_ns())  # no prompt comes twice, in no round
    asked, unasked = list[Heard](), list[Heard]()
    async with connection(address) as channel:
        stub, control = rpc.InferenceStub(channel), rpc.ControlStub(channel)
        while (await control.GetServerInfo(pb.GetServerInfoRequest(), metadata=victim)).programs_left:
            await asyncio.sleep(0.5)
        for _ in range(pairs):
            known, fresh = ([rng.randrange(3, SPEC.vocab) for _ in range(PROMPT)] for _ in range(2))
            await _ask(stub, known, victim)
            for prompt in rng.sample([known, fresh], 2):
                heard = await _ask(stub, prompt, attacker)
                (asked if prompt is known else unasked).append(heard)
    return {
        "auc_ttft": told_apart([one.seconds for one in asked], [one.seconds for one in unasked]),
        "auc_cached": told_apart([-one.cached for one in asked], [-one.cached for one in unasked]),
        "asked_p50_s": statistics.median(one.seconds for one in asked),
        "unasked_p50_s": statistics.median(one.seconds for one in unasked),
    }


async def _ask(stub: rpc.InferenceStub, prompt: Sequence[int], login: Login) -> Heard:
    began = time.perf_counter()
    reply: pb.GenerateResponse = await stub.Generate(exactly(1, prompt), metadata=login, timeout=ANSWER_S)
    return Heard(time.perf_counter() - began, reply.usage.cached_tokens)
