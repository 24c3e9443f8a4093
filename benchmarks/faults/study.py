"""Ten of the faults F1 to F19 of docs/reliability.md, on real processes, and what came of them.

`--only F8 F13` runs some. A server of a tiny Llama on the CPU takes damaged adapters, cancels, deadlines, bursts and
ids; servers and a cluster over a paced device take signals. The other faults are tests: the page has all.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from benchmarks.faults import adapters, requests, signals
from benchmarks.faults.client import Client, Figures
from benchmarks.runner import Options
from jlora.errors import ConfigError
from jlora.loadgen.checkpoints import TINY, write_adapter, write_model
from jlora.loadgen.server import ServerProcess, flags_of

SPEC = dataclasses.replace(TINY, max_len=1024)
RANKS = (1, 2, 4, 8, 16)
SETTINGS = {
    "engine.max_seqs": 64, "engine.max_step_tokens": 256, "engine.layers": "scan", "cache.block_tokens": 16,
    "cache.hbm_blocks": 4000, "cache.host_blocks": 1200, "model.max_model_len": SPEC.max_len, "adapters.lazy": True,
    "serve.log_level": "warning", "model.name": SPEC.name,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """How often each fault is injected."""

    flips: int = 1000  # F3, beside 64 truncations
    races: int = 500  # F5
    cancels: int = 10_000  # F8
    deadlines: int = 5_000  # F10
    burst: int = 10_000  # F11: as many once more while the queue is full
    ids: int = 10_000  # F13
    drains: int = 50  # F14
    cold: int = 2000  # F19
    kills: int = 20  # F1
    routers: int = 20  # F2


FULL, QUICK = Counts(), Counts(30, 8, 64, 64, 200, 40, 4, 32, 2, 2)


def run(options: Options) -> None:
    """Raises RuntimeError if a promise did not hold."""
    counts = QUICK if options.quick else FULL
    wanted = options.only or tuple(_ON_A_SERVER) + tuple(signals.FAULTS)
    if unknown := set(wanted) - set(_ON_A_SERVER) - set(signals.FAULTS):
        raise ConfigError(
            f"--only {' '.join(sorted(unknown))}: must be of {', '.join((*_ON_A_SERVER, *signals.FAULTS))}"
        )
    records = options.records("faults-real", {"faults": wanted, "counts": dataclasses.asdict(counts)})
    broken = []

    def keep(name: str, figures: Figures) -> None:
        number = sum(line["cell"] == name for line in records.lines)
        records.add(name, "holds" if figures["holds"] else "FAILS", number, figures)
        print(name, figures)
        broken.extend([] if figures["holds"] else [name])

    if at_server := [name for name in wanted if name in _ON_A_SERVER]:
        _at_a_server(options, counts, at_server, keep)
    for name in (name for name in wanted if name in signals.FAULTS):
        keep(name, asyncio.run(signals.FAULTS[name](counts)))
    if broken:
        raise RuntimeError(f"did not hold: {', '.join(broken)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A running server for the faults of requests and adapters."""

    client: Client
    counts: Counts
    folder: Path
    pid: int
    room: int

    @property
    def versions(self) -> tuple[Path, Path]:
        """Two adapters of one rank."""
        return self.folder / "library" / _name(2), self.folder / "library" / _name(2 + len(RANKS))


_ON_A_SERVER: Mapping[str, Callable[[Stage], Coroutine[Any, Any, Figures]]] = {
    "F3": lambda s: adapters.damaged(s.client, s.folder, s.versions, s.counts.flips),
    "F5": lambda s: adapters.raced(s.client, s.versions, s.counts.races),
    "F8": lambda s: requests.cancels(s.client, s.counts.cancels),
    "F10": lambda s: requests.deadlines(s.client, s.counts.deadlines),
    "F11": lambda s: requests.burst(s.client, s.counts.burst, s.room, s.pid),
    "F13": lambda s: requests.ids(s.client, s.counts.ids),
    "F19": lambda s: adapters.cold(s.client, [_name(i) for i in range(s.counts.cold)]),
}

KNOWN = (*_ON_A_SERVER, *signals.FAULTS)


def _at_a_server(options: Options, counts: Counts, names: list[str], keep: Callable[[str, Figures], None]) -> None:
    folder = options.folder("faults")
    write_model(folder / "model", SPEC, 0)
    for i in range(counts.cold):
        write_adapter(folder / "library" / _name(i), SPEC, RANKS[i % len(RANKS)], i)
    settings: dict[str, Any] = {**SETTINGS, "engine.max_queue": counts.burst // 2 if options.quick else counts.burst}
    settings |= {"adapters.dir": folder / "library", "adapters.roots": folder.resolve(), **options.settings}
    room = int(settings["engine.max_queue"]) + int(settings["engine.max_seqs"])

    async def play(process: ServerProcess) -> None:
        client = Client(process.address)
        while (await client.info()).programs_left:
            await asyncio.sleep(0.2)
        for name in names:
            keep(name, await _ON_A_SERVER[name](Stage(client, counts, folder, process.pid, room)))
        await client.channel.close()

    with ServerProcess(["--model", str(folder / "model"), *flags_of({}, settings)]) as process:
        asyncio.run(play(process))


def _name(i: int) -> str:
    return f"a{i:05}"
