"""Eleven of the faults F1 to F19 of docs/reliability.md, on real processes, and what came of them.

`--only F8 F13` runs some. A server of a tiny Llama on the CPU takes damaged adapters, cancels, deadlines, bursts and
ids; another one, whose device holds few adapters, takes requests for a few more. Servers and a cluster over a paced
device take signals and clients that read slowly. The other faults are tests: the page has all.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from benchmarks.faults import adapters, readers, requests, routers, signals
from benchmarks.faults.client import Client, Figures
from benchmarks.runner import Options
from jlora.errors import ConfigError
from jlora.loadgen.checkpoints import TINY, write_adapter, write_model
from jlora.loadgen.server import ServerProcess, flags_of

SPEC = dataclasses.replace(TINY, max_len=1024)
RANKS = (1, 2, 4, 8, 16)
FEW, FEW_BLOCKS = 10, 36  # adapters that requests flip between, and the device's blocks: the adapters alone take 48
SETTINGS = {
    "engine.max_seqs": 64, "engine.max_step_tokens": 256, "engine.layers": "scan", "cache.block_tokens": 16,
    "cache.hbm_blocks": 4000, "cache.host_blocks": 1200, "model.max_model_len": SPEC.max_len, "adapters.lazy": True,
    "serve.log_level": "warning", "model.name": SPEC.name,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """How often each fault is injected."""

    bits: int = 1000  # F3, beside 64 truncations
    races: int = 500  # F5
    cancels: int = 10_000  # F8
    deadlines: int = 5_000  # F10
    burst: int = 10_000  # F11: as many once more while the queue is full
    ids: int = 10_000  # F13
    drains: int = 50  # F14
    cold: int = 2000  # F19
    kills: int = 20  # F1
    routers: int = 20  # F2
    flips: int = 2000  # F19-flips
    readers: readers.Plan = readers.FULL  # F9


FULL, QUICK = Counts(), Counts(30, 8, 64, 64, 200, 40, 4, 32, 2, 2, 64, readers.QUICK)


def run(options: Options) -> None:
    """Raises RuntimeError if a promise did not hold."""
    counts = QUICK if options.quick else FULL
    wanted = options.only or KNOWN
    if unknown := set(wanted) - set(KNOWN):
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: must be of {', '.join(KNOWN)}")
    records = options.records("faults-real", {"faults": wanted, "counts": dataclasses.asdict(counts)})
    broken = []

    def keep(name: str, figures: Figures) -> None:
        number = sum(line["cell"] == name for line in records.lines)
        records.add(name, "holds" if figures["holds"] else "FAILS", number, figures)
        print(name, figures)
        broken.extend([] if figures["holds"] else [name])

    if at_server := [name for name in wanted if name in _ON_A_SERVER]:
        _at_a_server(options, counts, at_server, keep)
    for name in (name for name in wanted if name in _ALONE):
        keep(name, _ALONE[name](options, counts))
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
    def names(self) -> list[str]:
        """All adapters."""
        return [_name(i) for i in range(self.counts.cold)]

    @property
    def versions(self) -> tuple[Path, Path]:
        """Two adapters of one rank."""
        return self.folder / "library" / _name(2), self.folder / "library" / _name(2 + len(RANKS))


_ON_A_SERVER: Mapping[str, Callable[[Stage], Coroutine[Any, Any, Figures]]] = {
    "F3": lambda s: adapters.damaged(s.client, s.folder, s.versions, s.counts.bits),
    "F5": lambda s: adapters.raced(s.client, s.versions, s.counts.races),
    "F8": lambda s: requests.cancels(s.client, s.counts.cancels),
    "F10": lambda s: requests.deadlines(s.client, s.counts.deadlines),
    "F11": lambda s: requests.burst(s.client, s.counts.burst, requests.Full(s.room, s.pid, s.names)),
    "F13": lambda s: requests.ids(s.client, s.counts.ids),
    "F19": lambda s: adapters.storm(s.client, s.names),
}
_ALONE: Mapping[str, Callable[[Options, Counts], Figures]] = {
    "F1": lambda _, counts: asyncio.run(signals.kills(counts.kills)),
    "F2": lambda _, counts: asyncio.run(routers.kills(counts.routers)),
    "F9": lambda options, counts: readers.delays(_model(options), counts.readers),
    "F14": lambda _, counts: asyncio.run(signals.drains(counts.drains)),
    "F19-flips": lambda options, counts: _flips(options, counts.flips),
}

KNOWN = (*_ON_A_SERVER, *_ALONE)


def _at_a_server(options: Options, counts: Counts, names: list[str], keep: Callable[[str, Figures], None]) -> None:
    queue = counts.burst // 2 if options.quick else counts.burst
    settings = {**SETTINGS, "engine.max_queue": queue, **options.settings}
    room = int(settings["engine.max_queue"]) + int(settings["engine.max_seqs"])

    async def play(process: ServerProcess) -> None:
        client = await _ready(process)
        for name in names:
            stage = Stage(client, counts, options.folder("faults"), process.pid, room)
            keep(name, await _ON_A_SERVER[name](stage))
        await client.channel.close()

    with ServerProcess(_flags(options, "library", counts.cold, settings)) as process:
        asyncio.run(play(process))


def _flips(options: Options, count: int) -> Figures:
    """F19: requests go round the base and a few adapters of all ranks, of which the device holds fewer."""

    async def play(process: ServerProcess) -> Figures:
        client = await _ready(process)
        found = await adapters.storm(client, [["", *map(_name, range(FEW))][i % (FEW + 1)] for i in range(count)])
        await client.channel.close()
        return found

    with ServerProcess(_flags(options, "few", FEW, {"cache.hbm_blocks": FEW_BLOCKS, "engine.max_seqs": 8})) as process:
        return asyncio.run(play(process))


def _flags(options: Options, library: str, count: int, own: Mapping[str, Any]) -> list[str]:
    """Flags of a server with so many adapters in a folder of their own, which this writes."""
    folder = options.folder("faults")
    for i in range(count):
        write_adapter(folder / library / _name(i), SPEC, RANKS[i % len(RANKS)], i)
    paths = {"adapters.dir": folder / library, "adapters.roots": folder.resolve()}
    return ["--model", str(_model(options)), *flags_of({}, {**SETTINGS, **own, **paths, **options.settings})]


def _model(options: Options) -> Path:
    """The model's folder, which this writes."""
    path = options.folder("faults") / "model"
    write_model(path, SPEC, 0)
    return path


async def _ready(process: ServerProcess) -> Client:
    """A client of a server that has compiled all of its programs."""
    client = Client(process.address)
    while (await client.info()).programs_left:
        await asyncio.sleep(0.2)
    return client


def _name(i: int) -> str:
    return f"a{i:05}"
