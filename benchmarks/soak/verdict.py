"""What a soak must show, judged from its samples. Pure: a test judges recorded series."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PARTS = 6  # of the time after the warm-up: the last is compared with the first
WARM = 1 / 6  # of the whole time is warm-up: pools, caches and tiers fill


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process: seconds since the load began, MiB of resident memory, threads, open descriptors.

    `anon_mib` is the part that the process wrote itself. The rest are pages of files: code that ran for the first
    time, or that the kernel took back.
    """

    at_s: float
    process: str
    rss_mib: float
    anon_mib: float
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may show at most.

    Attributes:
        rss_mib_per_h: slope of a line through the memory after the warm-up.
        threads, descriptors: by how many the last part's median may exceed the first's. gRPC's own pool of threads
            follows the load, and clients open and close connections.
        ttft_ratio: the last part's time to the first token (p99) over the first's.
    """

    rss_mib_per_h: float = 5.0
    threads: int = 2
    descriptors: int = 8
    ttft_ratio: float = 1.1


# A run of seconds sees a gross leak only, and too few first tokens for a p99.
QUICK = Limits(rss_mib_per_h=4 * 3600.0, threads=8, descriptors=64, ttft_ratio=math.inf)


@dataclass(frozen=True, slots=True)
class Run:
    """What a soak has seen.

    Attributes:
        seconds: of load, the warm-up included.
        ttft: (seconds since the load began, seconds to the first token) of each stream.
        counts: what must be 0, by name: wrong answers, unexpected errors, compilations and so on.
    """

    seconds: float
    samples: Sequence[Sample]
    ttft: Sequence[tuple[float, float]]
    counts: Mapping[str, int]

    def part(self, number: int) -> tuple[float, float]:
        """The times at which a part of the run begins and ends; -1 is the last part."""
        length = self.seconds * (1 - WARM) / PARTS
        begin = self.seconds * WARM + (number % PARTS) * length
        return begin, begin + length


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a verdict."""

    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """False also for a value that could not be found (NaN)."""
        return self.value <= self.limit


def judge(run: Run, limits: Limits) -> list[Finding]:
    """Every line of the verdict; the run has passed if all hold."""
    found = []
    for process in dict.fromkeys(sample.process for sample in run.samples):
        seen = [sample for sample in run.samples if sample.process == process]
        found.append(Finding(f"{process}: memory, MiB per hour", slope(run, seen) * 3600, limits.rss_mib_per_h))
        for what, most in (("threads", limits.threads), ("descriptors", limits.descriptors)):
            first, last = (_usual(seen, what, run.part(number)) for number in (0, -1))
            found.append(Finding(f"{process}: more {what} at the end", last - first, most))
    first, last = (ttft(run, number, 99) for number in (0, -1))
    ratio = last / first if first else math.nan
    found.append(
        Finding("TTFT p99, last part over first", 0.0 if limits.ttft_ratio == math.inf else ratio, limits.ttft_ratio)
    )
    return found + [Finding(what, count, 0) for what, count in run.counts.items()]


def slope(run: Run, seen: Sequence[Sample]) -> float:
    """MiB per second of the line through the memory after the warm-up; NaN for fewer than two samples."""
    later = [sample for sample in seen if sample.at_s >= run.part(0)[0]]
    if len(later) < 2:
        return math.nan
    return float(np.polyfit([sample.at_s for sample in later], [sample.rss_mib for sample in later], 1)[0])


def ttft(run: Run, number: int, percentile: float) -> float:
    """Seconds to the first token in a part of the run, by when a stream began; NaN if none did."""
    begin, end = run.part(number)
    values = [seconds for at, seconds in run.ttft if begin <= at < end]
    return float(np.percentile(values, percentile)) if values else math.nan


def _usual(seen: Sequence[Sample], what: str, part: tuple[float, float]) -> float:
    values = [getattr(sample, what) for sample in seen if part[0] <= sample.at_s < part[1]]
    return statistics.median(values) if values else math.nan
