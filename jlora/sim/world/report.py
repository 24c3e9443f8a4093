"""What seeds bring, and how many of them are played: in processes, in order, with counts by site."""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from jlora.sim.world.sites import Site

# World -> module with `play(seed, steps, journal) -> Mapping[str, int]`, which raises what it finds, and `SITES`.
WORLDS: Mapping[str, str] = {"engine": "jlora.sim.world.replica", "cluster": "jlora.sim.world.cluster.world"}
CHUNK = 10  # seeds that a process takes at a time


class Journal:
    """What happened, line by line: equal for two runs of one seed. `keep`: the lines stay to be read."""

    def __init__(self, keep: bool = False):
        self.lines: list[str] = []
        self._keep = keep
        self._hash = hashlib.blake2b(digest_size=8)

    def write(self, line: str) -> None:
        """Adds a line."""
        self._hash.update(line.encode() + b"\n")
        if self._keep:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """Of all lines."""
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class Played:
    """One seed.

    Attributes:
        digest: of the journal.
        fired: site -> how often it struck.
        failure: what was found; "" if every invariant held.
    """

    seed: int
    digest: str
    fired: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""


Play = Callable[[int, int, Journal], Mapping[str, int]]


def sites_of(world: str) -> Mapping[str, Site]:
    """The sites of a world."""
    return importlib.import_module(WORLDS[world]).SITES


def play(world: str, seed: int, steps: int, keep: bool = False) -> tuple[Played, Journal]:
    """Plays one seed; whatever it raises is a find."""
    journal = Journal(keep)
    try:
        fired = importlib.import_module(WORLDS[world]).play(seed, steps, journal)
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{last.filename.rpartition('/jlora/')[2]}:{last.lineno}"
        journal.write(f"{type(e).__name__}: {e}")
        return Played(seed, journal.digest, failure=f"{type(e).__name__}: {e} ({where})"), journal
    return Played(seed, journal.digest, fired), journal


def run(world: str, seeds: Sequence[int], steps: int, processes: int = 1) -> Iterator[Played]:
    """Plays the seeds in order. One of each chunk is played twice: a second run that differs is a find, too."""
    chunks = [(world, seeds[i : i + CHUNK], steps) for i in range(0, len(seeds), CHUNK)]
    if processes == 1:
        for chunk in chunks:
            yield from _each(*chunk)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for played in pool.map(_chunk, chunks):
            yield from played


def total(played: Sequence[Played], sites: Mapping[str, Site]) -> dict[str, int]:
    """Site -> how often it struck in all these seeds."""
    counts = Counter(dict.fromkeys(sites, 0))
    for one in played:
        counts.update(one.fired)
    return dict(counts)


def _chunk(chunk: tuple[str, Sequence[int], int]) -> list[Played]:
    return list(_each(*chunk))


def _each(world: str, seeds: Sequence[int], steps: int) -> Iterator[Played]:
    for seed in seeds:
        played, _ = play(world, seed, steps)
        if seed == seeds[0] and play(world, seed, steps)[0].digest != played.digest:
            played = replace(played, failure=played.failure or "a second run of the seed went another way")
        yield played
