"""Signs of life over a real socket, as systemd reads them."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from jlora.serve import supervisor
from jlora.serve.backend import Backend
from jlora.serve.supervisor import tell_systemd

SIGN = b"READY=1\nWATCHDOG=1"


async def heard(systemd: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(systemd, 100), 20)


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_systemd_hears_of_a_server_that_is_loaded_and_whose_engine_moves(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    named = str(tmp_path / "n") if kind == "path" else f"@jlora {os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", named)
    monkeypatch.setattr(supervisor, "PERIOD_S", 0.01)
    backend, replica = Backend(), object()

    async def listens(systemd: socket.socket) -> None:
        telling = asyncio.create_task(tell_systemd(backend))
        await silent(systemd)
        loaded: Any = replica
        backend.replica = loaded
        assert await heard(systemd) == SIGN and await heard(systemd) == SIGN
        backend.live = False
        await silent(systemd)
        backend.live = True
        assert await heard(systemd) == SIGN
        telling.cancel()

    async def silent(systemd: socket.socket) -> None:
        """From now on; one sign may be on its way."""
        await asyncio.sleep(0.05)
        while True:
            try:
                systemd.recv(100)
            except BlockingIOError:
                break
        await asyncio.sleep(0.1)
        with pytest.raises(BlockingIOError):
            systemd.recv(100)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(named.replace("@", "\0"))
        systemd.setblocking(False)
        asyncio.run(listens(systemd))


def test_a_systemd_that_is_away_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    loaded: Any = object()

    async def tells() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tell_systemd(Backend(loaded)), 0.1)

    asyncio.run(tells())


def test_without_systemd_nothing_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    asyncio.run(asyncio.wait_for(tell_systemd(Backend()), 10))
