"""The mechanisms of the published baselines: a device split in two, and evictions that write. No jax.

    Split       adapters have a fixed share of the device, and KV has the rest
    WriteBack   split too; KV is copied out when it is evicted, while the request waits

A policy names its mechanism (`Policy.residency`); the product's is `Residency`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jlora.cache.residency import Residency
from jlora.cache.tree import ADAPTER, KV, LEAVING, AdapterNode, Node, adapter_of


class Split(Residency):
    """Each kind makes room in its own share only. Policies keep the kinds' keys apart."""

    def room(self, kind: int) -> int:
        return min(self.device.free, self.limit(kind) - self.device.used[kind])

    def limit(self, kind: int) -> int:
        total, share = self.device.total, self.policy.share
        assert share is not None, "a policy that splits the device has a share"
        adapters = min(max(1, round(share * total)), total - 1)
        return adapters if kind == ADAPTER else total - adapters

    def obtainable(self, adapter: int, kv: int) -> bool:
        return all(count <= self.idle(kind) + self._leaving(kind) for kind, count in self._missing(adapter, kv))

    def lacks_share(self, adapter: AdapterNode) -> bool:
        return not adapter.device and adapter.size > self.room(ADAPTER) + self.idle(ADAPTER)

    def make_room(self, adapter: int = 0, kv: int = 0, gently: bool = False, spare_s: float = float("inf")) -> bool:
        if not self.obtainable(adapter, kv):
            return False
        return all([self._free(kind, count, gently, spare_s) for kind, count in self._missing(adapter, kv)])

    def best_root(self) -> Node | None:
        roots = [root for kind in (ADAPTER, KV) if (root := self.candidates.root(kind)) is not None]
        fitting = [root for root in roots if len(root.host) <= self.room(root.kind)]
        return max(fitting, key=self.candidates.value, default=None)

    def _missing(self, adapter: int, kv: int) -> Sequence[tuple[int, int]]:
        """What must be freed of each kind before so many blocks can be taken."""
        return (ADAPTER, adapter - self.room(ADAPTER)), (KV, kv - self.room(KV))

    def _leaving(self, kind: int) -> int:
        return 0


class WriteBack(Split):
    """KV leaves only when its copy to the host has landed, unless a request comes for it first."""

    _writing: dict[AdapterNode, list[Node]]  # what `_free` has to write out

    @property
    def leaving(self) -> int:  # type: ignore[override]
        return self._leaving(KV)

    def visit(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._stay(node)
        super().visit(nodes)

    def _leaving(self, kind: int) -> int:
        return self._blocks[kind][LEAVING]

    def _standing(self, node: Node) -> int:
        return LEAVING if node.standing == LEAVING else super()._standing(node)

    def _stay(self, node: Node) -> None:
        if node.standing == LEAVING:
            self._move(node, super()._standing(node))

    def _free(self, kind: int | None, count: int, gently: bool, spare_s: float) -> bool:
        """Evicts what has a copy and writes out the rest; True only if the room is there at once."""
        assert kind is not None
        if count <= 0:
            return True
        leaving = self._leaving(kind)
        self._writing = {}
        enough = super()._free(kind, count - leaving, gently, spare_s)
        for adapter, nodes in self._writing.items():
            self._send(adapter, nodes[::-1])
        return enough and not leaving and not self._writing

    def _let_go(self, node: Node) -> None:
        if node.host or not self.make_host_room(len(node.device), node):
            self.evict(node)
            return
        self._reserve(node)
        self._move(node, LEAVING)
        self._writing.setdefault(adapter_of(node), []).append(node)

    def _arrive(self, node: Node) -> None:
        if node.standing == LEAVING:
            self._stay(node)
            self._leave_device(node)
        else:
            super()._arrive(node)
