"""One part of `jlora doctor`, in a process of its own: `python -m jlora.doctor.part PART --to FILE`.

A part writes its findings to its file line by line (`journal`). A part that breaks the device stops
there (an illegal access of a kernel ends everything in its process); the job starts it again, and a
case that was begun once is not begun again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jlora import machine
from jlora.doctor import checks, engine, journal, rates, steps
from jlora.doctor.engine import World
from jlora.doctor.fit import Rates
from jlora.doctor.journal import Found, Journal
from jlora.doctor.steps import Steps
from jlora.engine.plan import ROW
from jlora.model.spec import ModelSpec
from jlora.pallas.cases import TINY
from jlora.sim.hardware import MODELS
from jlora.sim.workloads import Load

LOST = 3  # exit code: the device does not answer this process any more
CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a report, to be made."""

    name: str
    run: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """What a part was started with.

    Attributes:
        until: its end on this process's monotonic clock.
        before: what a process found that did not come to its end.
    """

    journal: Journal
    until: float
    before: Found
    kernels: str
    quick: bool
    model: str
    rates: Rates | None

    def left(self) -> float:
        """Seconds until its end."""
        return self.until - time.monotonic()

    @property
    def small(self) -> bool:
        """A CPU runs everything in miniature."""
        return jax.default_backend() == "cpu"

    def known_rates(self) -> Rates:
        """Of this device. Raises ValueError where they have not been measured."""
        if self.rates is None:
            raise ValueError("--rates: the device's rates are needed for this part")
        return self.rates


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a part; 0 when it came to its end, `LOST` when the device broke."""
    args = parser().parse_args(argv)
    rates = Rates.of(json.loads(args.rates)) if args.rates else None
    until = time.monotonic() + args.seconds
    before = journal.before(args.to)
    part = Part(Journal(args.to), until, before, args.kernels, args.quick, args.model, rates)
    if PARTS[args.part](part):
        part.journal.end()
        return 0
    return LOST


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser("python -m jlora.doctor.part", description=__doc__)
    made.add_argument("part", choices=list(PARTS))
    made.add_argument("--to", type=Path, required=True, help="file that is appended to")
    made.add_argument("--seconds", type=float, default=60.0, help="begin nothing later than this")
    made.add_argument("--kernels", default="auto", choices=("auto", "pallas", "xla"))
    made.add_argument("--quick", action="store_true")
    made.add_argument("--model", default="", help="of the part `steps`")
    made.add_argument("--rates", default="", help="JSON of the part `rates`")
    return made


def _rates(part: Part) -> bool:
    part.journal.begin("the device's start")
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    found = {"platform": device.platform, "kind": device.device_kind, "memory_bytes": memory}
    part.journal.put("device", found)
    part.journal.put("machine", machine.describe())
    part.journal.put("versions", machine.versions())
    part.journal.begin("rates")
    part.journal.put("rates", rates.measure(part.small).describe())
    return True


def _kernels(part: Part) -> bool:
    every = checks.small_cases()
    cases = every[::7] if part.small else checks.quick_cases() if part.quick else every
    return _rows(part, "kernels", (Task(c.name, lambda c=c: checks.compare(c)) for c in cases))


def _kernel_speed(part: Part) -> bool:
    rates, cases = part.known_rates(), checks.large_cases(part.small)
    return _rows(part, "kernel_speed", (Task(c.name, lambda c=c: checks.timed(c, rates)) for c in cases))


def _checklist(part: Part) -> bool:
    todo = checks.checklist()
    return _rows(part, "checklist", (Task(c.name, lambda c=c: checks.checked(c)) for c in todo))


def _rows(part: Part, into: str, tasks: Iterable[Task]) -> bool:
    """A row for each task, and a failure is a row too; False: the device broke."""
    todo = [task for task in tasks if task.name not in part.before.begun]
    for at, task in enumerate(todo):
        if part.left() < 0:
            part.journal.skip(f"{into}: no time left for {len(todo) - at} cases, from {task.name} on")
            break
        part.journal.begin(task.name)
        try:
            row = task.run()
        except Exception as e:  # whatever a new kernel does on a new device is a finding, and the others go on
            row = {"case": task.name, "ok": False, "reason": checks.first_line(e)}
        part.journal.row(into, row)
        if not _alive():
            return False
    return True


def _alive() -> bool:
    """Whether the device still answers this process."""
    try:
        return float(jnp.ones(8).sum()) == 8
    except jax.errors.JaxRuntimeError:
        return False


def _steps(part: Part) -> bool:
    small = part.small
    spec: ModelSpec = replace(TINY, max_len=128) if small else replace(MODELS[part.model], max_len=4096)
    plan = Steps(spec, (1, 8, 32, 64), (512, 2048), CONTEXT, (1, 8, 64))
    if part.quick:
        plan = replace(plan, decode=(1, 64), prefill=(512,))
    if small:
        plan = Steps(spec, (2,), (64,), 32, (1, 2), tokens=16, rounds=3, repeats=2)
    steps.run(plan, part.kernels, part.known_rates(), part.journal, part.left, part.before)
    return True


def _policies(part: Part) -> bool:
    """Cache policies on a shallow model with everything compiled before the first one."""
    spec, sequences, load = _shallow(part.small)
    config = engine.settings(sequences, sequences * ROW, part.kernels)
    part.journal.begin("the engine's device side")
    world = World.of(spec, config, max(256, 4 * sequences * (spec.max_len // ROW)))
    try:
        names = engine.POLICIES[:2] if part.small else engine.POLICIES
        contest = engine.Contest(world, load, share=0.3, speed=1.0)
        for name in contest.warm_up():
            part.journal.begin(f"compiling: {name} is done")
        for name in names:
            if part.left() < contest.seconds:
                part.journal.skip(f"policy {name}: {part.left():.0f} s left, {contest.seconds:.0f} s needed")
                continue
            part.journal.begin(f"policy {name}")
            part.journal.row("policies", contest.play(name))
    finally:
        world.close()
    return True


def _shallow(small: bool) -> tuple[ModelSpec, int, Load]:
    """A model, how many sequences run at a time, and what they are asked."""
    if small:
        spec = replace(TINY, max_len=128)
        load = Load(rate=3, seconds=1.5, gap_s=1, adapters=3, shrink=32, vocab=spec.vocab, max_len=spec.max_len)
        return spec, 2, load
    spec = replace(MODELS["llama-3-8b"], layers=2, max_len=1024, name="llama-3-8b, 2 layers")
    load = Load(rate=12, seconds=12, gap_s=3, adapters=24, shrink=4, vocab=spec.vocab, max_len=spec.max_len)
    return spec, 16, load


# Each gives whether it came to its end; False: the device does not answer this process any more.
PARTS: Mapping[str, Callable[[Part], bool]] = {
    "rates": _rates,
    "kernels": _kernels,
    "steps": _steps,
    "policies": _policies,
    "kernel_speed": _kernel_speed,
    "checklist": _checklist,
}


if __name__ == "__main__":
    sys.exit(main())
