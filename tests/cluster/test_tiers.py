"""What a router is told of a replica's adapters: changes, and nothing twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from jlora.cluster import tiers
from jlora.cluster.tiers import Tiers


@dataclass
class Fake:
    name: str
    tier: str
    ranks: dict[str, int] = field(default_factory=lambda: {"q": 8})


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LOOK_S", 0.0)
    monkeypatch.setattr(tiers, "SHARE", 0)


def told(seen: Tiers) -> set[tuple[str, str, int]]:
    return {(change.key, change.tier, change.rank) for change in seen.changes()}


def test_a_router_is_told_each_change_once():
    records: list[Any] = [Fake("a@1", "DISK"), Fake("b@2", "HBM")]
    seen = Tiers(lambda: records)
    assert told(seen) == {("a@1", "DISK", 8), ("b@2", "HBM", 8)}
    assert told(seen) == set()
    records[0].tier = "HOST"
    del records[1]
    assert told(seen) == {("a@1", "HOST", 8), ("b@2", "", 0)}
    assert told(seen) == set()


def test_many_changes_come_in_messages_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers, "MOST", 10)
    records: list[Any] = [Fake(f"a@{i}", "DISK") for i in range(25)]
    seen = Tiers(lambda: records)
    assert [len(told(seen)) for _ in range(4)] == [10, 10, 5, 0]
