"""The adapters of a modelled service: versions on a disk, loaded, replaced and unloaded while requests run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from jlora.cluster.directory import Members, Version, peers
from jlora.errors import NotFound
from jlora.sim.world.cluster.model import Disk


@dataclass
class Adapters:
    """What the directories of all routers answer from."""

    disk: Disk
    draw: random.Random
    current: dict[str, Version] = field(default_factory=dict)
    number: int = 0
    directories: dict[str, ModelDirectory] = field(default_factory=dict)

    def load(self, name: str) -> Version:
        """A new version of a name, from a directory of its own."""
        self.number += 1
        path, digest = f"/adapters/{name}-{self.number}", f"{self.draw.getrandbits(64):016x}"
        self.disk.files[path] = digest
        self.current[name] = Version(name, self.number, path, digest, rank=8)
        return self.current[name]

    def unload(self, name: str) -> None:
        del self.current[name]

    def wanted(self, key: str) -> bool:
        """Whether a version is current or a request uses it."""
        known = any(version.key == key for version in self.current.values())
        return known or any(one.uses[key] for one in self.directories.values())


class ModelDirectory:
    """One router's; a new life of the router has a new one."""

    def __init__(self, adapters: Adapters, router: str):
        self.uses: Counter[str] = Counter()
        self._adapters = adapters
        self._members: Members = lambda: ()
        adapters.directories[router] = self

    def follow(self, members: Members) -> None:
        self._members = members

    def current(self, name: str) -> Version:
        try:
            return self._adapters.current[name]
        except KeyError:
            raise NotFound(f"adapter {name!r} is not loaded") from None

    def peers(self, version: Version, near: str) -> tuple[str, ...]:
        return peers(self._members(), version.key, near)

    def begin(self, version: Version) -> None:
        self.uses[version.key] += 1

    def end(self, version: Version) -> None:
        self.uses[version.key] -= 1
