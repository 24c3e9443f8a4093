"""A relay of TCP connections, which can stop one way and close nothing: as a network does that loses packets."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal

Way = Literal["up", "down"]  # to the server, and back


class Relay:
    """Takes connections at `address`, and makes one to the server for each; until `close`."""

    def __init__(self, server: str):
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._goes: dict[Way, threading.Event] = {"up": threading.Event(), "down": threading.Event()}
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.go_on()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self, way: Way) -> None:
        """What is sent this way from now on arrives once it goes on."""
        self._goes[way].clear()

    def go_on(self) -> None:
        for goes in self._goes.values():
            goes.set()

    def close(self) -> None:
        self.go_on()
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for way, one, other in (("up", client, server), ("down", server, client)):
                    threading.Thread(target=self._pump, args=(self._goes[way], one, other), daemon=True).start()

    def _pump(self, goes: threading.Event, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                goes.wait()
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
