"""A fetcher's connections to its peers."""

from __future__ import annotations

import pytest

from jlora.cluster import peer as peers
from jlora.cluster.peer import Fetcher
from tests.cluster import _port as port


def test_connections_to_the_peers_that_were_asked_last_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "CHANNELS", 3)
    fetcher = Fetcher(lambda: pytest.fail("no engine is needed"))
    first = port.channel(fetcher, "127.0.0.1:1")
    for last in (2, 3, 1, 4):
        port.channel(fetcher, f"127.0.0.1:{last}")
    assert port.connected(fetcher) == ["127.0.0.1:3", "127.0.0.1:1", "127.0.0.1:4"]
    assert port.channel(fetcher, "127.0.0.1:1") is first
    fetcher.close()
