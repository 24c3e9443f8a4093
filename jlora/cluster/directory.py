"""Which adapters the service has: what a router asks, and the controller answers.

Replicas know an adapter by its version's key, NAME@NUMBER. A reload of a name makes a new version, so no answer
ever mixes two, and an old version stays until the last request that began with it has ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from jlora.cluster.view import THERE, ReplicaView
from jlora.replica import Load
from jlora.types import AdapterInfo


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an adapter.

    Attributes:
        number: grows with each reload of the name.
        path: a PEFT directory that every replica can read.
        digest: sha256 of configuration and weights; "" until a replica has read them.
        rank, bytes: 0 until a replica has read them.
    """

    name: str
    number: int
    path: str
    digest: str = ""
    rank: int = 0
    bytes: int = 0
    pinned: bool = False
    alora_invocation_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, info: AdapterInfo, path: str) -> Version:
        """What requests need of an adapter whose number is `info.uid`."""
        tokens = info.alora_invocation_tokens
        return cls(info.name, info.uid, path, info.digest, info.rank, info.bytes, info.pinned, tokens)

    @property
    def key(self) -> str:
        """Its name at replicas."""
        return f"{self.name}@{self.number}"


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that is up, or that drains.

    Attributes:
        address: of its gRPC port; a replica that starts again may have another.
        tiers: version key -> "HBM", "HOST", "LOADING" or "DISK"; a version that it lacks is not named.
        blocks: of its pool; host_blocks: of its host tier; 0 while it has not told them.
        draining: it lends what it has, and takes nothing more.
    """

    name: str
    address: str
    tiers: Mapping[str, str] = field(default_factory=dict)
    blocks: int = 0
    host_blocks: int = 0
    draining: bool = False

    @classmethod
    def of(cls, address: str, seen: ReplicaView) -> Member:
        """What a router sees of it."""
        return cls(seen.name, address, seen.tiers, seen.blocks, seen.host_blocks, seen.health == "draining")


TIERS = ("DISK", "LOADING", "HOST", "HBM")  # the later, the nearer
Members = Callable[[], Sequence[Member]]
Holder = TypeVar("Holder")


def peers(members: Sequence[Member], key: str, near: str) -> tuple[str, ...]:
    """Addresses of replicas, other than `near`, whose host tier has a version, in the order of `lenders`."""
    return lenders([m.address for m in members if m.name != near and m.tiers.get(key) in THERE], f"{near} {key}")


def nearest_tier(members: Sequence[Member], key: str) -> str:
    """Where a version is at the replica that has it nearest to its device; "DISK" if none has it."""
    return max((member.tiers.get(key, "DISK") for member in members), key=TIERS.index, default="DISK")


def lenders(holders: Sequence[Holder], asks: str) -> tuple[Holder, ...]:
    """Rotates the holders by a hash of `asks`, so that the first one does not serve every fetch."""
    first = zlib.crc32(asks.encode()) % len(holders) if holders else 0
    return (*holders[first:], *holders[:first])


class Directory(Protocol):
    """The adapters of the service. Methods may be called from any thread; futures as of `jlora.replica.Replica`.

    Attributes:
        fetches: adapters that a placement has had replicas fetch, if it is here.
    """

    fetches: int = 0

    def follow(self, members: Members) -> None:
        """Says where to learn which replicas are there; called once, before any request. It must not block."""
        ...

    def current(self, name: str) -> Version:
        """The version that a new request uses, at once. Raises NotFound with near names."""
        ...

    def peers(self, version: Version, near: str) -> tuple[str, ...]:
        """Addresses of replicas, other than `near`, whose host tier has the version."""
        ...

    def begin(self, version: Version) -> None:
        """A request uses the version until `end`; a replaced or unloaded version is dropped after its last one."""
        ...

    def asked(self, version: Version, prompt: int) -> None:
        """A request that uses the version is admitted, with so many tokens of prompt."""
        ...

    def end(self, version: Version, output: int = 0) -> None:
        """A request for the version has ended, with so many tokens of answer."""
        ...

    def load(self, load: Load) -> Future[AdapterInfo]:
        """As `Replica.load_adapter`, for the whole service."""
        ...

    def unload(self, name: str) -> Future[AdapterInfo]: ...

    def pin(self, name: str, pinned: bool) -> Future[AdapterInfo]: ...

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]: ...

    def adapter(self, name: str) -> Future[AdapterInfo]: ...
