"""Seconds from the start of a server's process until it is ready, and until all its programs are compiled.

cached   every program is on the disk, as after the first start
cold     the directory of compiled programs is empty
"""

from __future__ import annotations

import shutil
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

    with TemporaryDirectory() as home:
        programs = Path(home) / "programs"

        def start() -> Sample:
            began = time.perf_counter()
            server = OverGrpc(workload, options.dtype, {**options.settings, "serve.compile_cache": programs})
            ready = time.perf_counter() - began
            phases = {f"{name}_s": seconds for name, seconds in server.info().start_s.items()}
            with server:
                return {"seconds": ready, "all_compiled_s": time.perf_counter() - began, **phases}

        def cold() -> Sample:
            shutil.rmtree(programs, ignore_errors=True)
            return start()

        records.measure("rounds", [Side("cold", cold), Side("cached", start)], options.budget(5))
