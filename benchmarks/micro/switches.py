"""What merging costs on this device: seconds of a switch, and of a decode step merged and unmerged.

One adapter is merged into the weights of the real runner and taken out again, piece by piece, with each piece
waited for. A merged adapter's requests run the base's launches. The weights' digests prove every switch.

*While serving*: the engine does the same between the steps of a full batch of the adapter's requests. It merges when
the last request for the base is gone, and takes the adapter out when another one comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.runner import Options
from jlora import config as configuration
from jlora.doctor.engine import random_adapter
from jlora.engine import share
from jlora.engine.batch import Launch
from jlora.engine.build import Built, build, compile_rest
from jlora.engine.merger import Merger
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_adapter, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.types import Request, SamplingParams

RANKS = (8, 64)
STEPS = 4  # of a sample
CALM, AFTER = 12, 4  # steps between switches, and those after a switch that may still wait for it
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
    for rank in RANKS:
        path = folder / f"rank{rank}"
        write_adapter(path, spec, rank, 0)
        built = compile_rest(build(configuration.load(None, {**settings, **_hot(path)})), progress=True)
        try:
            play = Side("serving", partial(_serving, built))
            records.measure(f"rank {rank}, while serving", [play], options.budget(7))
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


def _hot(path: Path) -> dict[str, Any]:
    """An adapter that is merged except while others are there."""
    return {"adapters.paths.hot": str(path), "engine.merge": "hot", "engine.merge_starve_s": 1e-3}


def _serving(built: Built) -> Sample:
    """Seconds between the ends of steps of a full batch: of usual ones, and of the slowest while weights change."""
    engine, clock, rows = built.engine, built.parts.clock, built.info.config.engine.max_seqs
    switching = engine._switching
    assert switching is not None
    handles = [engine.submit(_request(built, f"{i}", "hot")) for i in range(rows - 1)]
    base = engine.submit(_request(built, "base"))
    seconds: dict[str, list[float]] = {"unmerged": [], "merge": [], "merged": [], "unmerge": []}
    state, since, ended = "unmerged", 0, clock()
    while True:
        full = len(engine.step()) >= rows - 1  # else prompts are read
        began, ended = ended, clock()
        if full:
            seconds[state].append(ended - began)
        changes = switching.moved or 0 < switching.merged.done < switching.merged.pieces
        since = 0 if changes else since + 1
        if state == "unmerged" and len(seconds[state]) == CALM:
            engine.abort(base)
            state, since = "merge", -AFTER
        elif state == "merge" and since == AFTER:
            assert switching.merged.whole, "the adapter is not merged"
            state = "merged"
        elif state == "merged" and len(seconds[state]) == CALM:
            base = engine.submit(_request(built, "base"))
            state, since = "unmerge", -AFTER
        elif state == "unmerge" and since == AFTER:
            assert not switching.merged.done, "the adapter is not taken out"
            break
        assert engine.busy, "the requests have ended before the adapter was taken out"
    for handle in (*handles, base):
        engine.abort(handle)
    while engine.busy:
        engine.step()
    usual = {f"{name}_step_s": median(seconds[name]) for name in ("unmerged", "merged")}
    return usual | {f"{name}_longest_s": max(found) for name, found in seconds.items()}


def _request(built: Built, name: str, adapter: str | None = None) -> Request:
    tokens = min(256, built.reader.spec.max_len - 8)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(name, (3, 4, 5, 6), sampling, adapter, bypass_prefix_cache=True)
