"""Arrivals have the rate that was asked for and the burstiness of their process."""

from __future__ import annotations

import numpy as np
import pytest

from jlora.errors import ConfigError
from jlora.sim.workloads import arrivals
from jlora.sim.workloads.arrivals import Arrivals, Clients, Recorded, SessionStarts, Span, gamma, typical_clients

SPAN = Span(-50.0, 1950.0)


def draw(process: Arrivals, rate: float = 5.0, seed: int = 0) -> SessionStarts:
    starts = process(rate, SPAN, np.random.default_rng(seed))
    assert (np.diff(starts.times) >= 0).all()
    assert starts.times[0] >= SPAN.begin and starts.times[-1] <= SPAN.end + 1e-6
    return starts


def spread(times: np.ndarray) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gamma_gaps_have_their_mean_and_variation(cv: float):
    times = draw(gamma(cv)).times
    assert len(times) == pytest.approx(10_000, rel=0.15)
    assert spread(times) == pytest.approx(cv, rel=0.15)


def test_a_recorded_clock_is_thinned_or_run_faster_to_the_very_rate():
    clock = Recorded(np.cumsum(np.random.default_rng(1).gamma(0.25, 4.0, 4000)))  # 1/s, gaps vary by 2
    for rate in (0.1, 1.0, 5.0):
        assert len(draw(clock, rate).times) == round(rate * SPAN.seconds)
    assert spread(draw(clock, 1.0).times) == pytest.approx(2.0, rel=0.2)
    # Few of many arrivals are as good as independent.
    assert spread(draw(clock, 0.05).times) == pytest.approx(1.0, abs=0.35)
    assert draw(clock, seed=0).times.tolist() != draw(clock, seed=1).times.tolist()


def test_a_recorded_arrival_keeps_its_client():
    starts = draw(Recorded(np.arange(101.0), np.arange(101) % 4), rate=1.0)
    assert starts.clients is not None and len(starts) == 2000
    assert set((np.diff(starts.clients) % 4).tolist()) == {1}  # in order, none left out, round the end


def test_clients_keep_their_shares_and_are_numbered_by_them():
    process = Clients(np.array([[1.0], [8.0], [1.0]]), np.array([1.0, 0.5, 0.8]), np.array([False, False, True]))
    starts = draw(process)
    assert starts.clients is not None and len(starts) == pytest.approx(10_000, rel=0.1)
    counts = np.bincount(starts.clients) / len(starts)
    assert counts.tolist() == pytest.approx([0.8, 0.1, 0.1], abs=0.03)
    busiest = starts.times[starts.clients == 0]
    assert spread(busiest) == pytest.approx(2**0.5, rel=0.15)  # Gamma of shape 0.5


def test_a_clients_rate_follows_its_windows():
    rates = np.array([[3.0, 1.0]])
    starts = Clients(rates, np.array([1.0]), np.array([False]))(4.0, Span(0, 1200), np.random.default_rng(0))
    first = (starts.times < 600).mean()
    assert first == pytest.approx(0.75, abs=0.03) or first == pytest.approx(0.25, abs=0.03)  # either window first


def test_typical_clients_are_skewed_bursty_and_the_same_every_time():
    starts = draw(typical_clients(34))
    assert starts.clients is not None and len(starts) == pytest.approx(10_000, rel=0.25)
    counts = np.sort(np.bincount(starts.clients))[::-1]
    assert counts[:10].sum() > 0.7 * counts.sum()
    assert spread(starts.times) > 1.03
    assert np.array_equal(typical_clients(34).rates, typical_clients(34).rates)


def test_arrivals_are_named_on_the_command_line():
    for text, process in (("poisson", gamma(1.0)), ("gamma:4", gamma(4.0))):
        assert draw(arrivals.parse(text)).times.tolist() == draw(process).times.tolist()
    for text in ("gamma", "gamma:0", "gamma:x", "weibull:1", "poisson:2", "gamma:nan"):
        with pytest.raises(ConfigError, match="arrivals"):
            arrivals.parse(text)
