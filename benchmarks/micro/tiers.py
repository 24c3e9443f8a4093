"""What an adapter's tier costs: its own first token, and the tokens of the requests that run beside its load.

The engine has more adapters than the host tier has room for. The disk is the machine's own, or one of a
limited rate: reads wait until a disk of that rate would have delivered them, one reader after the other.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.micro.answers import TIMEOUT_S, Answer, ask, blocks_of
from benchmarks.records import Records
from benchmarks.runner import Options
from jlora import config as configuration
from jlora.engine.local import LocalReplica
from jlora.layout import smallest_block_tokens
from jlora.loadgen.checkpoints import ADAPTED, LLAMA_100M, TINY, write_adapter, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.model.spec import ModelSpec
from jlora.ports import DiskFiles, File, Folder, System
from jlora.types import AdapterInfo, Request, SamplingParams

TIERS = ("DISK", "HOST", "HBM")
DISKS = (0.0, 500e6, 50e6)  # bytes per second; 0: the machine's own, as fast as it is
PROMPT = 16  # tokens
SETTINGS = {"adapters.lazy": True, "engine.cold_start": "auto", "engine.max_seqs": 16, "engine.max_step_tokens": 128}


@dataclass(frozen=True, slots=True)
class Size:
    """Adapters on the disk, how many of them the host tier and the device hold, and how much is measured."""

    spec: ModelSpec
    ranks: tuple[int, ...]
    adapters: int
    host: int
    device: int
    starts: int  # of each tier, for each rank and disk
    seconds: float  # of each side of the neighbours
    rate: float  # cold requests per second
    running: int  # requests beside them


FULL = Size(LLAMA_100M, (8, 64), 60, 30, 14, 20, 20.0, 1.0, 8)
QUICK = Size(replace(TINY, max_len=2048), (4,), 24, 16, 12, 2, 0.5, 8.0, 2)


class PacedDisk(DiskFiles):
    """The machine's files at a rate that the readers share; `rate` is in bytes per second, 0 for no limit."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0
        self._free, self._lock = 0.0, threading.Lock()

    @contextmanager
    def folder(self, directory: str) -> Iterator[Folder]:
        with super().folder(directory) as folder:
            opened = folder.open

            @contextmanager
            def paced(name: str) -> Iterator[File]:
                with opened(name) as file:
                    yield _PacedFile(file, self)

            folder.open = paced  # pyright: ignore[reportAttributeAccessIssue]
            yield folder

    def wait(self, size: int) -> None:
        """Until a disk of the rate has read that much more."""
        if self.rate:
            with self._lock:
                self._free = max(self._free, time.monotonic()) + size / self.rate
                until = self._free
            time.sleep(max(0.0, until - time.monotonic()))


class _PacedFile:
    def __init__(self, file: File, disk: PacedDisk):
        self.size, self._file, self._disk = file.size, file, disk

    def read(self, size: int) -> np.ndarray:
        found = self._file.read(size)
        self._disk.wait(found.nbytes)
        return found


def run(options: Options) -> None:
    """First tokens for every rank and disk, then the neighbours of loads of the largest rank."""
    size = QUICK if options.quick else FULL
    folder = options.folder("tiers")
    write_model(folder / "model", size.spec, 0)
    facts = {"ranks": list(size.ranks), "adapters": size.adapters, "running": size.running, "rate": size.rate}
    records = options.records(f"tiers-{options.dtype}", facts)
    for rank in size.ranks:
        directory = folder / f"rank{rank}"
        for i in range(size.adapters):
            write_adapter(directory / _name(i), size.spec, rank, i)
        settings = {"model.path": str(folder / "model"), "model.name": size.spec.name, "model.dtype": options.dtype}
        settings |= {"adapters.dir": str(directory), **options.settings}
        blocks = blocks_of(size.spec, rank, ADAPTED)
        with started(size, blocks, 1, {**settings, "model.max_model_len": 4 * PROMPT}) as asking:
            for rate in DISKS:
                first_tokens(asking, records, f"rank {rank}, {disk_name(rate)}", rate, size.starts)
    with started(size, blocks, size.running, settings) as asking:
        sides = [Side("hot", partial(asking.neighbours, "HBM", 0.0, size))]
        sides += [Side(disk_name(rate), partial(asking.neighbours, "DISK", rate, size)) for rate in DISKS]
        records.measure("neighbours", sides, options.budget(7))


@contextmanager
def started(size: Size, blocks: int, requests: int, settings: dict[str, Any]) -> Iterator[Asking]:
    """A server with room for that many requests beside the adapters on the device, of so many blocks each."""
    context = settings.get("model.max_model_len", size.spec.max_len)
    room = requests * -(-context // smallest_block_tokens(size.spec, 16))
    pool = {"cache.hbm_blocks": size.device * blocks + room, "cache.host_blocks": size.host * blocks}
    disk = PacedDisk()
    replica = LocalReplica.start(configuration.load(None, {**SETTINGS, **pool, **settings}), system=System(files=disk))
    try:
        replica.warm().result(TIMEOUT_S)
        yield Asking(replica, disk, size)
    finally:
        replica.close()


def first_tokens(asking: Asking, records: Records, cell: str, rate: float, starts: int) -> None:
    """So many first tokens of each tier in turn; at a limited rate, of the disk only."""
    asking.disk.rate = rate
    for round_ in range(starts):
        for tier in TIERS if rate == DISKS[0] else TIERS[:1]:
            if not records.has(cell=cell, side=tier, round=round_):
                records.add(cell, tier, round_, asking.first_token(tier))
    asking.disk.rate = 0.0


class Asking:
    """A server whose adapters are in all tiers."""

    def __init__(self, replica: LocalReplica, disk: PacedDisk, size: Size):
        self._replica, self.disk, self._spec = replica, disk, size.spec
        self._rng = np.random.default_rng(0)
        self._count = 0
        phases = dict(replica.info.start_s)
        del phases["process"]  # it has also written the files
        self.start_s = phases
        for info in self._idle("DISK")[: 2 * size.host]:  # fills both tiers
            self._ask(info.name, 2).end()

    def first_token(self, tier: str) -> Sample:
        """Of a lone request for an adapter in that tier."""
        adapter = self._pick(tier)
        timing = self._ask(adapter.name, 2).end()
        found = {"ttft_s": timing.ttft, "cold_start_s": timing.adapter_cold_start, "kind": timing.cold_start}
        return {**found, "rank": adapter.rank}

    def neighbours(self, tier: str, rate: float, size: Size) -> Sample:
        """Seconds per token of the requests that run while others ask for adapters in that tier: all, the slowest."""
        hot = [info.name for info in self._idle("HBM")]
        running = [self._ask(name, self._spec.max_len - 2 * PROMPT) for name in (hot * size.running)[: size.running]]
        while any(len(answer.tokens) < 2 for answer in running):
            time.sleep(0.01)
        self.disk.rate = rate
        before, began, asked = [len(answer.tokens) for answer in running], time.monotonic(), []
        for i in range(int(size.seconds * size.rate)):
            asked.append(self._ask(self._pick(tier).name, 1))
            time.sleep(max(0.0, began + (i + 1) / size.rate - time.monotonic()))
        seconds = time.monotonic() - began
        tokens = [len(answer.tokens) - first for answer, first in zip(running, before, strict=True)]
        assert not any(answer.ended.is_set() for answer in running), "those beside the loads ended too soon"
        ttft_s = statistics.median(answer.end().ttft for answer in asked)
        for answer in running:
            self._replica.abort(answer.handle).result(TIMEOUT_S)
        self.disk.rate = 0.0
        tpot = {"tpot_s": seconds * len(tokens) / sum(tokens), "slowest_tpot_s": seconds / min(tokens)}
        return {**tpot, "asked": len(asked), "ttft_s": ttft_s}

    def _pick(self, tier: str) -> AdapterInfo:
        found = self._idle(tier)
        return found[self._rng.integers(len(found))]

    def _idle(self, tier: str) -> list[AdapterInfo]:
        infos = self._replica.adapters().result(TIMEOUT_S)
        found = [info for info in infos if info.tier == tier and not info.running + info.waiting]
        assert found, f"no idle adapter is in {tier}"
        return found

    def _ask(self, name: str, tokens: int) -> Answer:
        self._count += 1
        prompt = self._rng.integers(3, self._spec.vocab, PROMPT).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = Request(f"tiers-{self._count}", tuple(prompt), sampling, name, bypass_prefix_cache=True)
        return ask(self._replica, request)


def disk_name(rate: float) -> str:
    return f"{rate / 1e6:g} MB/s" if rate else "this machine's disk"


def _name(i: int) -> str:
    return f"a{i:03}"
