"""Operations on the tree of the cache against a dict, and on the whole cache with its invariants."""

from __future__ import annotations

from dataclasses import dataclass, field

from jlora.cache.tree import AdapterNode, Node, Origin, Tree
from tests.cache._world import ACTIONS, POLICIES, World
from tests.fuzz._engine import Target

BLOCK = 2
TENANTS = ("", "b", ("b", "salt"))
OPERATIONS = 64  # of a sequence: the tree's take 3 bytes each, the cache's 4

Path = tuple[object, ...]  # whose KV a block is, and every token up to its end


@dataclass
class Model:
    """The tree and what it must hold: a dict from what a block stands for to its node."""

    tree: Tree = field(default_factory=lambda: Tree(BLOCK))
    known: dict[Path, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adapters = [self.tree.base, *(AdapterNode(uid, 1) for uid in (1, 2, 3))]
        self.tree.adapters |= {node.uid: node for node in self.adapters}

    def do(self, what: int, who: int, seed: int) -> None:
        """One operation; `who` and `seed` choose adapter, tenant, activation and tokens."""
        tokens = [(seed >> i & 1) + 1 for i in range(2 + who % 7)] * (1 + seed % 2)
        adapter = self.adapters[who % 4]
        activation = None if adapter is self.tree.base or not who & 16 else (seed >> 3) % len(tokens)
        origin = Origin(adapter, TENANTS[(who >> 5) % 3], activation)
        if what % 4 < 2:
            self.grow(origin, tokens)
        elif what % 4 == 2:
            self.find(origin, tokens, seed % (len(tokens) + 1))
        else:
            self.prune(seed)

    def names(self, origin: Origin, tokens: list[int]) -> list[Path]:
        """What each full block of the tokens stands for."""
        found = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            activated = origin.activation is not None and end > origin.activation // BLOCK * BLOCK
            owner = origin.adapter.uid if origin.activation is None or activated else 0
            place = origin.activation if activated else None
            found.append((origin.salt, owner, place, *tokens[:end]))
        return found

    def grow(self, origin: Origin, tokens: list[int]) -> None:
        parent: Node = self.tree.top(origin)
        for i, name in enumerate(self.names(origin, tokens)):
            node = self.tree.insert(parent, origin, tokens, i * BLOCK)
            assert self.known.setdefault(name, node) is node
            node.device = (1,)
            parent = node

    def find(self, origin: Origin, tokens: list[int], limit: int) -> None:
        wanted = []
        for name in self.names(origin, tokens)[: limit // BLOCK]:
            if name not in self.known:
                break
            wanted.append(self.known[name])
        assert self.tree.match(origin, tokens, limit) == wanted

    def prune(self, seed: int) -> None:
        leaves = [name for name, node in self.known.items() if not node.children]
        if leaves:
            name = leaves[seed % len(leaves)]
            node = self.known.pop(name)
            parent = node.parent
            assert self.tree.remove(node) is parent

    def check(self) -> None:
        owned = {node for adapter in self.adapters for node in self.tree.owned(adapter)}
        assert owned == set(self.known.values())


def tree() -> Target:
    """A sequence of insertions, matches and removals."""

    def run(data: bytes) -> str:
        model = Model()
        for at in range(0, min(len(data), 3 * OPERATIONS) - 2, 3):
            model.do(*data[at : at + 3])
        model.check()
        return "OK"

    return Target("tree", run, [bytes(range(48)), bytes(i * 37 % 256 for i in range(96)), b"\x00\x11\x55" * 8])


def cache() -> Target:
    """A sequence of requests, steps, copies, loads and evictions; every invariant holds after each."""
    actions, policies = list(ACTIONS), list(POLICIES)

    def run(data: bytes) -> str:
        policy = policies[data[0] % len(policies)] if data else policies[0]
        world = World(policy, device_blocks=20, host_blocks=20, streams=True)
        for at in range(1, min(len(data), 4 * OPERATIONS) - 3, 4):
            world.do(actions[data[at] % len(actions)], tuple(n % 100 for n in data[at + 1 : at + 4]))
        world.close()
        return "OK"

    return Target("cache", run, [bytes(i * 101 % 256 for i in range(n)) for n in (60, 200)])
