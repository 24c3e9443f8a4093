"""What faults have struck: an error is excused only where a fault has caused it.

Whoever lets a fault strike says whom. A request is excused for the step in which it was struck, and the next two: its
last event comes by then. What reads an adapter is excused by what has befallen that adapter's directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jlora.cache.transfer import Copy

STEPS = 2  # from a fault to the last events of those whom it ends


class Struck:
    """The record of one replica. `step` is the engine's."""

    def __init__(self, now: Callable[[], float]):
        self.step = 0
        self._now = now
        self._requests: dict[int, int] = {}  # handle -> the step in which it was struck last
        self._copies: dict[int, frozenset[int]] = {}  # errors of copies, and the device's blocks that each has struck
        self._failed: dict[int, Copy] = {}  # and the copy that each has failed
        self._paths: dict[str, float] = {}  # when a read of a directory was disturbed last, or it has changed
        self._unread: dict[str, float] = {}  # when an adapter could not be read from the disk, last
        self._gone: dict[str, float] = {}  # when a name was given up, last
        self._unpinned: dict[str, float] = {}  # when a client asked that a name be unpinned, last
        self._ended: dict[int, str] = {}  # errors that sites have raised, and whom each has reached
        self._errors: list[BaseException] = []  # they stay, or another would get the identity of one

    # -- what strikes -----------------------------------------------------------------------------

    def request(self, handle: int) -> None:
        """A fault has struck a request, and may end it."""
        self._requests[handle] = self.step

    def copy(self, error: Exception, blocks: Iterable[int]) -> None:
        """A fault has struck a copy to these blocks of the device, which fails with this error."""
        self._errors.append(error)
        self._copies[id(error)] = frozenset(blocks)

    def path(self, directory: str) -> None:
        """A read of a directory was disturbed, or the directory is another one."""
        self._paths[directory.rpartition("/")[2]] = self._now()

    def unread(self, name: str) -> None:
        """An adapter could not be read."""
        self._unread[name] = self._now()

    def gone(self, name: str) -> None:
        """A name stands for nothing any more, or for another version."""
        self._gone[name] = self._now()

    def unpin(self, name: str) -> None:
        """A client does not want a name pinned any more: pins that wait for it fail."""
        self._unpinned[name] = self._now()

    # -- what is excused --------------------------------------------------------------------------

    def ends(self, handle: int) -> bool:
        """Whether the request may have ended with an error just now."""
        return self.step - self._requests.get(handle, -1 - STEPS) <= STEPS

    def failed(self, copy: Copy, error: Exception) -> bool:
        """Whether a copy may have failed with this error: each error fails the one copy that it has struck."""
        struck = self._copies.get(id(error), frozenset())
        return struck == frozenset(copy.target) and self._failed.setdefault(id(error), copy) is copy

    def disturbed(self, directory: str, since: float) -> bool:
        """Whether a directory was struck since then."""
        return self._paths.get(directory.rpartition("/")[2], -1.0) >= since

    def was_unread(self, name: str, since: float) -> bool:
        """Whether an adapter could not be read since then."""
        return self._unread.get(name, -1.0) >= since

    def was_gone(self, name: str, since: float) -> bool:
        """Whether a name was given up since then."""
        return self._gone.get(name, -1.0) >= since

    def was_unpinned(self, name: str, since: float) -> bool:
        """Whether a client has asked that a name be unpinned, since then."""
        return self._unpinned.get(name, -1.0) >= since

    def reaches(self, error: BaseException, whom: str) -> bool:
        """Whether an error that a site has raised may reach this one: each reaches one."""
        self._errors.append(error)
        return self._ended.setdefault(id(error), whom) == whom
