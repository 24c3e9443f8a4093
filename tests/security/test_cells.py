"""C21: every tenant with every adapter has KV of its own, whatever the others have asked, on a modelled device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from jlora.sim.replica import Replica
from jlora.types import Request
from tests.security.test_timing import seen
from tests.sim._sim import BLOCK, ENGINE, replica_of, request, sized

TENANTS, ADAPTERS, PREFIX = ("red", "blue", "green", "grey"), 8, 512
CELLS = list(product(TENANTS, range(ADAPTERS)))
ROOMY = replace(sized(8192, 8192), adapters=(2,) * ADAPTERS, engine=ENGINE)


def cached(replica: Replica, asked: Request) -> int:
    """Tokens of the prompt that were known."""
    return len(asked.prompt) - int(seen(replica, asked)[-1])


def asked(name: str, tenant: str, adapter: int | None, activation: int | None = None) -> Request:
    """A request with the prefix that all share, and two blocks."""
    return replace(request(name, PREFIX + 2 * BLOCK, 1, adapter=adapter, activation=activation), tenant=tenant)


@pytest.mark.parametrize("cells", [CELLS, CELLS[::-1]], ids=["forward", "back"])
def test_a_prefix_is_known_to_its_own_tenant_and_adapter_alone(cells: list[tuple[str, int]]):
    """A cell that is asked first finds nothing of the cells before; both orders make all pairs."""
    replica = replica_of(ROOMY)
    found = [[cached(replica, asked(f"{time} {cell}", *cell)) for cell in cells] for time in ("first", "again")]
    assert found[0] == [0] * len(CELLS)
    assert min(found[1]) >= PREFIX


def test_an_activated_lora_shares_the_bases_blocks_within_its_tenant():
    replica = replica_of(ROOMY)
    assert cached(replica, asked("base", "red", None)) == 0
    assert [cached(replica, asked(f"own {i}", "red", i, PREFIX)) for i in range(ADAPTERS)] == [PREFIX] * ADAPTERS
    assert cached(replica, asked("other", "blue", 0, PREFIX)) == 0
    assert cached(replica, asked("other base", "blue", None)) == PREFIX
