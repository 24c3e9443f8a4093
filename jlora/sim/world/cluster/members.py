"""The processes of a modelled service: replicas and routers, each the product's own code on a loop of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jlora.cluster import balance
from jlora.cluster.attach import Terms
from jlora.cluster.directory import Directory
from jlora.cluster.link import LinkServicer, Stream
from jlora.cluster.peer import PeerServicer
from jlora.cluster.proto import link_pb2 as proto
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.router import Router
from jlora.cluster.routing.policy import Policy
from jlora.cluster.secret import Secret
from jlora.errors import AlreadyExists, ResourceExhausted
from jlora.replica import ReplicaInfo
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2_grpc as public
from jlora.serve.services import AdaptersServicer
from jlora.sim.world.cluster.blame import Blame
from jlora.sim.world.cluster.follower import Follower
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.model import STEP_S, Disk, ModelReplica
from jlora.sim.world.cluster.net import Net, Server, Wires
from jlora.sim.world.sites import Sites

ADOPT_S = (0.002, 0.05)  # to read an adapter
SLOW_S = (0.5, 2.0)  # from a slow disk
# The solver has all its time: how fast this machine is must not change its answer.
BALANCE = balance.Terms(queue_s=0.1, limit_s=60.0)


def router_of(request: str) -> str:
    """The router of a request, by the name that replicas give it."""
    return request.partition("@")[2].rpartition(".")[0]


@dataclass
class Grounds:
    """What the processes of a world stand on."""

    net: Net
    disk: Disk
    sites: Sites
    draw: random.Random
    info: ReplicaInfo
    blame: Blame


@dataclass
class ReplicaProcess:
    """A replica through its lives. Its address is another one in each life, or the same."""

    name: str
    grounds: Grounds
    life: int = 0
    address: str = ""
    loop: Loop = field(init=False)
    replica: ModelReplica = field(init=False)
    backend: Backend = field(init=False)
    servicer: LinkServicer = field(init=False)
    buried: list[Loop] = field(default_factory=list)
    restarts: bool = False  # somebody will start it again
    strays: dict[int, float] = field(default_factory=dict)  # requests that no stream has, and since when
    compared: int = 0  # the last handle whose request was compared with its client's

    def start(self, keep_address: bool = False) -> None:
        grounds = self.grounds
        self.life += 1
        if not keep_address or not self.address:
            self.address = f"{self.name}:{self.life}"
        self.loop = Loop(self.name, grounds.net.time)
        self.buried.append(self.loop)
        self.strays, self.restarts, self.compared = {}, False, 0
        step_s = grounds.draw.uniform(*STEP_S)
        struck = partial(grounds.blame.attempt, self.name)
        dropped = partial(grounds.blame.dropped, self.name)
        self.replica = ModelReplica(self.loop, grounds.disk, grounds.draw, grounds.info, struck, dropped, step_s)
        model: Any = self.replica
        self.backend = Backend(replica=model, started=0.0)
        self.servicer = LinkServicer(self.backend, self.name, Secret(), self._adopt, self.replica.records)
        server: Any = Server(self.loop)
        rpc.add_LinkServicer_to_server(self.servicer, server)
        rpc.add_PeerServicer_to_server(PeerServicer(lambda: model, Secret(), self._adopt), server)
        public.add_AdaptersServicer_to_server(AdaptersServicer(self.backend), server)
        grounds.net.listen(self.address, server)

    @property
    def alive(self) -> bool:
        return not self.loop.dead

    @property
    def works(self) -> bool:
        """Whether its process and its engine run."""
        return self.alive and not (self.loop.stopped or self.replica.hung or self.replica.compiling)

    @property
    def streams(self) -> list[Stream]:
        """Of the routers that are attached."""
        return list(self.servicer._streams.values())

    def kill(self, silent: bool = False) -> None:
        self.loop.kill()
        self.grounds.net.died(self.loop, silent)

    async def _adopt(self, version: proto.Version) -> None:
        """As `Fetcher.adopt`, without peers."""
        sites, draw = self.grounds.sites, self.grounds.draw
        if sites.fires("disk.slow"):
            await asyncio.sleep(draw.uniform(*SLOW_S))
        await asyncio.sleep(draw.uniform(*ADOPT_S))
        if sites.fires("load.memory"):
            self.grounds.blame.unread(self.name, version.key, "ResourceExhausted")
            raise ResourceExhausted("host memory is short")
        if sites.fires("load.killed"):
            self.kill()
            await asyncio.sleep(0)  # nothing of the process runs from here on
        if version.digest and self.grounds.disk.files.get(version.path) not in (None, version.digest):
            self.grounds.blame.unread(self.name, version.key, "DataLoss")
        with suppress(AlreadyExists):
            self.replica.adopt(version.key, version.path, version.digest)


@dataclass
class RouterProcess:
    """A router through its lives."""

    name: str
    grounds: Grounds
    policy: Callable[[], Policy]
    balance_s: float = 0.0
    life: int = 0
    loop: Loop = field(init=False)
    router: Router = field(init=False)
    directory: Directory = field(init=False)
    buried: list[Loop] = field(default_factory=list)
    routers: list[Router] = field(default_factory=list)  # of all lives
    heads: dict[str, tuple[object, float]] = field(default_factory=dict)  # the message that waits, and since when

    def start(self, directory: Callable[[Loop], Directory], addresses: Mapping[str, str]) -> None:
        """Begins on its loop; requests may come once that has had a turn."""
        self.life += 1
        self.loop = Loop(self.name, self.grounds.net.time)
        self.buried.append(self.loop)
        self.directory = directory(self.loop)
        wires = Wires(self.grounds.net, self.loop)
        engine = self.grounds.info.config.engine
        room = engine.max_seqs + engine.max_queue
        terms = Terms(self.id, wires, most_sends=2 * room, clock=self.loop.time)
        asyncio._set_running_loop(self.loop)
        try:
            seed = self.grounds.draw.getrandbits(31)
            self.router = Router(self.directory, self.policy(), terms, seed, self.balance_s)
            self.router.balancing._terms = BALANCE
            self.routers.append(self.router)
            self.grounds.blame.watch(self)
        finally:
            asyncio._set_running_loop(None)
        self.router.place(addresses)

    @property
    def id(self) -> str:
        """Unlike that of every other life."""
        return f"{self.name}.{self.life}"

    def is_known(self, seconds: float) -> bool:
        """Whether the controller that lives has known for so long what it uses."""
        return not isinstance(self.directory, Follower) or self.directory.follows(seconds)

    @property
    def waits_for_table(self) -> bool:
        """Whether it follows a controller that has not told it anything yet."""
        return not getattr(self.directory, "began", True)

    @property
    def alive(self) -> bool:
        return not self.loop.dead

    def kill(self, silent: bool = False) -> None:
        self.loop.kill()
        self.grounds.net.died(self.loop, silent)
