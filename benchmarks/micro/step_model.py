"""What `jlora doctor fit --model` predicts of steps that it has not seen, beside CaraServe's two forms.

A record per step: its launches, the ranks of its sequences, its seconds in every round, and what was predicted.
The fitted file goes beside the records: step-MODEL.json.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.records import Records
from benchmarks.runner import Options
from jlora.doctor import engine_fit, launches
from jlora.doctor.engine_fit import FULL, QUICK, Found
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_model
from jlora.model.spec import ModelSpec

SETTINGS = {"cache.hbm_blocks": 2048, "cache.host_blocks": 4096}


def run(options: Options) -> None:
    """One course, of as many rounds as asked for, on the random 125M model or that of `--set model.path=DIR`."""
    spec = TINY if options.quick else LLAMA_100M
    path = options.settings.get("model.path") or str(_written(options.folder("step-model"), spec))
    settings = {**SETTINGS, "model.dtype": options.dtype, **options.settings}
    course = QUICK if options.quick else FULL
    course = replace(course, rounds=options.rounds or course.rounds)
    told = {"model": Path(path).name, "rounds": course.rounds, "scenes": dict(course.scenes)}
    records = options.records(f"step-model-{options.dtype}", told)
    if records.lines:
        return
    built = engine_fit.started(path, settings)
    try:
        found = engine_fit.run(built, course, lambda what: print(what, flush=True))
    finally:
        built.engine.close()
    keep(found, records, options.out)


def keep(found: Found, records: Records, out: Path) -> None:
    """Writes the fitted file, a record per step, and how well each form predicts."""
    found.steps.write(out / f"step-{found.steps.spec.name}.json")
    for which, steps in found.timed.items():
        for i, step in enumerate(steps):
            sample = {"kind": step.kind, "seconds": step.seconds, "ours_s": found.steps.seconds(*step.loads)}
            loads = {"decode": step.decode, "prompt": step.prompt, "ranks": step.ranks}
            records.add(which, "step", i, {**sample, **loads, "padded": launches.padded(step)})
    for i, row in enumerate(found.rows):
        told = {key: value for key, value in row.items() if row["form"] != "noise" or key != "r2"}  # NaN
        records.add("quality", row["form"], i, told)


def _written(folder: Path, spec: ModelSpec) -> Path:
    write_model(folder / spec.name, spec, 0)
    return folder / spec.name
