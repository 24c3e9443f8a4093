"""What a replica's link tells, and asks, whoever fetches the replica's adapters (`jlora.cluster.peer.Fetcher`)."""

from __future__ import annotations

from typing import Protocol

from jlora.cluster.proto import link_pb2 as link


class Fetches(Protocol):
    """For the event loop's thread; neither call waits."""

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes per second from peers, and from paths; 0 where nobody knows."""
        ...

    def heard(self, version: link.Version) -> None:
        """A router names those that have a version now, which may be known here already."""
        ...


class PathsAlone(Fetches):
    """No replica is a peer of this one."""

    @property
    def rates(self) -> tuple[float, float]:
        return 0.0, 0.0

    def heard(self, version: link.Version) -> None:
        pass
