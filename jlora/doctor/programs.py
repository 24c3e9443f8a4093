"""The programs of a model's steps: which are compiled, and which a process has begun in vain."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from jlora.doctor.checks import first_line
from jlora.doctor.engine import Compile, World
from jlora.doctor.journal import COMPILE, Found, Journal
from jlora.doctor.model import StepCase
from jlora.engine.batch import Form, Launch

TRIES = 2  # of a program: beside others, and once more by itself


class Programs:
    """Compiles what cases need, and journals each program.

    Attributes:
        ready: forms whose programs are compiled, by this process or for its cache.
    """

    def __init__(self, world: World, journal: Journal, before: Found):
        self._world, self._journal = world, journal
        self.ready: set[Form] = set()
        self._reasons: dict[Form, str] = {}  # why a form has no program
        for row in before.values.get("compile", []):
            self._end(Form(*row["form"]), row.get("reason", ""))
        self._begun = Counter(before.begun)

    def compile(self, cases: Sequence[StepCase], most_s: float) -> None:
        """Compiles what the cases lack, for so long at most."""
        wanted = {form: launch for case in cases for form, launch in self._needs(case).items()}
        todo = {form: one for form, one in wanted.items() if not self._reason(form)}
        self._world.compile(todo, most_s, self._run)

    def lacking(self, case: StepCase) -> str:
        """Why a case cannot run; "" if it can."""
        missing = [form for form in self._needs(case) if form not in self.ready]
        return "; ".join(f"{_name(form)}: {self._reason(form) or 'took too long'}" for form in missing)

    def doubts(self, case: StepCase) -> bool:
        """Whether a process that broke may have died of one of the case's programs."""
        return any(form not in self.ready and self._begun[_name(form)] for form in self._needs(case))

    def _needs(self, case: StepCase) -> dict[Form, Launch]:
        return self._world.forms([self._world.plan(each) for each in (case, case.idle)])

    def _reason(self, form: Form) -> str:
        if form in self.ready or self._begun[_name(form)] < TRIES:
            return self._reasons.get(form, "")
        return "did not end before"

    def _run(self, form: Form, compile_it: Compile) -> None:
        """Compiles one form, in a thread."""
        self._journal.begin(_name(form))
        began, row = time.monotonic(), {"program": _name(form), "form": list(form)}
        try:
            compile_it()
        except Exception as e:  # a compiler that refuses one program may take the others
            row["reason"] = first_line(e)
        self._journal.row("compile", {**row, "seconds": time.monotonic() - began})
        self._end(form, row.get("reason", ""))

    def _end(self, form: Form, reason: str) -> None:
        if reason:
            self._reasons[form] = reason
        else:
            self.ready.add(form)


def _name(form: Form) -> str:
    return f"{COMPILE}{form.rows}x{form.chunk}{', no adapters' if form.bare else ''}"
