"""The programs that a start has left compile one by one, and never hold up the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from jlora.engine.futures import done
from jlora.engine.remaining import Remaining
from jlora.ports import System

SCRIPT = """
import time
from types import SimpleNamespace
from jlora.engine.remaining import Remaining
from jlora.ports import System

def compile(left):
    print(left, flush=True)
    time.sleep(0.2)

runner = SimpleNamespace(left=tuple(range(600)), compile=compile, admit=None, drop=None)
Remaining(SimpleNamespace(runner=runner), System(), lambda command: None).begin()
time.sleep(0.5)
"""


def remaining(left: Sequence[str], compile: Callable[[str], None]) -> tuple[Remaining, list[Any], threading.Event]:
    """Of an engine without steps; what is admitted, dropped and finished, and an event when it has finished."""
    seen, ended = [], threading.Event()
    runner = SimpleNamespace(left=left, compile=compile, admit=seen.append, drop=lambda left: seen.append(f"no {left}"))

    def finish(between: object) -> None:
        seen.append("finished")
        ended.set()

    built: Any = SimpleNamespace(runner=runner, finish=finish)
    return Remaining(built, System(), lambda command: done(command())), seen, ended


def test_programs_compile_in_order_and_then_it_is_finished():
    def compile(left: str) -> None:
        if left == "b":
            raise ValueError("a planted failure")

    whole, seen, ended = remaining(("a", "b", "c"), compile)
    assert not whole.finished
    whole.begin()
    assert ended.wait(60)
    whole.close()
    assert seen == ["a", "no b", "c", "finished"]


def test_nothing_begins_after_the_close():
    began, go_on = threading.Event(), threading.Event()

    def compile(left: str) -> None:
        began.set()
        assert left == "a" and go_on.wait(60)

    whole, seen, ended = remaining(("a", "b"), compile)
    whole.begin()
    assert began.wait(60)
    whole.close()
    go_on.set()
    assert not ended.wait(0.1) and not whole.finished
    whole.begin()  # it is refused without an error
    assert seen == ["a"]


def test_a_process_ends_when_the_program_under_way_has():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert 0 < len(ended.stdout.split()) < 100  # of 600, each 0.2 s
