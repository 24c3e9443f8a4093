"""What a simulated router has around it: delays, placement, balance, losses. No jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jlora.cluster.asking import LOOK_S
from jlora.cluster.balance import Terms
from jlora.cluster.routing.ways import Ways
from jlora.sim.losses import Loss
from jlora.sim.member import Member
from jlora.sim.placing import Placing


@dataclass(frozen=True, slots=True)
class Balance:
    """Moves of requests between replicas.

    Attributes:
        every_s: between two plans; solve_s: from a view to its moves, whatever the solver has taken.
    """

    terms: Terms = Terms(limit_s=math.inf)
    every_s: float = 1.0
    solve_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Wires:
    """What a router knows of the service beside its messages.

    Attributes:
        ranks: of the adapters, by index.
        delay_s: of a message, each way.
        placing: moves adapters between the replicas.
        every_s: between two of its time steps; look_s: between two of its looks.
        balance: moves requests between them; None: never.
        losses: replicas that are killed, in the order of their times.
        again: makes a killed replica anew, by its name.
        sizes: blocks of the adapters, by index; empty: none counts.
        ways: of adapters to the device, for the balance.
    """

    ranks: Sequence[int]
    delay_s: float = 0.0
    placing: Placing | None = None
    every_s: float = 60.0
    look_s: float = LOOK_S
    balance: Balance | None = None
    losses: Sequence[Loss] = ()
    again: Callable[[str], Member] | None = None
    sizes: Sequence[int] = ()
    ways: Ways = Ways()
