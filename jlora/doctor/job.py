"""Everything that only an accelerator can show, in one job: `jlora doctor [--quick]`.

    rates          memory, products and the link to the host, as measured here
    kernels        every kernel against the reference
    steps          Llama-3-8B and Llama-2-7B with random weights: decode, prompts, 0 to 64 adapters (R4, R5),
                   and the simulator's step-time model fitted to them: OUT/step-MODEL.json for `jlora sim --steps`;
                   then the whole engine on the same weights: its steps beside those dispatched alone (R5), and
                   compilations after warm-up (R10)
    kernel_speed   kernel, XLA and roofline floor on the large cases, and whether kernel and XLA agree
    checklist      further checks of the NVIDIA kernels

The job needs one device, and nothing from a disk or a network. Each part is a process of its own: one that
crashes starts again behind the case that broke it, and one that hangs is killed and counts as failed. The job
keeps its time limit and reserves time for every part; the report lists the parts that got none. On a CPU
everything runs in miniature.

OUT/parts has the journal and the log of every part, written line by line, also where the job itself is killed.

Exit code 1: a kernel differs from the reference, a part failed, or nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jlora import machine
from jlora.doctor import fit, journal, output
from jlora.doctor.fit import Rates
from jlora.doctor.journal import Order
from jlora.doctor.table import CASES, table

POLL_S = 0.2  # seconds between two looks at a part
COMPILE_S = 270.0  # without a line for so long a compiler hangs; `World.compile` gives it up before
GRACE_S = 20.0  # for a part to end what it began in time
# jax reads this when a part starts. Every program goes to the cache, where `World.compile` leaves them for the runner.
ENVIRONMENT = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the job."""

    part: str
    model: str = ""  # of the part `steps`
    kernels: str = ""  # of its steps, where the flags ask for both
    least_s: float = 0.0  # kept for it, whatever the sections before it take
    most_s: float = 60.0  # what it takes at most
    silent_s: float = 90.0  # without a line for so long it hangs, unless it compiles a step's program
    restarts: int = 0  # how often it goes on behind a case that broke it

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.model, self.kernels))) or self.part

    @property
    def needs_s(self) -> float:
        """Seconds that must be left to begin it, its end included."""
        return self.least_s + GRACE_S

    def share(self, left: float, reserved: float) -> float:
        """Seconds that it gets of `left` when later parts need `reserved`; negative: it does not begin."""
        if left < self.needs_s:
            return -1.0
        return max(self.least_s, min(self.most_s, left - GRACE_S - reserved))


RATES = Section("rates", least_s=25, most_s=90, silent_s=60)


def sections(platform: str, quick: bool, kernels: str = "auto") -> list[Section]:
    """The parts after the rates, the most telling first. The last one may spend all the time that is left."""
    models = [("llama-3-8b", ""), ("llama-2-7b", "")][: 1 if quick else 2]
    if platform == "cpu":
        models = [("tiny128", "")]
    elif kernels == "both":  # in place of a second model
        models = [("llama-3-8b", "xla"), ("llama-3-8b", "pallas")]
    checklist = Section("checklist", least_s=10, most_s=600, silent_s=45, restarts=4)
    return [
        Section("kernels", least_s=15, most_s=75, silent_s=45, restarts=4),
        *(Section("steps", *model, least_s=75, most_s=300, silent_s=100, restarts=2) for model in models),
        Section("kernel_speed", least_s=15, most_s=120, silent_s=45, restarts=4),
        *([checklist] if platform == "gpu" else []),
    ]


@dataclass(slots=True)
class Job:
    """The job under way: its flags, and what has been found."""

    args: argparse.Namespace
    until: float  # the time limit, on the monotonic clock
    work: Path  # where parts write
    program: tuple[str, ...] = (sys.executable, "-m", "jlora.doctor.part")  # runs a part
    started: float = field(default_factory=time.monotonic)
    commit: str = field(default_factory=machine.commit)
    found: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, section: Section, behind: Sequence[Section] = ()) -> None:
        """Runs a section to its end, its time, or the last of its restarts; keeps time for those `behind` it."""
        left = self.until - time.monotonic()
        share = section.share(left, sum(each.needs_s for each in behind))
        if share < 0:
            self.skipped.append(f"{section.name}: {left:.0f} s left, {section.needs_s:.0f} s needed")
            return
        until, path = time.monotonic() + share, self.work / f"{section.name}.jsonl"
        for _ in range(section.restarts + 1):
            before = len(journal.read(path).begun)
            reason, late = self._process(section, path, until)
            if reason:
                self._note(section, path, reason, late)
            if not reason or len(journal.read(path).begun) == before or time.monotonic() > until - 5:
                break
        self._take(section, path)
        print(f"{section.name}: {self.until - time.monotonic():.0f} s left", flush=True)
        self.save()

    def _process(self, section: Section, path: Path, until: float) -> tuple[str, bool]:
        """Runs one process of a part; the reason why it did not come to its end, or "", and whether it was late."""
        args, seconds = self.args, max(1.0, until - time.monotonic())
        rates = msgspec.convert(self.found.get("rates"), Rates | None)
        kernels = section.kernels or args.kernels.replace("both", "auto")
        order = Order(section.part, str(path), seconds, kernels, args.quick, section.model, rates)
        env = {**ENVIRONMENT, **machine.gpu_share(os.environ), **os.environ, "PYTHONPATH": machine.python_path()}
        path.touch()
        began = time.time()
        with (self.work / f"{section.name}.log").open("a") as log:
            command = [*self.program, json.dumps(asdict(order))]
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
            silent = most_s = 0.0
            try:
                while process.poll() is None and silent <= most_s and time.monotonic() < until + GRACE_S:
                    time.sleep(POLL_S)
                    silent = time.time() - max(path.stat().st_mtime, began)
                    most_s = COMPILE_S if journal.read(path).compiling else section.silent_s
                code = process.poll()
            finally:  # of a job that is told to end, too: nothing stays on the device
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: left behind
                    process.wait(5)
        if journal.read(path).ended:
            return "", False
        if code is not None:
            return f"ended with exit code {code}", False
        return f"was ended, {silent:.0f} s without a sign", silent <= most_s

    def _note(self, section: Section, path: Path, reason: str, late: bool) -> None:
        """Records that a part died or ran out of time. Where rows are cases, the open case becomes a row."""
        now = journal.read(path)
        log = (self.work / f"{section.name}.log").read_text(errors="replace").strip().splitlines()
        said = f": {log[-1][:300]}" if log and not late else ""
        where = "; ".join(now.unfinished) or f"behind {now.begun[-1] if now.begun else 'the start'}"
        (self.skipped if late else self.failed).append(f"{section.name}, {where}: {reason}{said}")
        if section.part in CASES and now.open:
            row = {"case": now.open, "ok": None if late else False, "reason": reason}
            journal.Journal(path).row(section.part, row)

    def _take(self, section: Section, path: Path) -> None:
        """Puts what a part found into the report; of steps also the step-time model, and its file."""
        now = journal.read(path)
        self.skipped += dict.fromkeys(now.skipped)  # a part that was started again says it again
        if section.part != "steps":
            self.found |= now.values
            return
        self.found.setdefault("models", {})[section.name] = now.values
        refused = [row for row in now.values.get("compile", []) if "reason" in row]
        self.failed += dict.fromkeys(f"{section.name}, {row['program']}: {row['reason']}" for row in refused)
        if made := fit.of_report(self.record(), section.name):
            fit.write(made, self.args.out)
            now.values["fit"] = made

    def record(self) -> dict[str, Any]:
        """The report so far."""
        words = [word for word in self.args.words if "/" not in word]
        return {
            "benchmark": "doctor",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": self.commit,
            "command": " ".join(["jlora doctor", *words]),
            "seconds": round(time.monotonic() - self.started, 1),
            **self.found,
            "skipped": self.skipped,
            "failed": self.failed,
        }

    def save(self) -> Path:
        """Writes the report; a reader never sees half of one."""
        return output.write(self.args.out / "device.json", json.dumps(self.record(), indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; 0 unless a kernel differs from the reference, a part failed, or nothing was measured."""
    made = parser()
    args = made.parse_args(argv)
    if not 60 * args.minutes >= RATES.needs_s:  # nan is not
        made.error(f"--minutes {args.minutes:g}: must be at least {RATES.needs_s / 60:g}")
    args.words = list(sys.argv[1:] if argv is None else argv)
    work = args.out / "parts"  # stays: of a job that is killed, too
    output.ready(args.out)
    output.ready(work)
    for old in (*work.glob("*.jsonl"), *work.glob("*.log")):
        old.unlink()
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        job = Job(args, time.monotonic() + 60 * args.minutes, work)
        job.run(RATES, sections("gpu", args.quick))  # the longest list: which one it is, the rates will say
        if "rates" in job.found:
            todo = sections(job.found["device"]["platform"], args.quick, args.kernels)
            for at, section in enumerate(todo):
                job.run(section, todo[at + 1 :])
        path = job.save()
    record = job.record()
    print(table(record))
    print(path)
    rows = [row for name in CASES for row in record.get(name, [])]
    return int(bool(job.failed) or "rates" not in record or any(row.get("ok") is False for row in rows))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves like an exception, so that the part under way ends with the job."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    plain = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("jlora doctor", description=__doc__, formatter_class=plain)
    made.add_argument("--quick", action="store_true", help="one model, fewer shapes, a third of the time")
    ops = ("auto", "pallas", "xla", "both")
    made.add_argument("--kernels", default="auto", choices=ops, help="ops of the steps; both: of one model, in turn")
    made.add_argument("--minutes", type=float, default=7.75, help="time limit of the job")
    made.add_argument("--out", type=Path, default=Path("build/doctor"), help="where results go")
    return made
