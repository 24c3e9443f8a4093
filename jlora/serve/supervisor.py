"""What systemd hears of a server: that it is ready, and from then on that it lives. See sd_notify(3)."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

from jlora.serve.backend import Backend

PERIOD_S = 1.0  # between two signs of life


async def tell_systemd(backend: Backend) -> None:
    """Gives signs of life while the server is loaded and `Backend.live`. Ends at once if systemd asks for none."""
    where = os.environ.pop("NOTIFY_SOCKET", "")  # not for replicas that this process starts
    if not where:
        return
    if where.startswith("@"):  # so it writes the null of an abstract address
        where = f"\0{where[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.setblocking(False)
        while True:
            if backend.replica is not None and backend.live:
                with suppress(OSError):  # systemd is busy, or starts again itself: the next one may reach it
                    systemd.sendto(b"READY=1\nWATCHDOG=1", where)
            await asyncio.sleep(PERIOD_S)
