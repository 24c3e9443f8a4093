"""What merging costs on this device: seconds of a switch, and of a decode step merged and unmerged.

One adapter is merged into the weights of the real runner and taken out again, piece by piece, with each piece
waited for. A merged adapter's requests run the base's launches. The weights' digests prove every switch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax

from benchmarks.runner import Options
from jlora import config as configuration
from jlora.doctor.engine import random_adapter
from jlora.engine import share
from jlora.engine.batch import Launch
from jlora.engine.build import Built, build, compile_rest
from jlora.engine.merger import Merger
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_model
from jlora.loadgen.rounds import Sample, Side

RANKS = (8, 64)
STEPS = 4  # of a sample
SETTINGS = {
    "engine.max_seqs": 32, "engine.max_step_tokens": 64, "cache.hbm_blocks": 1024, "cache.host_blocks": 512,
    "engine.cold_start": "wait",
}  # fmt: skip


def run(options: Options) -> None:
    """Every rank, as many rounds as asked for (7)."""
    spec = TINY if options.quick else LLAMA_100M
    folder = options.folder("switches")
    write_model(folder / "model", spec, 0)
    settings = {**SETTINGS, "model.path": str(folder / "model"), "model.dtype": options.dtype, **options.settings}
    config = configuration.load(None, {**settings, "engine.merge": "auto"})
    records = options.records(f"switches-{options.dtype}", {"ranks": list(RANKS), "steps": STEPS})
    built = compile_rest(build(config), progress=True)
    try:
        merger = _merger(built)
        for rank in RANKS:
            sides = [
                *(Side(name, partial(_steps, built, launch)) for name, launch in _launches(built, rank).items()),
                Side("switch", partial(_switch, built, merger, rank)),
            ]
            records.measure(f"rank {rank}", sides, options.budget(7))
    finally:
        built.engine.close()


def _merger(built: Built) -> Merger:
    """The engine's; the engine itself serves nothing."""
    switching = built.engine._switching
    assert switching is not None and isinstance(switching._merger, Merger)
    return switching._merger


def _launches(built: Built, rank: int) -> dict[str, Launch]:
    builder, layout = built.runner.builder, built.reader.layout
    return {"unmerged": share.with_adapter(builder, layout, rank), "merged": share.without(builder)}


def _steps(built: Built, launch: Launch) -> Sample:
    """Seconds of the forward pass of a full decode step."""
    began = time.perf_counter()
    for _ in range(STEPS):
        jax.block_until_ready(built.runner.forward(launch))
    return {"seconds": (time.perf_counter() - began) / STEPS, "rows": launch.form.rows}


def _switch(built: Built, merger: Merger, rank: int) -> Sample:
    """Seconds of measuring, merging and taking out, of their longest steps, and what of it the host keeps."""
    new = random_adapter(built.reader.spec, built.reader.layout, "merged", rank)
    began = time.perf_counter()
    merger.begin(new.projections, lambda blocks, layers: new.data[blocks, layers])
    begin_s = time.perf_counter() - began
    probes = _measure(merger)
    moved = merger.moved
    into = [_timed(merger.forward, built) for _ in range(merger.pieces)]
    kept = merger.host_bytes
    out = [_timed(merger.back, built) for _ in range(merger.pieces)]
    began = time.perf_counter()
    whole = merger.whole()
    assert whole and not merger.reloads, "the weights are not what they were"
    return {
        "begin_s": begin_s,
        "measure_s": sum(probes),
        "longest_probe_s": max(probes),
        "merge_s": sum(into),
        "unmerge_s": sum(out),
        "proof_s": time.perf_counter() - began,
        "longest_s": max(into + out),
        "pieces": merger.pieces,
        "host_bytes": kept,
        "moved_bytes": merger.moved - moved,
    }


def _measure(merger: Merger) -> list[float]:
    """Measures what merging the adapter would lose; seconds of each step of that."""
    seconds, loss = list[float](), None
    while loss is None:
        began = time.perf_counter()
        loss = merger.measure()
        jax.block_until_ready(jax.live_arrays())  # it only dispatches
        seconds.append(time.perf_counter() - began)
    return seconds


def _timed(change: Callable[[], None], built: Built) -> float:
    began = time.perf_counter()
    change()
    jax.block_until_ready(jax.tree.leaves(built.runner.weights.params))
    return time.perf_counter() - began
