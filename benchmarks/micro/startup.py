"""Seconds from the start of a server's process until it is ready.

cached   every program is on the disk, as after the first start
cold     the directory of compiled programs is empty
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import R1, R1_QUICK, prepare
from benchmarks.peers.ours import OverGrpc
from benchmarks.runner import Options
from jlora.loadgen.rounds import Sample, Side


def run(options: Options) -> None:
    """Starts the server of R1 both ways."""
    workload = prepare(R1_QUICK if options.quick else R1, options.folder("r1") / "workload")
    records = options.records(f"startup-{options.dtype}", {"workload": workload.plan.describe()})

    def start(programs: Path | str) -> Sample:
        began = time.perf_counter()
        with OverGrpc(workload, options.dtype, {**options.settings, "serve.compile_cache": programs}):
            return {"seconds": time.perf_counter() - began}

    def cold() -> Sample:
        with TemporaryDirectory() as empty:
            return start(empty)

    with TemporaryDirectory() as programs:
        start(programs)  # not counted: compiles
        sides = [Side("cached", lambda: start(programs)), Side("cold", cold)]
        records.measure("rounds", sides, options.budget(5))
