"""Operating points in the file of `jlora doctor fit`, and placements by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jlora.cli import main
from jlora.cluster.demand import Load, Told
from jlora.cluster.homes import Rule
from jlora.cluster.placement import Wanted, loraserve
from jlora.cluster.placing import Steps, points_of
from jlora.doctor import points
from jlora.sim.scenario import Work
from jlora.sim.service import Service, placed_of
from jlora.step_model import FittedSteps, Points
from tests.sim._sim import NPU, SPEC, chats
from tests.test_step_model import STEPS

SLO_S = 0.08


def with_points(by_rank: dict[int, float]) -> FittedSteps:
    found = points.added(STEPS, SLO_S).points
    assert found is not None
    return replace(STEPS, points=Points(found.of, by_rank))


def live(steps: FittedSteps, slo_s: float = 0.0) -> dict[int, float]:
    """A controller's points of ranks 8 and 128, after some traffic."""
    load = Load()
    load.told("a", Told(requests=10, prompt=400, ended=10, output=1000))
    return dict(points_of(load, Steps(steps, slo_s=slo_s), {8, 128}))


@pytest.mark.parametrize("rank", points.RANKS)
def test_a_point_is_the_largest_batch_whose_step_keeps_the_objective(rank: int):
    found = points.added(STEPS, SLO_S).points
    assert found is not None and found.of.batch == 8

    def step_s(count: int) -> float:
        return STEPS.step_s({rank: count}, count * 576, count * 4)

    count = max([n for n in range(1, 9) if step_s(n) <= SLO_S], default=1)
    assert found.by_rank[rank] == pytest.approx(5 * count / step_s(count))


def test_no_point_has_a_larger_batch_than_the_engine():
    found = points.added(STEPS, 1000.0).points
    assert found is not None
    assert found.by_rank[8] == pytest.approx(5 * 8 / STEPS.step_s({8: 8}, 8 * 576, 8 * 4))


def test_without_an_objective_a_step_may_take_half_as_long_again_as_one_sequence():
    found = points.added(STEPS).points
    assert found is not None and found.of.slo_s == pytest.approx(1.5 * 0.011)


def test_the_file_keeps_them_and_an_older_one_has_none(tmp_path: Path):
    path, steps = tmp_path / "steps.json", points.added(STEPS, SLO_S)
    steps.write(path)
    assert FittedSteps.read(path) == steps
    STEPS.write(path)
    path.write_text(path.read_text().replace('"points": null,', ""))
    assert '"points"' not in path.read_text() and FittedSteps.read(path) == STEPS


def test_a_live_placement_goes_by_the_files_points_and_by_the_traffic_without_them():
    known = {8: 1000.0, 128: 10.0}
    told, computed = live(with_points(known)), live(STEPS)
    assert {rank: told[rank] for rank in known} == known
    servers = [f"r{i}" for i in range(6)]
    adapters = [Wanted("small", 8, 100.0), Wanted("large", 128, 100.0)]
    by_file, by_traffic = (loraserve(servers, adapters, found) for found in (told, computed))
    assert len(by_file["large"]) > len(by_traffic["large"]) and len(by_file["small"]) < len(by_traffic["small"])


def test_points_of_another_objective_are_computed_for_the_one_that_is_set():
    steps = with_points({8: 1000.0, 128: 10.0})
    assert live(steps, SLO_S)[128] == 10.0
    assert live(steps, 0.5) == live(STEPS, 0.5)


def test_a_rank_that_the_file_lacks_has_the_point_that_the_doctor_would_have_written():
    whole, steps = points.added(STEPS, SLO_S).points, with_points({8: 1000.0})
    assert whole is not None and live(steps) == {8: 1000.0, 128: whole.by_rank[128]}


def test_a_simulated_placement_goes_by_the_files_points():
    service = Service(2, (8, 128, 8), place="loraserve")
    work = Work.of(chats(3, 2), service.ranks, NPU)
    by_file, by_trace = (
        placed_of(Rule(), service, work, steps, SPEC.sizes).points
        for steps in (with_points({8: 1000.0, 128: 10.0}), STEPS)
    )
    assert by_file == {8: 1000.0, 128: 10.0} and by_trace[128] > 10.0


def test_an_objective_below_zero_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main(["doctor", "fit", "--model", "x", "--slo-ms", "-1"])
    assert "--slo-ms -1: must be at least 0" in capsys.readouterr().err
