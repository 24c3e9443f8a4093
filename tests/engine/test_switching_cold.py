"""Merging begins with no adapter whose copy is under way: the host may add what the weights would have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jlora.cache.tree import AdapterNode
from jlora.engine.switching import Switching
from tests import port


class Counted:
    """A merger of four pieces."""

    def __init__(self) -> None:
        self.done, self.pieces, self.piece_s, self.host_bytes, self.reloads = 0, 4, 0.1, 0, 0

    def forward(self) -> None:
        self.done += 1


def test_an_adapter_on_its_way_is_merged_when_it_has_landed(monkeypatch: pytest.MonkeyPatch):
    merger: Any = Counted()
    policy: Any = SimpleNamespace(refused=set())
    none: Any = None
    switching = Switching(policy, merger, none, none)
    node = AdapterNode(1, 3)
    port.take_for_measured(switching, node, monkeypatch)
    node.coming = True
    assert switching.advance(0.1) and merger.done == 0
    node.coming = False
    assert switching.advance(0.1) and merger.done == 1
    node.coming = True  # it left the device and comes again: it is merged in part, and the host does not help it
    assert switching.advance(0.1) and merger.done == 2
