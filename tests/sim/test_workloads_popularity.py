"""Each law of popularity gives the shares that its source states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jlora.errors import ConfigError
from jlora.sim.workloads import popularity
from jlora.sim.workloads.arrivals import SessionStarts
from jlora.sim.workloads.popularity import (
    Popularity,
    by_client,
    distinct,
    drift,
    geometric,
    identical,
    power,
    real_order,
    recent,
    skewed,
    uniform,
    zipf,
    zipf_shares,
)
from tests.sim import _public

COUNT = 20_000


def draw(law: Popularity, adapters: int = 100, seed: int = 0) -> np.ndarray:
    starts = SessionStarts(np.arange(COUNT, dtype=float))
    drawn = law(adapters, starts, np.random.default_rng(seed))
    assert len(drawn) == COUNT and drawn.min() >= 0 and drawn.max() < adapters
    return drawn


def shares(drawn: np.ndarray) -> list[float]:
    """Of the most popular first."""
    return [count / len(drawn) for _, count in Counter(drawn.tolist()).most_common()]


def hits(drawn: np.ndarray, size: int = 10) -> float:
    """Of an LRU list."""
    recent: list[int] = []
    found = 0
    for adapter in drawn.tolist():
        found += adapter in recent
        recent = [*(a for a in recent if a != adapter), adapter][-size:]
    return found / len(drawn)


@pytest.mark.parametrize("law", sorted(set(popularity.LAWS) - {"clients"}))
@pytest.mark.parametrize("adapters", [1, 3, 2000])
def test_a_seed_gives_one_choice_with_few_and_many_adapters(law: str, adapters: int):
    assert draw(popularity.parse(law), adapters).tolist() == draw(popularity.parse(law), adapters).tolist()


def test_identical_is_one_and_distinct_takes_turns():
    assert len(set(draw(identical).tolist())) == 1
    drawn = draw(distinct).tolist()
    assert all(len(set(drawn[i : i + 100])) == 100 for i in range(0, COUNT, 100))


def test_uniform_is_even():
    assert max(shares(draw(uniform))) < 1.4 / 100


@pytest.mark.parametrize("exponent", [0.9, 1.0, 1.5])
def test_zipf_shares_fall_with_rank(exponent: float):
    found = shares(draw(zipf(exponent)))
    expected = zipf_shares(exponent, 100)
    assert found[0] == pytest.approx(expected[0], rel=0.1)
    assert sum(found[:10]) == pytest.approx(expected[:10].sum(), rel=0.05)


def test_punicas_skew_is_a_constant_ratio():
    found = shares(draw(geometric(1.5)))
    assert found[0] / found[1] == pytest.approx(1.5, rel=0.1)
    assert found[1] / found[2] == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("alpha, share", [(1.0, 0.10), (0.6, 0.25), (0.3, 0.50), (0.1, 0.79)])
def test_the_power_laws_top_tenth_is_s_loras(alpha: float, share: float):
    assert sum(shares(draw(power(alpha)))[:10]) == pytest.approx(share, abs=0.03)


def test_skewed_is_normal_with_its_deviation():
    # 68 % of the requests go to the adapters within one deviation: 2 * 0.1 * N of them.
    assert sum(shares(draw(skewed(0.1)))[:20]) == pytest.approx(0.683, abs=0.02)
    assert shares(draw(skewed(0.1)))[0] > 1.8 * shares(draw(skewed(0.3)))[0]


def test_a_drift_keeps_two_of_the_top_ten():
    drawn = draw(drift(period_s=COUNT / 4, exponent=1.0))
    tops = [{a for a, _ in Counter(part.tolist()).most_common(10)} for part in np.split(drawn, 4)]
    # Two are kept by construction; by chance of the draw the tenth may change places with the eleventh.
    assert all(1 <= len(a & b) <= 4 for a, b in zip(tops, tops[1:], strict=False))


def test_what_was_asked_for_last_is_asked_for_again():
    drawn = draw(recent(), adapters=500)
    assert 0.75 < hits(drawn) < 0.9
    assert hits(np.random.default_rng(0).permutation(drawn)) < 0.4


def test_a_real_order_is_kept_from_wherever_it_starts():
    ids = [f"id{i * i % 37}" for i in range(200)]
    drawn = draw(real_order(ids), adapters=1000).tolist()
    assert len(set(drawn)) == len(set(ids))
    same = [a == b for a, b in zip(drawn, drawn[200:], strict=False)]
    assert all(same)  # it begins again after its end
    few = draw(real_order(ids), adapters=5)
    assert set(few.tolist()) == set(range(5))


def test_a_client_has_its_own_adapters():
    starts = SessionStarts(np.arange(6.0), np.array([0, 1, 2, 0, 1, 2]))
    rng = np.random.default_rng(0)
    assert by_client(2, starts, rng).tolist() == [0, 1, 0, 0, 1, 0]
    many = np.concatenate([by_client(8, starts, rng) for _ in range(50)])
    clients = np.tile(starts.clients, 50)
    assert {a: set(many[clients == a].tolist()) for a in range(3)} == {0: {0, 3, 6}, 1: {1, 4, 7}, 2: {2, 5}}
    with pytest.raises(ConfigError, match="no clients"):
        by_client(2, SessionStarts(np.arange(3.0)), rng)


@pytest.mark.parametrize(
    "text, law",
    [
        ("uniform", uniform),
        ("zipf:1.2", zipf(1.2)),
        ("skewed:0.3", skewed(0.3)),
        ("drift:60", drift(60)),
        ("real", recent()),
    ],
)
def test_a_law_is_named_on_the_command_line(text: str, law: Popularity):
    assert draw(popularity.parse(text)).tolist() == draw(law).tolist()


def test_the_real_order_comes_from_the_files_when_there_are_any(tmp_path: Path):
    _public.gentd(tmp_path)
    drawn = draw(popularity.parse("real", tmp_path))
    assert drawn.tolist() == draw(real_order(["x", "x", "y", "x", "z"])).tolist()


@pytest.mark.parametrize("text", ["zipff", "zipf:a", "zipf:0", "uniform:3", "geometric:0.5", "power:-1", "skewed:nan"])
def test_a_wrong_law_is_one_clear_line(text: str):
    with pytest.raises(ConfigError, match="popularity"):
        popularity.parse(text)
