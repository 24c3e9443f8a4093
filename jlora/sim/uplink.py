"""A replica's way out to the others under virtual clocks: its transfers share it equally. No jax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Coming(Protocol):
    """Something on its way to a replica."""

    @property
    def ends(self) -> float:
        """When it is there, as far as that is known."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """What comes on a way of its own. `ends`: when it is there."""

    ends: float


@dataclass(slots=True, eq=False)
class Transfer:
    """One of an uplink's. `left`: seconds that it still needs when it has the uplink alone."""

    uplink: Uplink
    left: float
    ended: float = math.inf

    @property
    def ends(self) -> float:
        """When it is there, unless others begin meanwhile: then later."""
        return min(self.ended, self.uplink.ends(self.left))


class Uplink:
    """The transfers of one replica to others."""

    def __init__(self) -> None:
        self._at = -math.inf  # up to when the transfers have their parts
        self._under_way: list[Transfer] = []

    def begin(self, now: float, seconds: float) -> Transfer:
        """Something that takes so many seconds alone. Replicas' clocks differ, so `now` may lie a little back."""
        self._advance(now)
        transfer = Transfer(self, seconds)
        self._under_way.append(transfer)
        return transfer

    def end(self, transfer: Transfer, now: float) -> None:
        """Its receiver is gone: the others have its part from now on."""
        self._advance(now)
        if transfer in self._under_way:
            self._under_way.remove(transfer)

    def under_way(self, now: float) -> int:
        """Transfers that have not ended."""
        self._advance(now)
        return len(self._under_way)

    def ends(self, left: float) -> float:
        """When a transfer that needs `left` more has had it: the others have as much by then, or all they need."""
        return self._at + sum(min(left, other.left) for other in self._under_way)

    def _advance(self, now: float) -> None:
        """Gives the transfers their parts of the time until now."""
        while self._under_way:
            first = min(self._under_way, key=lambda transfer: transfer.left)
            if (end := self.ends(first.left)) > now:
                self._share((now - self._at) / len(self._under_way))
                break
            first.ended, self._at = end, end
            self._share(first.left)
            self._under_way.remove(first)
        self._at = max(self._at, now)

    def _share(self, seconds: float) -> None:
        """Each has had the uplink alone for so long, as it were."""
        for transfer in self._under_way:
            transfer.left -= max(0.0, seconds)
