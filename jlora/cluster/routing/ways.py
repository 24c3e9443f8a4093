"""How long an adapter's way to a replica's device takes, by where the adapter is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jlora.cluster.routing.policy import Ask
from jlora.cluster.view import THERE, ReplicaView, View

# Bytes per second of a fetch before any were measured: from another replica, and from the path, which is read,
# checked and packed.
PEER_BPS, PATH_BPS = 1e9, 0.3e9
LEARNING = 0.3  # weight of the latest measurement of a rate
LENDS = 4  # fetches from one replica at once: each has a part of its link


@dataclass(frozen=True, slots=True)
class Ways:
    """From the device itself: nothing. From the host tier: a copy. From elsewhere: a fetch before it.

    Attributes:
        host_s: seconds per rank from the host tier to the device.
        rank_bytes: of an adapter, per rank.
        peer_bps, path_bps: bytes per second from another replica and from the path, where a replica has not told
            its own; infinity: a fetch takes no time.
    """

    host_s: float = 0.0
    rank_bytes: float = 0.0
    peer_bps: float = math.inf
    path_bps: float = math.inf

    def seconds(self, replica: ReplicaView, ask: Ask, peer: bool) -> float:
        """`peer`: some replica has the adapter in memory (`held`)."""
        return 0.0 if ask.adapter is None else self._seconds(replica, ask.adapter, ask.rank, peer)

    def behind_s(self, replica: ReplicaView, ask: Ask, peer: bool) -> float:
        """The same behind those of the adapters that requests there wait for, as if they came one after the other.

        A copy from the host tier waits for copies alone. An adapter that another request waits for is on its way.
        Where the others come from is not looked up: from a replica if this one does.
        """
        own, wanted = self.seconds(replica, ask, peer), replica.held.wanted
        if not own or ask.adapter in wanted:
            return own
        if replica.tiers.get(ask.adapter or "") == "HOST":
            return own + sum(rank * self.host_s for key, rank in wanted.items() if replica.tiers.get(key) != "HBM")
        return own + sum(self._seconds(replica, key, rank, peer) for key, rank in wanted.items())

    def _seconds(self, replica: ReplicaView, adapter: str, rank: int, peer: bool) -> float:
        tier = replica.tiers.get(adapter, "DISK")
        if tier == "HBM":
            return 0.0
        if tier == "HOST":
            return rank * self.host_s
        bps = replica.path_bps or self.path_bps
        if peer:  # a replica takes the faster way
            bps = max(bps, replica.peer_bps or self.peer_bps)
        whole = rank * (self.host_s + self.rank_bytes / bps)
        return 0.5 * whole if tier == "LOADING" else whole


def insists(peer_bps: float, path_bps: float) -> bool:
    """Whether a fetch wants a part of a busy replica's link, because its path is slower than that."""
    return path_bps < peer_bps / LENDS


def learned(bps: float, size: int, seconds: float) -> float:
    """A rate after one more fetch of so many bytes."""
    return bps if seconds <= 0 else (1 - LEARNING) * bps + LEARNING * size / seconds


def held(view: View, adapter: str | None) -> bool:
    """Whether a replica that is up has the adapter in its memory, from where others fetch it."""
    return adapter is not None and any(
        replica.health == "up" and replica.tiers.get(adapter) in THERE for replica in view.values()
    )
