"""Predictions of the first token, in plain numbers."""

from __future__ import annotations

import pytest

from jlora.cache.transfer import Meter
from jlora.cache.tree import AdapterNode
from jlora.engine.cold_start import FEW, MANY, Chooser, Cold, Costs, Line, measure, predict
from jlora.model.spec import PROJECTIONS
from tests.test_step_model import STEPS

COSTS = Costs(device=Line(0.1, 0.001), place=Line(0.02, 0.0), block=Line(0.0, 1e-5))


def cold(**fields) -> Cold:
    return Cold(**{"tokens": 100, "blocks": 10, "places": 4, "left_s": 1.0, "copy_s": 1.0, "groups": 4, **fields})


def test_without_a_wait_every_way_takes_what_the_device_takes():
    assert predict(cold(left_s=0.0, copy_s=0.0), COSTS) == pytest.approx({"wait": 0.2, "stream": 0.2, "cpu": 0.2})


def test_a_slow_copy_is_waited_for_streamed_but_for_its_last_group_or_passed_by_the_host():
    found = predict(cold(), COSTS)
    assert found == pytest.approx({"wait": 1.2, "stream": 1.05, "cpu": 0.2 + 4 * 0.02 + 10 * 1e-3})


def test_the_device_takes_over_the_groups_that_have_arrived():
    # Groups arrive at 0.075, 0.15, 0.225 and 0.3 s. The first three are the host's: 0.0725 s each.
    costs = COSTS._replace(place=Line(0.02, 0.0), block=Line(0.001, 0.0))
    found = predict(cold(left_s=0.3, copy_s=0.3), costs)
    assert found["cpu"] == pytest.approx(0.2 + (4 * 0.02 + 10 * 0.001) * 4 / 4)
    late = predict(cold(left_s=0.1, copy_s=0.1), costs)  # 0.025, 0.05, 0.075, 0.1 against steps of 0.0725
    assert late["cpu"] == pytest.approx(0.2 + (4 * 0.02 + 10 * 0.001) / 4)


def test_the_base_takes_longer_in_parts_and_the_device_longer_with_the_adapter():
    parts = predict(cold(), COSTS._replace(parts=Line(0.05, 0.0)))
    assert parts["cpu"] == pytest.approx(predict(cold(), COSTS)["cpu"] + 0.05)
    filed = Costs.fitted(STEPS)
    more_s = filed.adapted(100, 10) - filed.device.at(100)
    bare, held = (predict(cold(blocks=blocks), filed._replace(block=Line(0.0, 0.0))) for blocks in (0, 10))
    assert more_s == pytest.approx(100 * 10 * STEPS.prompt.token_s) and held["cpu"] == bare["cpu"]
    assert [held[way] - bare[way] for way in ("wait", "stream")] == pytest.approx([more_s, more_s / 4])


def test_costs_are_found_again_from_rehearsals():
    def rehearse(tokens: int, blocks: int | None) -> float:
        whole = 0.1 + 1e-3 * tokens
        if blocks is None:
            return whole
        held, parts_s = blocks * len(PROJECTIONS), 0.03 + 2e-4 * tokens
        return whole + parts_s + bool(blocks) * 4 * (0.02 + 1e-4 * tokens) + held * (1e-4 + 1e-6 * tokens)

    found = measure(rehearse, (64, 512))
    for line, wanted in zip(found, ((0.1, 1e-3), (0.02, 1e-4), (1e-4, 1e-6), (0.03, 2e-4)), strict=True):
        assert line == pytest.approx(wanted)
    assert FEW < MANY


@pytest.mark.parametrize("points", [[(64, 1.0)], [(64, 1.0), (512, 0.5)], [(64, 0.0), (512, 0.0)]])
def test_a_line_is_never_negative(points: list[tuple[int, float]]):
    line = Line.through(points)
    assert min(line) >= 0 and line.at(1000) >= line.at(1)


def test_the_host_helps_where_its_way_is_the_shortest():
    chooser = Chooser(COSTS, Meter(1e-3), 4, lambda uid: 4)
    node = AdapterNode(1, size=3)
    assert chooser(node, 1.0, 100) and not chooser(node, 0.0, 100) and not chooser(node, 0.01, 100)
    behind = chooser.cold(node, 1.0, 100)
    assert behind.left_s == 1.0 and 0 < behind.copy_s < 0.1  # other copies come before it
