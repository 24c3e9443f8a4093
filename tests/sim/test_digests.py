"""The simulator's results are those of the repository; `tests.sim.digests` says how to renew them."""

from __future__ import annotations

import pytest

from tests.sim.digests import LONG, SHORT, digests, known, runs

RENEW = "results have changed; if that is the purpose: python -m tests.sim.digests --write, and say so in the CHANGELOG"
FLAGS = runs(SHORT) | runs(LONG)


@pytest.mark.parametrize("name", [*runs(SHORT), *(pytest.param(name, marks=pytest.mark.slow) for name in runs(LONG))])
def test_simulations_give_the_results_of_the_repository(name: str):
    assert digests(FLAGS[name]) == known()[name], RENEW
