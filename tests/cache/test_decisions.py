"""`serve.log_level = debug` tells every decision of the cache, one line each."""

from __future__ import annotations

import logging

import pytest

from jlora.cache.tree import KV, Origin
from tests.cache._cache import A, B, Cache


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    """What the cache has logged so far, at debug level."""
    caplog.set_level(logging.DEBUG, "jlora.cache")
    return lambda: [record.getMessage() for record in caplog.records]


def test_evictions_copies_and_refusals_are_told(lines):
    cache = Cache(device=4)
    cache.run(A)
    assert any(line.startswith("copy out kv@") for line in lines())
    lease = cache.leased([9] * 16)
    assert sum(line.startswith("evict kv@") for line in lines()) == 2
    assert cache.lease(B) is None
    assert lines()[-1] == "refuse adapter 0: no room for its 0 blocks and 3 of KV"
    cache.manager.leases.release(lease)


def test_hints_are_told_with_what_they_found(lines):
    cache = Cache()
    adapter = cache.adapter(1, 2)
    cache.run(A, adapter)
    for node in (*reversed(cache.path(A, adapter)), adapter):
        cache.cells.evict(node)
    cache.manager.hint(Origin(adapter), A)
    assert "hint for adapter 1: 4 blocks missing, room=True" in lines()


def test_what_is_computed_again_and_what_the_host_drops_is_told(lines):
    cache = Cache(device=16, host=2)
    cache.run(A)
    cache.drop_from_device(A)
    meter = cache.manager.policy.meter
    meter.token_s = meter.load_s(KV, 2) / (8 * 3.1)
    lease = cache.leased(A)
    assert "recompute 2 blocks of adapter 0: copying takes longer" in lines()
    cache.manager.leases.release(lease)
    cache.adapter(1, 2)  # takes the place of history on the host
    assert sum(line.startswith("drop from the host kv@") and line.endswith("its only copy") for line in lines()) == 2
