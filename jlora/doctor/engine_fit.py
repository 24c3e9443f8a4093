"""`jlora doctor fit --model DIR`: an engine's step times, and how well they are predicted.

Scenes of one seed and some ranks are fitted; scenes of another seed and other ranks, which no fit has seen, tell
its error. All are played in turn, round after round.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from jlora import config as configuration
from jlora import machine
from jlora.cache.tree import ADAPTER
from jlora.doctor import launches
from jlora.doctor.launches import Fit, caraserve, noise, quality
from jlora.doctor.profile import Profile, Scene, Space, Timed, joined
from jlora.engine import device
from jlora.engine.build import Built, build, compile_rest, programs_of
from jlora.engine.cold_start import Chooser
from jlora.engine.plan import ROW
from jlora.errors import ConfigError
from jlora.step_model import FITTED, FittedSteps, Help

RANKS = {"fit": (8, 16, 32, 64, 128), "held": (12, 24, 48, 96)}
SEEDS = {"fit": 1, "held": 2}
SETTINGS = {
    "engine.cold_start": "auto",
    "engine.step_model": "",
    "engine.merge": "off",
    "cache.prefix_reuse": False,
    "cache.monitor_s": 60,
}
LONG = 0.12  # of a round's time, for scenes of long contexts
MANY = 64  # blocks of the copy that tells the link
KINDS = ("decode", "prompt", "mixed")

Played = list[tuple[Scene, list[Timed]]]  # scenes and their steps


@dataclass(frozen=True, slots=True)
class Course:
    """How much is played.

    Attributes:
        scenes: of each set, for every compiled form.
        rounds: after the one that warms up; no round begins that would end later than `minutes` after the start.
    """

    scenes: Mapping[str, int]
    rounds: int
    minutes: float


FULL = Course({"fit": 2, "held": 1}, 5, 4.0)
QUICK = Course({"fit": 1, "held": 1}, 2, 1.0)


@dataclass(frozen=True, slots=True)
class Found:
    """The fit, the steps of both sets, and a row of R² and errors for every form and kind of step."""

    steps: FittedSteps
    timed: Mapping[str, list[Timed]]
    rows: list[dict[str, Any]]

    @property
    def context(self) -> int:
        """The most tokens of context that the decoding sequences of a fitted step had in all."""
        return max((step.decode.context for step in self.timed["fit"] if step.decode), default=0)


def run(built: Built, course: Course, say: Callable[[str], None] = lambda what: None) -> Found:
    """Plays, fits and judges. `built` has no compilations left, reuses no prefix, and serves no other requests."""
    timed = play(built, course, say)
    buckets = built.runner.builder.buckets
    found = launches.fit(timed["fit"], buckets.decode, buckets.prefill)
    rows = judge(found, timed, buckets.decode)
    return Found(_record(built, found, rows), timed, rows)


def started(path: str, settings: Mapping[str, Any]) -> Built:
    """An engine with nothing left to compile. Raises what `build` raises."""
    return compile_rest(build(configuration.load(None, {**settings, **SETTINGS, "model.path": path})), progress=True)


def check(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a setting that the measurement would replace."""
    for key in settings:
        if key in SETTINGS:
            raise ConfigError(
                f"--set {key}={settings[key]}: must be left out: the fit runs with {key}={SETTINGS[key]!r}"
            )


def ranks_of(name: str, most: int) -> tuple[int, ...]:
    """Of a set's adapters, in an engine that takes ranks up to `most`."""
    return tuple(rank for rank in RANKS[name] if rank <= most) or (most,)


def file_name(steps: FittedSteps) -> str:
    """One for each model and number of chips. A hub's model has a name with "/"."""
    return f"fit-{steps.spec.name.replace('/', '--')}-tp{steps.chips}.json"


def play(built: Built, course: Course, say: Callable[[str], None]) -> dict[str, list[Timed]]:
    """The steps of both sets."""
    profile, began, longest = Profile(built), time.monotonic(), 0.0
    most = built.info.config.adapters.max_rank
    spaces = {name: Space.of(built, ranks_of(name, most)) for name in course.scenes}
    rngs = {name: np.random.default_rng(SEEDS[name]) for name in spaces}
    sets = {name: _untimed(space.scenes(rngs[name], course.scenes[name])) for name, space in spaces.items()}
    for turn in range(course.rounds + 1):
        if turn > 2 and time.monotonic() - began + longest > 60 * course.minutes:
            break
        start = time.monotonic()
        _round(profile, sets)
        if turn == 0:  # which tells how much context there is time for
            tokens = int(LONG * profile.took_s * profile.speed / len(sets))
            more = {name: _untimed(space.long(rngs[name], tokens)) for name, space in spaces.items()}
            _round(profile, more)
            sets = {name: [*scenes, *more[name]] for name, scenes in sets.items()}
        longest = time.monotonic() - start
        say(f"round {turn} of {course.rounds}: {longest:.0f} s")
    played = {name: [step for _, steps in scenes for step in joined(steps)] for name, scenes in sets.items()}
    return {name: [step for step in steps if len(step.seconds) > 1] for name, steps in played.items()}


def _untimed(scenes: Sequence[Scene]) -> Played:
    return [(scene, []) for scene in scenes]


def _round(profile: Profile, sets: Mapping[str, Played]) -> None:
    """Every scene once; the sets take turns."""
    for scenes in itertools.zip_longest(*sets.values()):
        for scene, steps in filter(None, scenes):
            profile.run(scene, steps)


def judge(found: Fit, timed: Mapping[str, list[Timed]], decode: tuple[int, ...]) -> list[dict[str, Any]]:
    """R² and errors of our form, and of CaraServe's for steps that decode, on both sets."""
    forms = {"ours": (found.seconds, (*KINDS, "all"))}
    decoding = [step for step in timed["fit"] if step.kind == "decode"]
    forms |= {name: (line, ("decode",)) for name, line in caraserve(decoding, decode).items()}
    rows = []
    for name, (predict, kinds) in forms.items():
        for which, steps in timed.items():
            for kind in kinds:
                some = [step for step in steps if kind in (step.kind, "all")]
                if len(some) > 1:
                    rows.append({"form": name, "set": which, "kind": kind, **asdict(quality(predict, some))})
    for which, steps in timed.items():
        rows.append({"form": "noise", "set": which, "kind": "all", **asdict(noise(steps))})
    return rows


def _record(built: Built, found: Fit, rows: list[dict[str, Any]]) -> FittedSteps:
    spec, layout, config = built.reader.spec, built.reader.layout, built.info.config
    space = Space.of(built, (64,))
    manager = built.parts.scheduler.manager
    helps = manager.leases.gate.helps
    assert isinstance(helps, Chooser)  # SETTINGS
    costs = helps.costs
    return FittedSteps(
        format=FITTED,
        device=device.name_of(jax.devices()[0]),
        chips=config.model.tp,
        spec=spec,
        block_tokens=layout.block_tokens,
        device_blocks=layout.blocks - 1,
        row_tokens=ROW,
        rank_blocks=space.blocks[0] / 64,
        link_bps=layout.block_bytes * MANY / manager.policy.meter.load_s(ADAPTER, MANY),
        link_gbps=config.cache.link_gbps,
        jax=jax.__version__,
        fixed_s=found.fixed_s,
        decode=found.decode,
        prompt=found.prompt,
        programs=programs_of(config, spec, layout),
        help=Help(*((line.fixed, line.each) for line in (costs.place, costs.block, costs.parts))),
        facts={
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "quality": rows,
        },
    )
