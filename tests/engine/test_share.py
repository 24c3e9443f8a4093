"""What adapters cost a step, from launches of known times."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jlora.engine import share
from jlora.engine.runner import Runner


class _Timed:
    """A runner whose launches take the seconds that they are; it computes nothing."""

    builder = None

    def __init__(self) -> None:
        self.now, self.pool = 0.0, SimpleNamespace(array=None)

    def forward(self, launch: Any) -> None:
        self.now += next(launch)


@pytest.mark.parametrize(
    "adapted, bare, found",
    [
        ([9.0, 1.0], [1.0, 0.8], 0.2),  # the first is warm-up
        ([9.0, 1.0, 1.0, 50.0, 1.0], [0.8, 0.8, 70.0, 0.8, 0.8], 0.2),  # other programs ran
        ([1.0], [1.1], 0.0),
    ],
)
def test_the_share_is_what_steps_take_longer_with_an_adapter(
    adapted: list[float], bare: list[float], found: float, monkeypatch: pytest.MonkeyPatch
):
    runner = _Timed()
    launches = [itertools.chain(seconds, itertools.repeat(seconds[-1])) for seconds in (adapted, bare)]
    monkeypatch.setattr(share, "with_adapter", lambda builder, layout, ranks: launches[0])
    monkeypatch.setattr(share, "without", lambda builder: launches[1])
    monkeypatch.setattr(share.time, "perf_counter", lambda: runner.now)
    assert share.adapter_share(cast(Runner, runner), cast(Any, None), lambda call: call()) == pytest.approx(found)
