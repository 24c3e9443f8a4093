"""Sites: the named places where a fault may strike, and how often each has struck. Plain Python.

Each seed arms some of the sites, so that many faults come alone and some together, and every tenth
seed arms none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

ARMED = 0.3  # of the sites, in a seed
CALM = 0.1  # of the seeds


class Planted(RuntimeError):
    """An error that a site has raised."""


class Shortage(MemoryError):
    """Likewise, of memory."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place for faults.

    Attributes:
        what: it does there.
        often: chance that it strikes where it could, once it is armed.
        ends: it may end the whole service. It strikes once at most.
        rare: seeds that arm it, of those that would.
    """

    what: str
    often: float = 0.1
    ends: bool = False
    rare: float = 1.0


class Sites:
    """The sites of one seed. `fires` is the only question a model asks."""

    def __init__(self, sites: Mapping[str, Site], draw: random.Random):
        self.sites = sites
        self.fired: Counter[str] = Counter()
        self.ended = False  # something that may end the service has struck
        self._draw = draw
        calm = draw.random() < CALM
        self._armed = {name for name, site in sites.items() if draw.random() < ARMED * site.rare and not calm}

    def fires(self, name: str) -> bool:
        """Whether the fault strikes here and now."""
        site = self.sites[name]  # a name that is not in the table is a mistake
        if name not in self._armed or self._draw.random() >= site.often:
            return False
        self.count(name)
        if site.ends:
            self._armed -= {name for name, site in self.sites.items() if site.ends}
            self.ended = True
        return True

    def strike(self, name: str) -> None:
        """Raises Planted if the fault strikes."""
        if self.fires(name):
            raise Planted(name)

    def lack(self, name: str) -> None:
        """Raises Shortage if the fault strikes."""
        if self.fires(name):
            raise Shortage(name)

    def count(self, name: str) -> None:
        """The fault has struck in another way: what a client does, say, at a certain moment."""
        assert name in self.sites
        self.fired[name] += 1

    def missed(self, name: str) -> None:
        """The fault that has fired found nothing to strike."""
        self.fired -= Counter({name: 1})  # without a zero: what has not struck excuses nothing

    def heal(self) -> None:
        """No fault strikes any more."""
        self._armed.clear()
