"""One part of `jlora doctor`, in a process of its own: `python -m jlora.doctor.part ORDER` (JSON of `Order`).

A part that breaks the device stops: after an illegal access of a kernel nothing works in its process. The
job starts the part again, and a case that was begun once is not begun again.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from jlora import machine
from jlora.doctor import checks, journal, rates, steps
from jlora.doctor.fit import Rates
from jlora.doctor.journal import Found, Journal, Order
from jlora.doctor.steps import Steps
from jlora.errors import ConfigError
from jlora.model.sharding import all_devices
from jlora.model.spec import ModelSpec
from jlora.pallas.cases import SMALL_ATTENTION, SMALL_LORA, TINY
from jlora.sim.hardware import MODELS

LOST = 3  # exit code: the device does not answer this process any more
CONTEXT = 1024

Task = tuple[str, Callable[[], Mapping[str, Any]]]  # a case's name, and what makes its row


@dataclass(frozen=True, slots=True)
class Part:
    """A part under way."""

    order: Order
    journal: Journal
    until: float  # its end on this process's monotonic clock
    before: Found  # of a process that did not come to its end
    small: bool  # a CPU runs everything in miniature

    def left(self) -> float:
        return self.until - time.monotonic()

    def rates(self) -> Rates:
        """Of this device. Raises ValueError where they have not been measured."""
        if self.order.rates is None:
            raise ValueError(f"{self.order.part}: needs the device's rates")
        return self.order.rates


def main(argv: Sequence[str]) -> int:
    """Runs a part; 0 when it came to its end, `LOST` when the device broke."""
    order = msgspec.json.decode(argv[0], type=Order)
    until, path = time.monotonic() + order.seconds, Path(order.to)
    before, writes = journal.read(path), Journal(path)
    writes.begin("the device's start")
    try:
        platform = all_devices()[0].platform
    except ConfigError as e:
        print(f"jlora doctor: {e}", file=sys.stderr, flush=True)
        return 1
    part = Part(order, writes, until, before, platform == "cpu")
    if PARTS[order.part](part):
        part.journal.end()
        return 0
    return LOST


def _rates(part: Part) -> bool:
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    found = {"platform": device.platform, "kind": device.device_kind, "memory_bytes": memory}
    found["runtime"] = " ".join(device.client.platform_version.split())  # of a GPU: CUDA
    part.journal.put("device", found)
    part.journal.put("machine", machine.describe())
    part.journal.put("versions", machine.versions())
    part.journal.begin("rates")
    part.journal.put("rates", asdict(rates.measure(part.small)))
    return True


def _kernels(part: Part) -> bool:
    every = [*SMALL_ATTENTION, *SMALL_LORA]
    cases = every[::7] if part.small else checks.quick_cases() if part.order.quick else every
    return _rows(part, [(c.name, lambda c=c: checks.compare(c)) for c in cases])


def _kernel_speed(part: Part) -> bool:
    rates, cases = part.rates(), checks.large_cases(part.small, part.order.quick)
    return _rows(part, [(c.name, lambda c=c: checks.timed(c, rates)) for c in cases])


def _checklist(part: Part) -> bool:
    from jlora.doctor import checklist  # jax's front of Mosaic GPU is for a process on a GPU

    return _rows(part, [(c.name, lambda c=c: checklist.checked(c)) for c in checklist.checklist()])


def _rows(part: Part, tasks: Sequence[Task]) -> bool:
    """A row for each task, and a failure is a row too; False: the device broke."""
    todo = [(name, run) for name, run in tasks if name not in part.before.begun]
    for at, (name, run) in enumerate(todo):
        if part.left() < 0:
            part.journal.skip(f"{part.order.part}: no time left for {len(todo) - at} cases, from {name} on")
            break
        part.journal.begin(name)
        try:
            row = run()
        except Exception as e:  # whatever a new kernel does on a new device is a finding, and the others go on
            row = {"case": name, "ok": False, "reason": checks.first_line(e)}
        part.journal.row(part.order.part, row)
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
    spec: ModelSpec = replace(TINY, max_len=128) if part.small else replace(MODELS[part.order.model], max_len=4096)
    plan = Steps(spec, (1, 8, 32, 64), (512, 2048), CONTEXT, (1, 8, 64))
    if part.order.quick:
        plan = replace(plan, decode=(1, 64), prefill=(512,))
    if part.small:
        plan = Steps(spec, (2,), (64,), 32, (1, 2), tokens=16, rounds=3, repeats=2)
    steps.run(plan, part.order.kernels, part.rates(), part.journal, part.left, part.before)
    return True


# Each gives whether it came to its end; False: the device does not answer this process any more.
PARTS: Mapping[str, Callable[[Part], bool]] = {
    "rates": _rates,
    "kernels": _kernels,
    "steps": _steps,
    "kernel_speed": _kernel_speed,
    "checklist": _checklist,
}


def _exit(code: int) -> None:
    """Ends the process though a thread compiles on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _exit(main(sys.argv[1:]))
    except BaseException:  # of Ctrl-C, too
        traceback.print_exc()
        _exit(1)
