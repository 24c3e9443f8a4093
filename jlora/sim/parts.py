"""What a simulated router keeps of a request, of a plan of moves, and of a replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jlora.cluster.balance import Move
from jlora.cluster.requests import Routed
from jlora.cluster.routing import policy as routing
from jlora.sim.member import Member
from jlora.sim.replay import Ask
from jlora.sim.trace import Turn


@dataclass(slots=True)
class Live:
    """A request that the router has sent and that has not ended.

    Attributes:
        routed: the router's own record: what it has delivered, and the attempt under way.
        asked: of that attempt; outputs: tokens that it has delivered, None before the first.
    """

    turn: Turn
    ask: Ask
    routed: Routed
    chain: Sequence[int]
    asked: routing.Ask
    outputs: int | None = None

    @property
    def name(self) -> str:
        """The request's at its replica."""
        return f"{self.routed.request.id}+{self.routed.rid}"


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves of a plan that wait for their adapters. `asked`: when the adapters were asked for last."""

    moves: Sequence[Move]
    until: float
    asked: float = -math.inf


@dataclass(slots=True)
class Side:
    """What the fleet keeps of one replica, until it is killed.

    Attributes:
        names: its requests by name; handles: as its engine knows them.
        killed: when; what it would have said later is never heard.
    """

    member: Member
    wakes: float = math.inf  # the valid one of its wakes in the heap
    spoke: float = -math.inf
    names: dict[str, Live] = field(default_factory=dict)
    handles: dict[str, int] = field(default_factory=dict)
    killed: float = math.inf

    @property
    def up(self) -> bool:
        return math.isinf(self.killed)
