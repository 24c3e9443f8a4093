"""The simulator's results are those of the repository; `tests.sim.digests` says how to renew them."""

from __future__ import annotations

import pytest

from tests.sim.digests import LONG, SHORT, digests, known, runs

RENEW = "results have changed; if that is the purpose: python -m tests.sim.digests --write, and say so in the CHANGELOG"
LATER = [pytest.param(name, flags, marks=pytest.mark.slow) for name, flags in runs(LONG).items()]


@pytest.mark.parametrize("name, flags", [*runs(SHORT).items(), *LATER])
def test_simulations_give_the_results_of_the_repository(name: str, flags: str):
    assert digests(flags) == known()[name], RENEW
