"""The loop of a fuzzer: take an input that is known, change it, run it, keep it if it went where none went before.

    report = fuzz(target, inputs=1000, seed=1, known=corpus.load(target.name))

The same seed gives the same inputs on the same code and Python. Coverage comes from `sys.monitoring` (Python 3.12 and
later): every line of jlora reports itself once, so that a run costs as much as one without coverage. Python 3.11 runs
the same loop unguided.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jlora
from jlora.errors import ConfigError, JloraError
from jlora.serve.status import CODES, MESSAGE_BYTES, entry_of, shortened
from tests.fuzz._mutate import mutated

HANG_S = 1.0  # of the processor's time
GUARD_S = 20.0  # of the processor's time: then the input is given up
MOST = 64 << 10  # bytes of an input
PACKAGE = str(Path(jlora.__file__).parent) + os.sep
TOOL = 4  # of sys.monitoring: one that no debugger, coverage or profiler has


class Hang(BaseException):
    """The input took `GUARD_S`. No `except Exception` of what is fuzzed may catch it."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is fuzzed.

    Attributes:
        run: takes an input and returns the status that its sender would get. What it raises is a crash.
        seeds: valid inputs.
        words: what the mutator also inserts.
        change: makes another input that keeps the form.
    """

    name: str
    run: Callable[[bytes], str]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    change: Callable[[bytes, random.Random], bytes] | None = None


@dataclass(slots=True)
class Report:
    """What a run has found.

    Attributes:
        statuses: how often each was answered.
        crashes: where each was raised -> the first input that did it.
        hangs: inputs that took more than `HANG_S` of the processor's time.
        new: inputs that ran lines of jlora which no earlier one ran.
    """

    target: str
    seed: int
    engine: str = "own"
    inputs: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, bytes] = field(default_factory=dict)
    hangs: list[bytes] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: bytes = b""
    new: list[bytes] = field(default_factory=list)
    lines: int = 0

    def take(self, target: Target, data: bytes) -> None:
        """Runs one input."""
        began = time.process_time()
        try:
            with _guarded():
                self.statuses[target.run(data)] += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            self.statuses["crash"] += 1
            self.crashes.setdefault(_where(e), data)
        took = time.process_time() - began
        self.inputs += 1
        if took > self.slowest_s:
            self.slowest_s, self.slowest = took, data
        if took > HANG_S:
            self.hangs.append(data)


def status(call: Callable[[], object]) -> str:
    """The status of a call that raises `JloraError`s for bad input; any other error passes through."""
    try:
        call()
    except ConfigError as e:
        assert str(e)
        return "CONFIG"  # said to the operator, at the start
    except JloraError as e:
        code = entry_of(CODES, e)
        assert code is not None, f"{type(e).__name__} has no status"
        assert len(shortened(str(e)).encode()) <= MESSAGE_BYTES
        return code.name
    return "OK"


def fuzz(target: Target, inputs: int, seed: int, known: Collection[bytes] = (), until: float = float("inf")) -> Report:
    """Runs the seeds, the known inputs, and then `inputs` more that are made of them, or until that time."""
    report, draw = Report(target.name, seed), random.Random(seed)
    pool = [*target.seeds, *known]
    began = time.monotonic()
    with covered() as lines:
        for data in pool:
            report.take(target, data)
        seen = len(lines)
        for _ in range(inputs):
            if time.monotonic() > until:
                break
            parent = draw.choice(pool[-16:] if draw.random() < 0.3 else pool)
            if target.change is not None and draw.getrandbits(1):
                data = target.change(parent, draw)[:MOST]
            else:
                data = mutated(parent, draw, pool, target.words)[:MOST]
            report.take(target, data)
            if len(lines) > seen:
                seen = len(lines)
                pool.append(data)
                report.new.append(data)
    report.lines, report.seconds = len(lines), time.monotonic() - began
    return report


@contextmanager
def covered() -> Iterator[Collection[Any]]:
    """The lines of jlora that run meanwhile; none on Python 3.11."""
    lines: set[tuple[CodeType, int]] = set()
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        yield lines
        return

    def ran(code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(PACKAGE):
            lines.add((code, line))
        return monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "fuzz")
    monitoring.register_callback(TOOL, monitoring.events.LINE, ran)
    monitoring.set_events(TOOL, monitoring.events.LINE)
    monitoring.restart_events()
    try:
        yield lines
    finally:
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, monitoring.events.LINE, None)
        monitoring.free_tool_id(TOOL)


@contextmanager
def _guarded() -> Iterator[None]:
    """Raises Hang after `GUARD_S` of the processor's time. One long call into C ends first."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, GUARD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _where(error: BaseException) -> str:
    """The error's kind and the last lines that raised it: one for each fault, however many inputs find it."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:200]} at {places}"


def name_of(data: bytes) -> str:
    """A file's name for an input."""
    return hashlib.sha256(data).hexdigest()[:12]
