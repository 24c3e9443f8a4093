"""What tests of the cache ask for beside the package's own checks."""

from __future__ import annotations

from jlora.cache.inspect import cells, check_integrity
from jlora.cache.manager import CacheManager


def evict_all(manager: CacheManager) -> None:
    """Evicts every candidate that the queue does not need."""
    while (node := cells(manager).candidates.victim()) is not None:
        cells(manager).evict(node)


def check_idle(manager: CacheManager) -> None:
    """The invariants of a replica at rest: nothing is leased, wanted or in flight (call after the last copy)."""
    check_integrity(manager)
    assert not manager.leases.live and not manager.flying, "something is leased or in flight at rest"
    for adapter in manager.adapters.values():
        assert not adapter.wanted and not any(node.wanted for node in manager.tree.below(adapter)), "wanted at rest"
