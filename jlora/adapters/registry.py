"""The adapters a replica knows, by name. Plain Python, no jax.

An adapter's identity is (name, uid, digest). Every load has a new uid, so a reload under the same
name is another adapter. The old version is freed with its last user. An adapter that leaves memory for
the disk keeps its uid, and its digest binds the files: see `jlora.engine.shelf`.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jlora.adapters.invocation import NotInvoked, last_occurrence
from jlora.adapters.names import check_length
from jlora.adapters.near import NearNames
from jlora.cache.tree import AdapterNode
from jlora.errors import AlreadyExists, NotFound
from jlora.types import AdapterInfo, Invocation

MOST_SHARED = 3000  # parts of records


@dataclass(slots=True)
class Record:
    """One adapter version, in memory or on the disk.

    Attributes:
        digest: "" until its weights were read once.
        projections: for each of its blocks, the projection whose units it holds; () before it was read.
        bytes: of its packed form.
        node: its place in the cache; `gone` while it is on the disk only.
        load_cost_s: seconds to read and pack it; 0 before it was read.
        last_used: seconds of the engine's clock.
        path: the directory to read it from; "": it was made in memory, and never leaves it.
        header, stamp, base: of its files, as of `Scan`.
        created: seconds since 1970.
        keeps_pin: it was pinned when the server ended, and is to be pinned again, by the next start if not by this one.
    """

    name: str
    digest: str
    ranks: Mapping[str, int]
    target_modules: tuple[str, ...]
    alora_invocation_tokens: tuple[int, ...]
    projections: tuple[str, ...]
    bytes: int
    node: AdapterNode
    load_cost_s: float
    last_used: float = 0.0
    path: str = ""
    header: str = ""
    stamp: tuple[int, ...] = ()
    base: str = ""
    created: float = 0.0
    keeps_pin: bool = False

    @property
    def tier(self) -> Literal["HBM", "HOST", "DISK", "LOADING"]:
        """Where its weights are."""
        node = self.node
        if node.coming or node.reading:
            return "LOADING"
        return "DISK" if node.gone else "HBM" if node.device else "HOST"

    def info(self, now: float) -> AdapterInfo:
        """The public description; `last_used_s` is seconds ago, -1 if never used."""
        node = self.node
        return AdapterInfo(
            name=self.name,
            uid=node.uid,
            digest=self.digest,
            rank=max(self.ranks.values(), default=0),
            ranks=self.ranks,
            target_modules=self.target_modules,
            bytes=self.bytes,
            blocks=node.size,
            tier=self.tier,
            pinned=node.pinned,
            running=node.users,
            waiting=len(node.wanted),
            hits=node.hits,
            last_used_s=now - self.last_used if self.last_used else -1.0,
            load_cost_s=self.load_cost_s,
            alora_invocation_tokens=self.alora_invocation_tokens,
        )


class AdapterRegistry:
    """Live versions by name. A removed version stays reachable by uid until it is freed."""

    def __init__(self, alora_missing: str = "error") -> None:
        self._alora_missing = alora_missing
        self._by_name: dict[str, Record] = {}
        self._names: list[str] = []  # in order
        self._by_uid: dict[int, Record] = {}
        self._versions: dict[str, list[int]] = {}
        self._near = NearNames()
        self._dying: set[int] = set()
        self._next_uid = 1
        self._shared: dict[object, Any] = {}  # equal parts of records, kept once: most adapters have the same modules

    def new_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid - 1

    def uids_from(self, uid: int) -> None:
        """New uids are larger than this one."""
        self._next_uid = max(self._next_uid, uid + 1)

    def check_free(self, name: str) -> None:
        if name in self._by_name:
            raise AlreadyExists(f"adapter {name!r} is loaded already; unload it, or set replace (HTTP: load_inplace)")

    def share(self, record: Record) -> None:
        """Keeps what equal records have in common once."""
        for part in ("ranks", "target_modules", "projections"):
            value = getattr(record, part)
            key = tuple(value.items()) if isinstance(value, Mapping) else value
            setattr(record, part, self._shared.setdefault((part, key), value))
        if len(self._shared) > MOST_SHARED:  # adapters with ranks of their own come and go
            self._shared.clear()

    def add(self, record: Record) -> None:
        """Makes the name, which must be free, stand for this version; a removed version may come back."""
        uid = record.node.uid
        assert self._by_uid.get(uid, record) is record, f"uid {uid} stands for two versions"
        self.share(record)
        if record.name not in self._by_name:
            bisect.insort(self._names, record.name)
        self._by_name[record.name] = record
        self._near.add(record.name)
        if uid not in self._by_uid:
            self._by_uid[uid] = record
            self._versions.setdefault(record.name, []).append(uid)
        self._dying.discard(uid)

    def remove(self, name: str) -> Record:
        """Removes the name. The version stays reachable by uid until `purge`."""
        record = self.get(name)
        del self._by_name[name], self._names[bisect.bisect_left(self._names, name)]
        self._near.remove(name)
        self._dying.add(record.node.uid)
        return record

    def versions(self, name: str) -> list[int]:
        """Their uids, including removed versions."""
        return list(self._versions.get(name, ()))

    def purge(self, live: Mapping[int, AdapterNode]) -> None:
        """Forgets the removed versions that are not `live`. Takes time by the removed versions only."""
        for uid in [uid for uid in self._dying if uid not in live]:
            self._dying.discard(uid)
            name = self._by_uid.pop(uid).name
            self._versions[name].remove(uid)
            if not self._versions[name]:
                del self._versions[name]

    @property
    def largest(self) -> int:
        """Blocks of the largest version, wherever it is."""
        return max((record.node.size for record in self._by_uid.values()), default=0)

    @property
    def count(self) -> int:
        """How many names stand for a version."""
        return len(self._by_name)

    @property
    def removed(self) -> list[AdapterNode]:
        """The nodes of removed versions that are not purged."""
        return [self._by_uid[uid].node for uid in self._dying]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Record:
        """The live version of that name. Raises NotFound, which lists near names."""
        record = self._by_name.get(check_length(name))
        if record is None:
            raise NotFound(f"adapter {name!r} is not loaded", self._near.of(name))
        return record

    def live(self, uid: int) -> Record | None:
        """The version of that uid while its name stands for it, else None."""
        return None if uid in self._dying else self._by_uid.get(uid)

    def invocation(self, name: str) -> tuple[int, ...]:
        """The invocation tokens of an activated LoRA; () for another adapter or an unknown name. Any thread may ask."""
        record = self._by_name.get(name)
        return () if record is None else record.alora_invocation_tokens

    def touch(self, uid: int, now: float) -> None:
        record = self._by_uid.get(uid)
        if record is not None:
            record.last_used = now

    def resolve(
        self, name: str, prompt: Sequence[int], known: Invocation | None = None
    ) -> tuple[Record | None, int | None]:
        """The version that answers a prompt (None: the base), and the position of its activation, if any.

        `known` is the result of an earlier search, when the name may have stood for another version.
        Raises InvalidArgument if it is an activated LoRA that the prompt does not invoke.
        """
        record = self.get(name)
        tokens = record.alora_invocation_tokens
        if not tokens:
            return record, None
        at = known.at if known is not None and known.tokens == tokens else last_occurrence(prompt, tokens)
        if at is not None:
            return record, at
        if self._alora_missing == "base":
            return None, None
        raise NotInvoked(name, tokens)

    def records(self) -> list[Record]:
        """All of them, in any order. Any thread may ask."""
        return list(self._by_name.values())

    def by_uid(self, uid: int) -> Record:
        return self._by_uid[uid]

    def all(self, after: str = "", most: int | None = None) -> list[Record]:
        """In order of name: those behind the name `after`, at most `most`. Takes time by those."""
        first = bisect.bisect_right(self._names, after)
        last = None if most is None else first + most
        return [self._by_name[name] for name in self._names[first:last]]
