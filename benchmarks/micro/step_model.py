"""What `jlora doctor fit --model` predicts of steps that it has not seen, beside CaraServe's two forms.

A record per step: its launches, the ranks of its sequences, its seconds in every round, and what was predicted.
The fitted file goes beside the records: step-MODEL.json.
"""

from __future__ import annotations

from benchmarks.runner import Options
from jlora.doctor import engine_fit, launches
from jlora.doctor.engine_fit import FULL, QUICK
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_model

SETTINGS = {"cache.hbm_blocks": 2048, "cache.host_blocks": 4096}


def run(options: Options) -> None:
    """One course; --rounds and --minutes are the course's own."""
    spec = TINY if options.quick else LLAMA_100M
    folder = options.folder("step-model")
    write_model(folder / "model", spec, 0)
    settings = {**SETTINGS, "model.dtype": options.dtype, **options.settings}
    course = QUICK if options.quick else FULL
    records = options.records(
        f"step-model-{options.dtype}", {"model": spec.name, "rounds": course.rounds, "scenes": dict(course.scenes)}
    )
    if records.lines:
        return
    built = engine_fit.started(str(folder / "model"), settings)
    try:
        found = engine_fit.run(built, course, lambda what: print(what, flush=True))
    finally:
        built.engine.close()
    found.steps.write(options.out / f"step-{spec.name}.json")
    for which, steps in found.timed.items():
        for i, step in enumerate(steps):
            told = found.steps.seconds(*step.loads)
            sample = {"kind": step.kind, "seconds": step.seconds, "ours_s": told, "ranks": step.ranks}
            loads = {"decode": step.decode, "prompt": step.prompt}
            records.add(which, "step", i, {**sample, **loads, "padded": launches.padded(step)})
    for i, row in enumerate(found.rows):
        records.add("quality", row["form"], i, row)
