"""R1 and R1b: jlora against transformers + PEFT on the CPU, same weights, prompts and threads.

The peer lives in another interpreter (`hf_process.py`), so that each side has the Python and the
packages that suit it; only one of them works at a time. For R1 the peer gets its best static
batches: a probe of every batch size and cache, then the fastest by extrapolation. Requests go
into batches in order of prompt length, which a server knows. Ordered by output length, which
only a clairvoyant knows, it is measured once beside the rounds and reported too.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.jobs import Job, Workload
from benchmarks.peers.ours import Run
from benchmarks.runner import Options
from jlora import machine

BATCHES = (8, 16, 32, 64, 128)
PROBE_STEPS = 8
# Two greedy choices closer than this (natural log) may differ by rounding alone.
TIE = 1e-3

# Prompt, adapter, two tokens -> how far apart the peer rates them.
Gap = Callable[[Sequence[int], str | None, int, int], float]


class Peer:
    """The other process; every call blocks until it has answered."""

    def __init__(self, options: Options, workload: Workload):
        script = Path(__file__).with_name("hf_process.py")
        self._process = subprocess.Popen(
            [options.peer_python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        directory = str(workload.directory.resolve())
        loaded = self.ask("load", directory=directory, dtype=options.dtype, threads=machine.threads())
        self.versions: dict[str, str] = loaded["versions"]

    def __enter__(self) -> Peer:
        return self

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """One command of `hf_process.py`.

        Raises:
            RuntimeError: the peer ended; its reason is on standard error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise RuntimeError(f"the peer ended with code {self._process.wait()} before {op!r}") from e
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with code {self._process.wait()} during {op!r}")
        return json.loads(line)

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def gap(self, prompt: Sequence[int], adapter: str | None, a: int, b: int) -> float:
        """How far apart it rates two tokens after a prompt (natural log)."""
        return self.ask("gap", prompt=list(prompt), adapter=adapter, a=a, b=b)["gap"]


@dataclass(frozen=True, slots=True)
class Batching:
    """How the peer runs the workload; `estimate_s` is what the probe says it will take."""

    batch: int
    cache: str
    order: str
    estimate_s: float


def search(peer: Peer, jobs: Sequence[Job]) -> dict[str, Batching]:
    """The peer's best batching by order ("prompt", "output")."""
    sizes = [b for b in BATCHES if b <= len(jobs)] or [len(jobs)]
    middle = sizes[len(sizes) // 2]
    probes: list[dict[str, Any]] = []

    def probe(batch: int, cache: str) -> dict[str, Any]:
        seen = {"batch": batch, "cache": cache, **peer.ask("probe", batch=batch, cache=cache, steps=PROBE_STEPS)}
        probes.append(seen)
        return seen

    with tqdm(total=len(sizes) + 2, desc="PEFT batch sizes", unit="probe") as bar:
        probe(min(sizes), "dynamic")  # warms the peer up; measured again below
        bar.update()
        caches = {cache: probe(middle, cache)["step_s"] for cache in ("dynamic", "static")}
        bar.update(2)
        cache = min(caches, key=lambda name: caches[name])
        for batch in sizes:
            if batch != middle:
                probe(batch, cache)
                bar.update()
    usable = {p["batch"]: p for p in probes[1:] if p["cache"] == cache}
    return {order: _best(usable, cache, order, jobs) for order in ("prompt", "output")}


def _best(probes: Mapping[int, Mapping[str, Any]], cache: str, order: str, jobs: Sequence[Job]) -> Batching:
    choices = [Batching(b, cache, order, estimate(p, b, order, jobs)) for b, p in probes.items()]
    return min(choices, key=lambda c: c.estimate_s)


def estimate(probe: Mapping[str, Any], batch: int, order: str, jobs: Sequence[Job]) -> float:
    """Seconds of the whole workload: padded prompts by the probe's rate, then every step."""
    jobs = sorted(jobs, key=lambda j: len(j.prompt) if order == "prompt" else j.max_tokens)
    total = 0.0
    for i in range(0, len(jobs), batch):
        part = jobs[i : i + batch]
        share = len(part) / batch
        longest = max(len(j.prompt) for j in part)
        total += probe["prefill_s"] * share * longest / probe["longest"]
        total += probe["step_s"] * (max(j.max_tokens for j in part) - 1)
    return total


def compare(gap: Gap, jobs: Sequence[Job], ours: Run, theirs: Mapping[str, list[int]]) -> dict[str, Any]:
    """How many requests have equal greedy tokens, and whether the first difference is a tie.

    A difference counts as a tie when the peer itself rates both tokens within `TIE`: `gap` asks it.
    """
    equal, ties, wrong, gaps = 0, 0, 0, []
    for job in jobs:
        a, b = ours.tokens[job.id], theirs[str(job.id)]
        if a == b:
            equal += 1
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if at == min(len(a), len(b)):
            wrong += 1  # different lengths: one of the two stopped early
            continue
        gaps.append(gap([*job.prompt, *a[:at]], job.adapter, a[at], b[at]))
        ties, wrong = (ties + 1, wrong) if gaps[-1] <= TIE else (ties, wrong + 1)
    return {
        "requests": len(jobs),
        "equal": equal,
        "ties": ties,
        "different": wrong,
        "largest_gap": max(gaps, default=0.0),
    }
