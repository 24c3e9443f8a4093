"""A model's steps, timed: without adapters against the roofline's floor, with adapters against the same step without.

Steps are compiled in groups, the most telling shapes first. A group is compiled before any of it is timed,
because a GPU's compiler tries its products on the device; a program that takes too long costs its own cases
only. Last, and with time kept for it, decode steps of the whole engine are timed against the same steps
dispatched alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jlora.doctor import engine, fit
from jlora.doctor.engine import World
from jlora.doctor.fit import Rates
from jlora.doctor.journal import Found, Journal
from jlora.doctor.model import StepCase, count_of, decode, layout_for, load_of, mixed, prefill, those_that_fit
from jlora.doctor.programs import Programs
from jlora.doctor.rates import seconds
from jlora.model.spec import ModelSpec

GROUP = 4  # shapes that are compiled together
LEAST_S = 15.0  # for a case: its batch, warm up, rounds
ENGINE_S = 25.0  # kept for the engine: prompts, two times the answers, with and without adapters


@dataclass(frozen=True, slots=True)
class Steps:
    """What of a model is timed."""

    spec: ModelSpec
    decode: tuple[int, ...]  # sequences of decode steps with `context` tokens each
    prefill: tuple[int, ...]  # tokens of prompts
    context: int
    adapters: tuple[int, ...]  # how many there are in the largest decode step
    tokens: int = 64  # that each sequence generates in the engine
    rounds: int = 5  # median of so many rounds of `repeats` steps
    repeats: int = 10

    def base(self) -> list[StepCase]:
        """Steps without adapters, the most telling first: largest, smallest, the rest."""
        prompts = [prefill(n) for n in reversed(self.prefill)]
        rows = [decode(n, self.context) for n in self.decode]
        order = [rows[-1], *prompts[:1], *rows[:1], *prompts[1:], *rows[1:-1]]
        return list({case.name: case for case in order}.values())

    def adapted(self) -> list[StepCase]:
        """Steps with adapters: of mixed ranks, of rank 16, in prompts."""
        most = self.decode[-1]
        cases = [decode(most, self.context, mixed(k)) for k in self.adapters]
        prompt = prefill(self.prefill[-1], (16,) * self.adapters[min(1, len(self.adapters) - 1)])
        return [*cases, decode(most, self.context, few(most)), prompt]

    def room(self, count: int) -> StepCase:
        """What of the pool that takes: the answers of two turns lie behind each prompt."""
        return decode(count, self.context + 2 * self.tokens, few(count))


def few(count: int) -> tuple[int, ...]:
    """Adapters of rank 16 for `count` sequences: 8, or one each (R4)."""
    return (16,) * min(8, count)


@dataclass(frozen=True, slots=True)
class Bench:
    """One model under way."""

    plan: Steps
    rates: Rates
    world: World
    journal: Journal
    left: Callable[[], float]
    before: Found  # of a process that did not come to its end
    programs: Programs


def run(plan: Steps, kernels: str, rates: Rates, journal: Journal, left: Callable[[], float], before: Found) -> None:
    """Times the steps that fit this device, up to the time limit; cases that were begun `before` are not again."""
    base, reasons = those_that_fit(plan.spec, plan.base(), kernels)
    adapted, more = those_that_fit(plan.spec, plan.adapted(), kernels)
    rooms = {n: those_that_fit(plan.spec, [plan.room(n)], kernels) for n in plan.decode}
    for reason in (*reasons, *more, *(f"the engine: {r}" for _, found in rooms.values() for r in found)):
        journal.skip(reason)
    if not base:
        return
    journal.put("prior", asdict(fit.hardware(plan.spec, rates).step_model()))
    journal.begin("weights and pool")
    served = max((n for n, (held, _) in rooms.items() if held), default=0)
    layout = layout_for(plan.spec, [*base, *adapted, *(rooms[served][0] if served else ())], kernels)
    world = World(plan.spec, engine.settings(plan.decode[-1], plan.prefill[-1], kernels), layout)
    try:
        journal.put("ops", [[c.op, c.implementation, c.reason] for c in world.chosen.choices])
        journal.put("pool_blocks", layout.blocks)
        journal.put("block_bytes", layout.block_bytes)
        programs = Programs(world, journal, before)
        bench = Bench(plan, rates, world, journal, lambda: left() - (ENGINE_S if served else 0), before, programs)
        doubted = {case.shape for case in (*base, *adapted) if programs.doubts(case)}
        for shapes in _groups(list(dict.fromkeys(case.shape for case in base)), doubted):
            _group(bench, [case for case in (*base, *adapted) if case.shape in shapes])
        if served and left() < LEAST_S:
            journal.skip(f"{plan.spec.name}: the engine: no time left")
        elif served:
            whole_engine(bench, served)
    finally:
        world.close()


def _groups(shapes: Sequence[tuple[int, int]], doubted: Collection[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Shapes that are compiled together; those that are doubted come last, one by one."""
    sure = [shape for shape in shapes if shape not in doubted]
    for at in range(0, len(sure), GROUP):
        yield sure[at : at + GROUP]
    yield from ([shape] for shape in shapes if shape in doubted)


def _group(bench: Bench, cases: Sequence[StepCase]) -> None:
    """Compiles and times some cases, those without adapters first."""
    todo = [case for case in cases if case.name not in bench.before.begun]
    if not todo:
        return
    if bench.left() < LEAST_S:
        bench.journal.skip(f"{bench.plan.spec.name}: no time for {', '.join(case.name for case in todo)}")
        return
    bench.programs.compile(todo, max(LEAST_S, bench.left() - 2 * LEAST_S))
    for case in todo:
        lacking = bench.programs.lacking(case)
        if lacking or bench.left() < LEAST_S:
            bench.journal.skip(f"{bench.plan.spec.name}: {case.name}: {lacking or 'no time left'}")
            continue
        bench.journal.begin(case.name)
        row = against_base(bench, case) if case.ranks else alone(bench, case)
        bench.journal.row("adapters" if case.ranks else "steps", row)


def whole_engine(bench: Bench, count: int) -> None:
    """Times the engine's decode steps of `count` sequences, without adapters and with some."""
    plan, world, say = bench.plan, bench.world, bench.journal.begin
    world.keep_to(bench.programs.ready)
    for case in (decode(count, plan.context), decode(count, plan.context, few(count))):
        if f"engine, {case.name}" in bench.before.begun:
            continue
        if not world.serves(case):
            bench.journal.skip(f"{plan.spec.name}: engine, {case.name}: its programs are not compiled")
            continue
        say(f"engine, {case.name}")
        alone_s = seconds(world.repeated(world.plan(case)), plan.repeats, plan.rounds)
        found = engine.full_steps(world, case, plan.tokens, lambda what: say(f"engine, {what}"))
        bench.journal.row("engine", beside(bench, case, found, alone_s))


def beside(bench: Bench, case: StepCase, found: Mapping[str, Any], alone_s: float) -> dict[str, Any]:
    """What the engine made of a step, beside the step called alone and the roofline's floor (R5, R10).

    Returns:
        `found`, and `alone_s`: the step by itself, the next one enqueued before it ends; `ratio` and
        `gap_s`: the engine's over that, and their difference; the R5 of the whole engine.
    """
    step_s, floor = found["step_s"], count_of(bench.plan.spec, bench.world.layout, case).floor(bench.rates.chip)
    return {
        "case": case.name,
        **found,
        "alone_s": alone_s,
        "ratio": step_s / alone_s,
        "gap_s": step_s - alone_s,
        "tokens_per_s": case.tokens / step_s,
        "floor_s": floor,
        "floor_share": floor / step_s,
    }


def alone(bench: Bench, case: StepCase) -> dict[str, Any]:
    """Seconds of a step beside the roofline's floor (R5)."""
    plan, rates = bench.plan, bench.rates
    taken = seconds(bench.world.repeated(bench.world.plan(case)), plan.repeats, plan.rounds)
    count = count_of(plan.spec, bench.world.layout, case)
    floor = count.floor(rates.chip)
    return {
        "case": case.name,
        "seconds": taken,
        "tokens_per_s": case.tokens / taken,
        "floor_s": floor,
        "floor_share": floor / taken,
        "matmul_share": count.flops / rates.flops_per_s / taken,
        "bound": count.bound(rates.chip),
        "load": _load(bench, case),
    }


def against_base(bench: Bench, case: StepCase) -> dict[str, Any]:
    """R4: the step with adapters over the same step without, turn by turn; a control runs the base twice.

    The base runs the program that the engine gives it: on a GPU, decode without adapters has one of its own.
    """
    world, repeats = bench.world, bench.plan.repeats
    base, adapted = (world.repeated(world.plan(each)) for each in (case.idle, case))
    sides = {"base": base, "adapters": adapted, "control": base}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        jax.block_until_ready(call(1))
    for _ in range(bench.plan.rounds):
        for name, call in sides.items():
            began = time.perf_counter()
            jax.block_until_ready(call(repeats))
            taken[name].append((time.perf_counter() - began) / repeats)

    def over_base(name: str) -> float:
        return statistics.median(x / y for x, y in zip(taken[name], taken["base"], strict=True))

    return {
        "case": case.name,
        "seconds": statistics.median(taken["adapters"]),
        "load": _load(bench, case),
        "ratio": over_base("adapters"),
        "control": over_base("control"),
    }


def _load(bench: Bench, case: StepCase) -> dict[str, float]:
    hardware = fit.hardware(bench.plan.spec, bench.rates)
    return load_of(case, hardware.adapter_blocks)._asdict()
