"""The longest gap between tokens of running streams while a server compiles programs in the background, and after.

A server is ready with the programs that serve every request, and compiles the others beside its steps. XLA compiles
without Python's lock, but tracing a program holds it, and both take cores from the steps. Each round starts a server
of its own without compiled programs. `after` lasts as long as the compiling did: a longer look finds longer gaps.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from tempfile import TemporaryDirectory

from benchmarks.gaps import loads
from benchmarks.gaps.streams import Monitor, Streams, calm, during
from benchmarks.runner import Options
from jlora.loadgen.checkpoints import write_model
from jlora.loadgen.rounds import Round
from jlora.loadgen.server import ServerProcess, flags_of

SETTINGS = {"engine.max_step_tokens": 512, "cache.block_tokens": 16, "serve.log_level": "warning"}
MODULE = ("benchmarks.servers", "forgetful")
LOOK_S = 0.1  # between two looks at what is left
WHILE, AFTER = "while programs compile", "after"


def run(options: Options) -> None:
    """Starts so many servers, three unless `--rounds` says otherwise. Raises RuntimeError if nothing is left."""
    plan = loads.QUICK if options.quick else loads.FULL
    records = options.records("compiling-python", {"plan": asdict(plan)})
    folder = options.folder("gaps").resolve()
    write_model(folder / "model", plan.spec, 0)
    settings = {**SETTINGS, "engine.max_seqs": plan.streams, "cache.hbm_blocks": plan.blocks, **options.settings}
    for number in range(options.rounds or (1 if options.quick else 3)):
        if records.has(round=number):
            continue
        with TemporaryDirectory() as empty:
            flags = flags_of({}, {**settings, "serve.compile_cache": empty})
            with ServerProcess(["--model", str(folder / "model"), *flags], MODULE) as server:
                found = asyncio.run(measure(server, plan))
        for name, sample in found.items():
            records.add("gaps", name, number, sample)


async def measure(server: ServerProcess, plan: loads.Plan) -> Round:
    """What streams and monitor see from the first tokens until all is compiled, and for as long afterwards."""
    streams, monitor = Streams(server.address, plan.streams, plan.tokens), Monitor(server.address, server.pid)
    left = (await monitor.info()).programs_left
    if not left:
        raise RuntimeError("no program is left to compile once the server is ready: raise engine.max_seqs")
    async with streams.running():
        compiling = await during(streams, monitor, asyncio.ensure_future(_all_compiled(monitor)))
        await calm(streams, plan.pause_s)
        after = await during(streams, monitor, asyncio.ensure_future(asyncio.sleep(compiling["seconds"])))
    await monitor.close()
    return {WHILE: {**compiling, "programs": left}, AFTER: {**after, "programs": 0}}


async def _all_compiled(monitor: Monitor) -> None:
    while (await monitor.info()).programs_left:
        await asyncio.sleep(LOOK_S)
