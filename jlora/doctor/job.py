"""Everything that only an accelerator can show, in one job: `jlora doctor [--quick]`.

    rates          memory, products and the link to the host, as measured here
    kernels        every kernel against the reference
    steps          Llama-3-8B and Llama-2-7B with random weights: decode, prompts, 0 to 64 adapters (R4, R5),
                   and the simulator's step-time model fitted to them: OUT/step-MODEL.json for `jlora sim --steps`;
                   then the whole engine on the same weights: its steps beside those called alone (R5), what the
                   device waits for the host, compilations after warm-up (R10)
    policies       cache policies on a short W1, on a shallow model; compilations after warm-up (R10)
    kernel_speed   kernel, XLA and roofline floor on the large cases, and whether kernel and XLA agree
    checklist      what else to look at when the NVIDIA kernels meet a GPU

The job needs jax, numpy, flax, safetensors and msgspec (scipy comes with jax), one device, and
nothing from a disk or a network. Each part is a process of its own (`part`), so no kernel can end the
job: a part that hangs is killed and counts as failed, and the next process finds a whole device and
free memory. Parts write every row at once, and the report is on the disk after each part. The job
keeps its time limit and reserves time for every part; the report lists the parts that got none. On a
CPU everything runs in miniature, TPU kernels in the interpreter.

Exit code 1: a kernel differs from the reference, or a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jlora.doctor import fit, journal
from jlora.doctor.journal import Found
from jlora.doctor.table import table

ROOT = Path(__file__).resolve().parents[2]
ROWS = ("kernels", "kernel_speed", "checklist")  # parts that are a list of cases
POLL_S = 0.2  # seconds between two looks at a part
ENDED_S = 5.0  # for a process to end in, once it has written all or has been killed
OVERTIME = 0.3  # of a section's silence: what is under way when its time ends may end by itself
# Read by jax when a part starts. The engine's programs are the bare steps' own, found in the cache.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the job.

    Attributes:
        part: of `part`; model: of the part `steps`.
        least_s: kept for it, whatever the sections before it take; most_s: what it takes at most.
        silent_s: without a line for so long it hangs: compiling the largest thing takes less.
        restarts: how often it goes on behind a case that broke it.
    """

    part: str
    model: str = ""
    least_s: float = 0.0
    most_s: float = 60.0
    silent_s: float = 90.0
    restarts: int = 0

    @property
    def name(self) -> str:
        """In the report."""
        return self.model or self.part

    @property
    def late_s(self) -> float:
        """Seconds that it may go on after its time is over."""
        return OVERTIME * self.silent_s + ENDED_S

    @property
    def needs_s(self) -> float:
        """Seconds that must be left to begin it, its end included."""
        return self.least_s + self.late_s

    def share(self, left: float, reserved: float) -> float:
        """Seconds that it gets of `left` when later parts need `reserved`; negative: it does not begin."""
        if left < self.needs_s:
            return -1.0
        return max(self.least_s, min(self.most_s, left - self.late_s - reserved))


RATES = Section("rates", least_s=25, most_s=90, silent_s=60)


def sections(platform: str, quick: bool) -> list[Section]:
    """The parts after the rates, the most telling first. The last one may spend all the time that is left."""
    models = ("tiny128",) if platform == "cpu" else ("llama-3-8b",) if quick else ("llama-3-8b", "llama-2-7b")
    checklist = Section("checklist", least_s=10, most_s=600, silent_s=45, restarts=4)
    return [
        Section("kernels", least_s=15, most_s=75, silent_s=45, restarts=4),
        *(Section("steps", model, least_s=75, most_s=160, silent_s=100, restarts=1) for model in models),
        Section("policies", least_s=30, most_s=120, silent_s=60),
        Section("kernel_speed", least_s=15, most_s=90, silent_s=45, restarts=4),
        *([checklist] if platform == "gpu" else []),
    ]


@dataclass(slots=True)
class Job:
    """The job under way: its flags, and what has been found.

    Attributes:
        until: the time limit, on the monotonic clock.
        work: where parts write.
        program: what runs a part.
    """

    args: argparse.Namespace
    until: float
    work: Path
    program: tuple[str, ...] = (sys.executable, "-m", "jlora.doctor.part")
    started: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds until the limit."""
        return self.until - time.monotonic()

    def run(self, section: Section, behind: Sequence[Section] = ()) -> None:
        """Runs a section to its end, its time, or the last of its restarts; then the report is on the disk.

        Args:
            behind: the sections that time is kept for.
        """
        share = section.share(self.left(), sum(each.needs_s for each in behind))
        if share < 0:
            self.skipped.append(f"{section.name}: {self.left():.0f} s left, {section.needs_s:.0f} s needed")
            return
        began, until = time.monotonic(), time.monotonic() + share
        path, begun = self.work / f"{section.name}.jsonl", 0
        for _ in range(section.restarts + 1):
            reason = self._process(section, path, until)
            now = journal.read(path)
            if reason:
                self._note(section, path, reason, late=time.monotonic() > until)
            if not reason or len(now.begun) == begun or time.monotonic() > until - 5:
                break
            begun = len(now.begun)
        self._take(section, journal.read(path))
        print(f"{section.name}: {time.monotonic() - began:.0f} s, {self.left():.0f} s left", flush=True)
        self.save()

    def _process(self, section: Section, path: Path, until: float) -> str:
        """Runs one process of a part; the reason why it did not end by itself, or ""."""
        seconds = max(1.0, until - time.monotonic())
        rates = json.dumps(self.found["rates"]) if "rates" in self.found else ""
        flags = {"--to": path, "--seconds": seconds, "--kernels": self.args.kernels, "--model": section.model}
        flags |= {"--rates": rates}
        words = [f"{name}={value}" for name, value in flags.items()]
        words += ["--quick"] if self.args.quick else []
        command = [*self.program, section.part, *words]
        with (self.work / f"{section.name}.log").open("a") as log:
            process = subprocess.Popen(command, env=self._environment(), stdout=log, stderr=subprocess.STDOUT)
            try:
                return self._watch(process, section, path, until)
            finally:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: left behind
                    process.wait(ENDED_S)

    def _watch(self, process: subprocess.Popen[bytes], section: Section, path: Path, until: float) -> str:
        """Waits for a part while it writes lines and has time."""
        size, heard, silent = -1, time.monotonic(), 0.0
        while process.poll() is None:
            time.sleep(POLL_S)
            now = path.stat().st_size if path.exists() else 0
            size, heard = (now, time.monotonic()) if now != size else (size, heard)
            silent = time.monotonic() - heard
            if silent > ENDED_S and journal.read(path).ended:
                break  # all is written; what hangs is only its end
            if silent > section.silent_s or time.monotonic() > until + OVERTIME * section.silent_s:
                break
        if journal.read(path).ended:
            return ""
        code = process.poll()
        return f"was ended, {silent:.0f} s without a sign" if code is None else f"ended with exit code {code}"

    def _environment(self) -> dict[str, str]:
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.work / "cache")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**ENVIRONMENT, **cache, **os.environ, "PYTHONPATH": path}

    def _note(self, section: Section, path: Path, reason: str, late: bool) -> None:
        """Records that a part died or ran out of time. Where rows are cases, the open case becomes a row."""
        now = journal.read(path)
        log = (self.work / f"{section.name}.log").read_text(errors="replace").strip().splitlines()
        said = f": {log[-1][:300]}" if log and not late else ""
        where = now.open or f"behind {now.begun[-1] if now.begun else 'the start'}"
        (self.skipped if late else self.failed).append(f"{section.name}, {where}: {reason}{said}")
        if section.part in ROWS and now.open:
            row = {"case": now.open, "ok": None if late else False, "reason": reason}
            journal.Journal(path).row(section.part, row)

    def _take(self, section: Section, now: Found) -> None:
        """Puts what a part found into the report."""
        self.skipped += dict.fromkeys(now.skipped)  # a part that was started again says it again
        if section.part == "steps":
            self.found.setdefault("models", {})[section.name] = now.values | self._fit(section.name, now.values)
        else:
            self.found |= now.values

    def _fit(self, model: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The step-time model of the steps there are, and its file."""
        made = fit.of_report({**self.found, "date": today(), "models": {model: values}}, model)
        if made is None:
            return {}
        fit.write(made, self.args.out)
        return {"fit": made}

    def record(self) -> dict[str, Any]:
        """The report so far."""
        words = [word for word in self.args.words if "/" not in word]
        return {
            "benchmark": "doctor",
            "date": today(),
            "command": " ".join(["jlora doctor", *words]),
            "seconds": round(time.monotonic() - self.started, 1),
            **self.found,
            "skipped": self.skipped,
            "failed": self.failed,
        }

    def save(self) -> Path:
        """Writes the report; a reader never sees half of one."""
        path = self.args.out / "device.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.record(), indent=1) + "\n")
        return partial.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; 0 unless a kernel differs from the reference or a part failed."""
    args = parser().parse_args(argv)
    args.words = list(sys.argv[1:] if argv is None else argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        job = Job(args, time.monotonic() + 60 * args.minutes, Path(work))
        job.run(RATES, sections("gpu", args.quick))  # the longest list: which one it is, the rates will say
        if "rates" in job.found:
            todo = sections(job.found["device"]["platform"], args.quick)
            for at, section in enumerate(todo):
                job.run(section, todo[at + 1 :])
        path = job.save()
    record = job.record()
    print(table(record))
    print(path)
    rows = [row for name in ROWS for row in record.get(name, [])]
    return int(bool(job.failed) or any(row.get("ok") is False for row in rows))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser("jlora doctor", description=__doc__)
    made.add_argument("--quick", action="store_true", help="one model, fewer shapes, a third of the time")
    made.add_argument("--kernels", default="auto", choices=("auto", "pallas", "xla"), help="ops of the steps")
    made.add_argument("--minutes", type=float, default=7.75, help="all is over by then")
    made.add_argument("--out", type=Path, default=Path("build/doctor"), help="where results go")
    return made


def today() -> str:
    """The date, in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
