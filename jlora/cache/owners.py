"""Who has each block of the device, for a picture. No jax."""

from __future__ import annotations

from jlora.cache.manager import CacheManager
from jlora.cache.tree import Node, SuffixNode
from jlora.types import Owners

CELLS = 1024  # of the picture; a cell stands for several blocks of a larger pool
VISITS = 8192  # nodes that one look visits: some milliseconds between two steps


def owners(manager: CacheManager) -> Owners:
    """Looks at the nodes on the device from the adapters down, `VISITS` of them at most."""
    per_cell = -(-manager.total // CELLS)
    counts: list[dict[int, int]] = [{} for _ in range(-(-manager.total // per_cell))]
    kv: dict[int, int] = {}

    def hold(code: int, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            cell = counts[(block - 1) // per_cell]
            cell[code] = cell.get(code, 0) + 1

    for lease in manager.leases.live.values():
        own, uid = lease.blocks[len(lease.path) :], lease.adapter.uid
        hold(2 * uid + 2, own)
        kv[uid] = kv.get(uid, 0) + len(own)
    left: list[tuple[Node, int]] = []
    for uid, adapter in manager.adapters.items():
        hold(2 * uid + 1, adapter.device)
        left += [(node, uid) for node in adapter.branches() if node.device]
    visits = 0
    while left and visits < VISITS:
        node, uid = left.pop()
        uid = node.adapter.uid if isinstance(node, SuffixNode) else uid
        visits += 1
        hold(2 * uid + 2, node.device)
        kv[uid] = kv.get(uid, 0) + 1
        left += [(child, uid) for child in node.branches() if child.device]
    cells = tuple(max(cell, key=lambda code: cell[code]) if cell else 0 for cell in counts)
    return Owners(cells, per_cell, kv, not left)
