"""What a policy sees of the service: frozen records, as old as the last messages of the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Health = Literal["loading", "up", "suspect", "draining", "down"]
THERE = ("HBM", "HOST")  # tiers of an adapter that is in memory


@dataclass(frozen=True, slots=True)
class Held:
    """Requests that this router has at a replica and that have not ended, as its own books say.

    Attributes:
        waiting, running: largest rank of the adapter (0: the base) -> requests before, and after, their first token.
        tokens: prompt tokens of those that wait; uncached: those of them that the replica has to compute.
        context: tokens of those that run, prompts and outputs.
        wanted: adapter version key -> its largest rank, of those that wait.
    """

    waiting: Mapping[int, int] = field(default_factory=dict)
    running: Mapping[int, int] = field(default_factory=dict)
    tokens: int = 0
    context: int = 0
    uncached: int = 0
    wanted: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Requests of both kinds."""
        return sum(self.waiting.values()) + sum(self.running.values())


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica.

    Attributes:
        health: only a replica that is "up" takes requests.
        sent: requests that this router has there, those included that the last state does not know yet.
        running, waiting: sequences, of all routers.
        blocks: of its pool; host_blocks: of its host tier.
        tiers: adapter version key -> "HBM", "HOST", "LOADING" or "DISK".
        ranks: adapter version key -> its largest rank.
        step_s: mean time of a step, as messages show it.
        peer_bps, path_bps: bytes per second at which it has fetched adapters, from other replicas and from their
            paths; 0: it has not said.
        held: what `sent` consists of.
    """

    name: str
    health: Health
    sent: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    blocks: int = 0
    host_blocks: int = 0
    tiers: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    held: Held = Held()
    peer_bps: float = 0.0
    path_bps: float = 0.0


View = Mapping[str, ReplicaView]
