"""gRPC calls that have ended here, and whose clients do not take the end.

A call's status goes out behind its messages. So a client that opens no window for them, or reads nothing from its
socket, keeps the call, its memory and its place among all calls; and no handler is left that could wait for it.
grpc.aio cannot cancel a call, and an abort waits behind the messages, too. What remains is to close the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import unquote

import grpc

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # between two looks before a connection is closed: this process may have stood still before the first
MOST = 256  # ends that a connection may leave unread: one reader that stands still costs its neighbours nothing
FILES = "/dev/fd"  # the descriptors of this process


class Unread:
    """Closes a connection that leaves more than `MOST` ends unread for `patience_s` seconds. For one event loop."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._ended: dict[str, dict[asyncio.Task[Any], float]] = {}  # by connection: when each call has ended
        self._looked: set[str] = set()  # connections that are looked at when their oldest ends are due

    def ends(self, context: grpc.aio.ServicerContext) -> None:
        """The handler that calls has nothing more to do than to tell its end. It may say so twice."""
        task, peer = asyncio.current_task(), context.peer()
        assert task is not None
        calls = self._ended.setdefault(peer, {})
        if task in calls:
            return
        calls[task] = asyncio.get_running_loop().time()
        task.add_done_callback(partial(self._taken, peer))  # gRPC's own task for the call: it ends with the status
        if len(calls) > MOST and peer not in self._looked:
            self._looked.add(peer)
            self._look(peer)

    def _taken(self, peer: str, task: asyncio.Task[Any]) -> None:
        calls = self._ended[peer]
        del calls[task]
        if not calls:
            del self._ended[peer]

    def _look(self, peer: str, again: bool = False) -> None:
        loop = asyncio.get_running_loop()
        since = next(islice(self._ended.get(peer, {}).values(), MOST, None), None)  # of the first that is too many
        if since is not None and loop.time() < since + self._patience_s:
            loop.call_at(since + self._patience_s, self._look, peer)
            return
        if since is not None and not again:
            loop.call_later(AGAIN_S, self._look, peer, True)
            return
        self._looked.discard(peer)
        if since is not None:
            log.warning("%s has left %d calls unread: its connection is closed", peer, len(self._ended[peer]))
            close(peer)


def close(peer: str) -> None:
    """Closes the connection from `peer`, as gRPC writes it: "ipv4:127.0.0.1:50000", "ipv6:%5B::1%5D:50000"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    for name in os.listdir(FILES):
        with contextlib.suppress(OSError):  # most are no connections, and others may close meanwhile
            found = socket.socket(fileno=int(name))
            try:
                there = found.getpeername()
                if isinstance(there, tuple) and str(there[1]) == port and _same(there[0], host):
                    found.shutdown(socket.SHUT_RDWR)
            finally:
                found.detach()  # the descriptor is gRPC's


def _same(one: str, other: str) -> bool:
    """Whether two addresses are one; a socket of both families writes those of IPv4 as IPv6's."""
    addresses = [ipaddress.ip_address(text.strip("[]").partition("%")[0]) for text in (one, other)]
    return len({getattr(address, "ipv4_mapped", None) or address for address in addresses}) == 1
