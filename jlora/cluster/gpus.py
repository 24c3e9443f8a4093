"""Which GPUs of this machine each of its replicas takes: jax reserves the memory of every GPU that it sees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jlora import machine
from jlora.config import Config
from jlora.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def shares(config: Config, system: Path = Path("/")) -> list[dict[str, str]]:
    """What to add to the environment of each replica; nothing where they do not run on NVIDIA's GPUs.

    Replica i takes the GPUs i * tp to (i + 1) * tp - 1: of CUDA_VISIBLE_DEVICES where that is set, else of all.
    Raises ConfigError if there are too few.
    """
    replicas, tp = config.cluster.replicas, config.model.tp
    found = _found({**os.environ, **config.cluster.env}, system)
    if not found:
        return [{} for _ in range(replicas)]
    if len(found) < replicas * tp:
        raise ConfigError(
            f"cluster.replicas = {replicas} with model.tp = {tp} need {replicas * tp} GPUs, there are {len(found)}: "
            f"lower cluster.replicas, or name a GPU several times in {VISIBLE} and lower {machine.GPU_SHARES[0]}"
        )
    return [{VISIBLE: ",".join(found[i * tp : (i + 1) * tp])} for i in range(replicas)]


def _found(environment: Mapping[str, str], system: Path) -> list[str]:
    """The GPUs that a replica of this environment would see; none where jax is not to use, or has not, CUDA."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    count = len(list(system.glob("dev/nvidia[0-9]*")))
    if not count or not any(map(machine.version, machine.PLUGINS)):
        return []
    if VISIBLE not in environment:
        return [str(i) for i in range(count)]  # CUDA numbers those that it finds, whatever the names of their files
    named = [name.strip() for name in environment[VISIBLE].split(",")]
    return [] if named[0] in ("", "-1") else named  # hidden
