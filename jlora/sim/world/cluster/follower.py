"""A router that follows the controller: the product's own directory, whose threads are fibers."""

from __future__ import annotations

from collections.abc import Sequence

from jlora.cluster.directory import Version
from jlora.cluster.proto import directory_pb2 as proto
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.sim.world.cluster.adapters import CONTROLLER, Adapters, Told
from jlora.sim.world.cluster.fibers import Fibers
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.net import Net
from jlora.sim.world.cluster.waits import Waits


class Follower(RemoteDirectory):
    """The directory of one life of a router."""

    def __init__(self, adapters: Adapters, net: Net, loop: Loop, router: str, told: Told):
        """`router`: its name at the controller, unlike that of every other life."""
        self.fibers = Fibers(net.time, loop)
        super().__init__(CONTROLLER, router, Waits(net, loop, self.fibers), self.fibers, net.time)
        self._adapters, self._loop, self._told = adapters, loop, told

    @property
    def began(self) -> bool:
        """Whether a table has come."""
        return bool(self._epoch)

    @property
    def over(self) -> bool:
        """Whether its process is gone."""
        return self._loop.dead

    @property
    def table(self) -> dict[str, Version]:
        """What requests get, by name."""
        return self._versions

    @property
    def used(self) -> list[str]:
        """Keys of the versions that requests use."""
        return list(self._requests)

    def follows(self, seconds: float = 0.0) -> bool:
        """Whether the controller that lives has known it for so long."""
        uses = self._adapters.uses
        return uses is not None and uses.knows(self._router, seconds)

    def _apply(self, parts: Sequence[proto.Table]) -> None:
        super()._apply(parts)
        for part in parts:
            for entry in part.entries:
                self._told(entry.info.name, entry.info.digest)
