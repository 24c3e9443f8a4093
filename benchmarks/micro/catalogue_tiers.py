"""A server's start and its first token by the tier of its adapter, over the large catalogue of `zipf`."""

from __future__ import annotations

import math

from benchmarks.micro import tiers, zipf
from benchmarks.micro.tiers import Size, first_tokens, started
from benchmarks.runner import Options

# 10,000 adapters; the host tier holds about 200 of them, the device 64. Starts of each tier, enough for every rank.
FULL = Size(zipf.FULL.spec, zipf.RANKS, zipf.FULL.adapters, zipf.FULL.held, 64, 100, 0.0, 0.0, 0)
QUICK = Size(zipf.QUICK.spec, zipf.RANKS, zipf.QUICK.adapters, 8, 4, 3, 0.0, 0.0, 0)


def run(options: Options) -> None:
    """A start, and lone requests for adapters of the disk, the host and the device in turn."""
    size, written = (QUICK, zipf.QUICK) if options.quick else (FULL, zipf.FULL)
    folder = options.folder("zipf")  # both studies read the same files
    zipf.write(folder, written)
    facts = {"ranks": list(size.ranks), "adapters": size.adapters, "host": size.host, "device": size.device}
    records = options.records(f"catalogue-tiers-{options.dtype}", facts)
    settings = {"model.path": str(folder / "model"), "model.name": size.spec.name, "model.dtype": options.dtype}
    settings |= {"adapters.dir": str(folder / "adapters"), "model.max_model_len": 4 * tiers.PROMPT, **options.settings}
    with started(size, math.ceil(zipf.mean_blocks(size.spec)), 1, settings) as asking:
        if not records.has(cell="start"):
            phases = {f"{name}_s": seconds for name, seconds in asking.start_s.items()}
            records.add("start", "server", 0, {"seconds": sum(asking.start_s.values()), **phases})
        first_tokens(asking, records, "catalogue", tiers.DISKS[0], size.starts)
