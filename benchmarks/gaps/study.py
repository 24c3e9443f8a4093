"""How long anything keeps a server's streams waiting: the longest gaps of its loop, its engine, and between tokens.

One server of the product with the built-in model answers 32 streams all the time. Each attack of `attacks.py` comes
from a second process, after a pause in which the stall monitor forgets. A second server, of 125M weights, loads
adapters of 300 MB. The goal is that no gap is longer than the idle server's by more than 0.1 s.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clients import second_process
from benchmarks.gaps import files, loads
from benchmarks.gaps.attacks import ATTACKS, STALL_S, Target, play
from benchmarks.gaps.streams import Monitor, Streams, calm, during
from benchmarks.runner import Options
from jlora.demo import assets
from jlora.errors import ConfigError
from jlora.loadgen.rounds import Sample
from jlora.loadgen.server import ServerProcess, flags_of
from jlora.model.checkpoint import read_spec

SETTINGS = {
    "engine.max_seqs": 64, "engine.max_step_tokens": 128, "engine.layers": "scan", "cache.block_tokens": 16,
    "cache.hbm_blocks": 4000, "cache.host_blocks": 4000, "adapters.lazy": True, "serve.log_level": "warning",
    "serve.stall_s": STALL_S, "serve.coalesce_s": 0.02,
}  # fmt: skip
MODULE = ("benchmarks.servers", "forgetful")
TOKENS = 900  # of a stream
LOADS = "large adapters"  # at a second server


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Streams, registered adapters, entries of the longest header, the largest burst, seconds of an attack."""

    streams: int
    adapters: int
    entries: int
    burst: int
    seconds: float
    large: loads.Plan


FULL, QUICK = Plan(32, 2000, 1_000_000, 10_000, 5.0, loads.FULL), Plan(8, 40, 50_000, 200, 0.5, loads.QUICK)


def run(options: Options) -> None:
    """Plays each attack in turn, `--rounds` times."""
    plan = QUICK if options.quick else FULL
    known = (*ATTACKS, LOADS)
    if unknown := set(options.only) - set(known):
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: must be of {', '.join(known)}")
    names = options.only or known
    attacks = [name for name in names if name != LOADS]
    records = options.records("gaps-python", {"server": "this one", "plan": dataclasses.asdict(plan), "only": names})
    folder = options.folder("gaps").resolve()
    files.write_library(folder / "library", read_spec(assets.MODEL), plan.adapters)
    files.write_hostile(folder / "hostile", read_spec(assets.MODEL), plan.entries)
    loads.write(folder, plan.large)
    for number in range(options.rounds or 1):
        for name, sample in asyncio.run(_attacks(folder, plan, attacks)).items() if attacks else ():
            records.add("attacks", name, number, sample)
        if LOADS not in names:
            continue
        with ServerProcess(loads.flags(folder, plan.large), MODULE) as server:
            found = asyncio.run(loads.measure(server.address, folder, server.pid, plan.large))
        for name, sample in found.items():
            records.add("loads", name, number, sample)


async def _attacks(folder: Path, plan: Plan, names: Sequence[str]) -> dict[str, Sample]:
    found = {}
    settings = {**SETTINGS, "adapters.dir": folder / "library"}
    loop = asyncio.get_running_loop()
    with ServerProcess(["--model", str(assets.MODEL), *flags_of({}, settings)], MODULE) as server:
        target = Target(server.address, folder / "hostile", plan.adapters, plan.seconds, plan.burst)
        brief = dataclasses.replace(target, seconds=0.0)
        streams, monitor = Streams(server.address, plan.streams, TOKENS), Monitor(server.address, server.pid)
        while (await monitor.info()).programs_left:
            await asyncio.sleep(0.2)
        async with streams.running():
            for name in names:
                with second_process() as attackers:  # a new one: it brings no memory along
                    await loop.run_in_executor(attackers, play, "idle", brief)  # not counted: imports
                    await calm(streams, plan.large.pause_s)
                    attack = loop.run_in_executor(attackers, play, name, target)
                    sample = await during(streams, monitor, attack)
                    found[name] = {**sample, "answers": await attack}
        await monitor.close()
    return found
