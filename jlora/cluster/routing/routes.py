"""Every routing policy by name, and what one is made of: the same for a router and for the simulator."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jlora.cluster.routing.caraserve import CaraServe
from jlora.cluster.routing.costs import Costs
from jlora.cluster.routing.dlora import DLora
from jlora.cluster.routing.jlora import Jlora
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.routing.policy import Policy
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.routing.simple import FirstFit, MostIdle, Random, RoundRobin
from jlora.cluster.routing.table import Table
from jlora.cluster.routing.ways import PATH_BPS, PEER_BPS, Ways
from jlora.config import Config
from jlora.errors import ConfigError
from jlora.layout import PoolLayout
from jlora.step_model import FittedSteps

log = logging.getLogger(__name__)

UNFITTED = "needs engine.step_model, a file of `jlora doctor fit --model DIR`"
LORASERVE = "loraserve"  # not in `ROUTES`: it routes by a placement that a controller makes


@dataclass(frozen=True, slots=True)
class Known:
    """What a policy is made of.

    Attributes:
        steps: predicts times; None: nobody has measured the replicas.
        slo_s: of a decode step.
        outputs: mean tokens of an answer, before a router has measured them.
        ways: of adapters to the device.
        batch: sequences that a replica runs at once.
    """

    steps: Costs | None = None
    slo_s: float = math.inf
    outputs: float = 64.0
    seed: int = 0
    ways: Ways = Ways()
    batch: int = 64

    @property
    def costs(self) -> Costs:
        """The steps. Raises ConfigError without them."""
        if self.steps is None:
            raise ConfigError(UNFITTED)
        return self.steps


ROUTES: Mapping[str, Callable[[Known], Policy]] = {
    "random": lambda known: Random(known.seed),
    "round-robin": lambda known: RoundRobin(),
    "most-idle": lambda known: MostIdle(),
    "first-fit": lambda known: FirstFit(),
    "least-loaded": lambda known: LeastLoaded(),
    "sticky": lambda known: SessionSticky(),
    "caraserve": lambda known: CaraServe(known.costs, known.slo_s, known.outputs),
    "dlora": lambda known: DLora(known.costs, known.outputs, known.batch, known.ways),
    "jlora": lambda known: Jlora(known.costs, known.slo_s, known.outputs, known.batch, ways=known.ways),
}


def policy_of(config: Config) -> Policy:
    """What `cluster.routing` names. Raises ConfigError without the step model that it needs."""
    name, slo_s, path = config.cluster.routing, config.cluster.slo_s or math.inf, config.engine.step_model
    try:
        known = Known(slo_s=slo_s, seed=config.model.seed, batch=config.engine.max_seqs)
        if path:
            steps = FittedSteps.read(Path(path))
            if steps.chips != config.model.tp:  # nothing else of the replicas is known here
                log.warning("step model %s: chips = %d, model.tp = %d: fit again", path, steps.chips, config.model.tp)
            known = replace(known, steps=steps, ways=ways_of(steps))
        return _placed(known) if name == LORASERVE else ROUTES[name](known)
    except ConfigError as e:
        raise ConfigError(f"cluster.routing = {name!r}: {e}") from e


def _placed(known: Known) -> Table:
    """By a placement, which has its operating points from the step model. Raises ConfigError."""
    if known.steps is None:
        raise ConfigError(UNFITTED)
    return Table({}, known.seed)


def ways_of(steps: FittedSteps) -> Ways:
    """Of adapters on q, k, v and o. Replicas tell how fast they fetch as soon as they have."""
    size = steps.rank_blocks * PoolLayout.of(steps.spec, 2, steps.block_tokens, steps.chips).block_bytes
    return Ways(size / steps.link_bps, size, PEER_BPS, PATH_BPS)
