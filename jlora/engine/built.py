"""An engine that is ready to step, and what its surroundings need to know of it. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jlora.adapters.catalogue import Catalogue
from jlora.engine.engine import Engine
from jlora.engine.ports import Parts
from jlora.engine.sources import Reader
from jlora.replica import ReplicaInfo

if TYPE_CHECKING:  # it imports jax; a simulation has another
    from jlora.engine.runner import Runner


@dataclass(frozen=True, slots=True)
class Built:
    """What `jlora.engine.build` makes."""

    engine: Engine
    parts: Parts
    runner: Runner
    info: ReplicaInfo
    reader: Reader
    catalogue: Catalogue
