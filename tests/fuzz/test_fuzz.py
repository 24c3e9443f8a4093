"""Every parser of something from outside: no input crashes it or takes it long, and none gets a status of our fault.

`python -m tests.fuzz` runs more of the same; docs/results/fuzz.md has its counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from tests.fuzz import _corpus
from tests.fuzz._engine import HANG_S, Target, fuzz
from tests.fuzz._targets import TARGETS

INPUTS = 2000  # of each target, beside its corpus
SLOW = {"cache": 150, "registry": 500, "template": 400, "http": 1200, "directory": 1000}
UNMAPPED = {"crash", "INTERNAL", "UNKNOWN"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A log line for each of thousands of refusals costs more than the refusal."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_crashes_a_parser_or_takes_it_long_or_gets_a_status_of_our_own_fault(name: str):
    report = fuzz(TARGETS[name](), SLOW.get(name, INPUTS), seed=7, known=_corpus.load(name))
    assert not report.crashes, "\n".join(f"{where}: {data!r:.500}" for where, data in report.crashes.items())
    assert not report.hangs, f"more than {HANG_S} s each: {report.hangs!r:.2000}"
    assert not UNMAPPED & report.statuses.keys(), report.statuses
    assert report.statuses, "nothing was run"


def test_every_target_has_a_corpus():
    assert {name for name in TARGETS if _corpus.load(name)} == TARGETS.keys()


def test_the_fuzzer_finds_a_planted_fault():
    """A parser that fails on one of its branches only, which no seed takes."""

    def parse(data: bytes) -> str:
        kind, _, value = data.partition(b"=")
        return "OK" if kind != b"size" else str(100 // (int(value) if value.isdigit() else 1))

    report = fuzz(Target("planted", parse, [b"size=5", b"name=x"]), 3000, seed=1)
    assert [where.partition(":")[0] for where in report.crashes] == ["ZeroDivisionError"]
    assert all(data == b"size=0" or int(data[5:]) == 0 for data in report.crashes.values())


def test_the_fuzzer_finds_an_input_that_takes_too_long():
    def parse(data: bytes) -> str:
        end = time.process_time() + (HANG_S + 0.1) * (data == b"slow")
        while time.process_time() < end:
            pass
        return "OK"

    assert fuzz(Target("planted", parse, [b"slow"]), 0, seed=1).hangs == [b"slow"]


def test_the_same_seed_makes_the_same_inputs():
    seen: list[list[bytes]] = [[], []]
    for inputs in seen:
        fuzz(Target("recorded", lambda data, to=inputs: str(to.append(data)), [b"abc", b'{"a": 1}']), 200, seed=3)
    assert seen[0] == seen[1] and len(set(seen[0])) > 100
