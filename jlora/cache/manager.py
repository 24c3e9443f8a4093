"""The cache as its users know it: adapters, the queue's wants, leases, copies. Plain Python, no jax.

adapters     reserve, add_adapter, pin, kill ...         the engine loads and unloads them
the queue    expect, unexpect, hint                      the nodes that it needs leave last
leases       `leases.acquire`, `publish`, `release` ...  what a running sequence holds
copies       take_copies, landed                         the swapper, or a model of a link, makes them
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from jlora.cache.forecast import Forecast
from jlora.cache.lease import Lease, Pins, Sizes, Want
from jlora.cache.leases import Leases
from jlora.cache.monitor import Monitor
from jlora.cache.policies import Policy
from jlora.cache.residency import Residency
from jlora.cache.transfer import Copy
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node, Origin, Tree
from jlora.types import TierState

__all__ = ["CacheManager", "Lease", "Pins", "Sizes", "Want"]

log = logging.getLogger(__name__)

# Hints may have copies of at most this share of the device under way.
HINT_SHARE = 0.25
# Hints start no copy while the link has more than so many seconds to do: it would delay what requests wait for.
HINT_S = 0.1


class CacheManager:
    """Two tiers under one policy. `clock` gives seconds; the simulator has its own.

    Args:
        prefix_reuse: whether requests find KV of earlier ones.
        streams: whether long copies come in groups of layers.
        monitor_s: seconds between two rounds of the monitor.
    """

    def __init__(
        self,
        sizes: Sizes,
        policy: Policy,
        clock: Callable[[], float],
        prefix_reuse: bool = True,
        streams: bool = False,
        monitor_s: float = 0.1,
    ):
        self.total = sizes.device  # blocks that can be handed out
        self.block_tokens = sizes.block_tokens
        self._longest = min(sizes.longest, sizes.device // 2)
        self.prefix_reuse = prefix_reuse and policy.history
        self.policy = policy
        self.tree = Tree(sizes.block_tokens)
        make = policy.residency or Residency
        self._cells = make(self.tree, (sizes.device, sizes.host), policy, clock, streams)
        self.forecast = Forecast(self._cells.traffic, policy.meter, clock, sizes.block_tokens)
        self.leases = Leases(self._cells, self.forecast, clock, self.prefix_reuse)
        self.base = self.tree.base
        self.adapters = self.tree.adapters
        self.reserved: set[int] = set()  # host blocks of adapters that are being loaded
        self.counters = self._cells.counters
        self.grants = 0  # leases so far
        # The place of a request that has waited too long for host memory: what waits behind it gets no lease if that
        # would keep an adapter in memory which the disk has.
        self.give_way_to = math.inf
        self._pinned: set[AdapterNode] = set()
        self._wants: dict[Want, None] = {}  # of the queued sequences (a dict as an ordered set)
        backs_up = self.prefix_reuse and policy.saves_ahead
        self._monitor = Monitor(self._cells, monitor_s, backs_up, sizes.spare)

    def stream(self) -> None:
        """Lets long copies come in groups of layers from now on."""
        self._cells.streams = True

    # -- what it holds ----------------------------------------------------------------------

    @property
    def device(self) -> TierState:
        """The device's blocks by what they hold."""
        tier, running = self._cells.device, self._cells.running
        return TierState(tier.total, tier.free, tier.used[ADAPTER], tier.used[KV] - running, running)

    @property
    def host(self) -> TierState:
        """The host tier's blocks by what they hold."""
        tier = self._cells.host
        return TierState(tier.total, tier.free, tier.used[ADAPTER], tier.used[KV], 0)

    @property
    def host_room(self) -> int:
        """Host blocks that an adapter could get if nothing were in use.

        Pinned adapters, and those whose files are gone, keep their blocks.
        """
        stays = (node for node in self.adapters.values() if node.on_host and (node.pinned or not node.backed))
        return self._cells.host.total - sum(node.size for node in stays)

    @property
    def host_most(self) -> int:
        """Blocks of the host tier; it may have fewer now, where memory is short."""
        return self._cells.host.most

    @property
    def host_beside_pins(self) -> int:
        """Of these, what an adapter could get if all files were there: only pinned adapters keep their blocks."""
        return self.host_most - sum(node.size for node in self._pinned if node.on_host)

    @property
    def epoch(self) -> int:
        """A lease that was refused is refused again until this changes."""
        return self._cells.epoch

    @property
    def leaving(self) -> bool:
        """Whether device blocks come free without an eviction."""
        return self._cells.leaving > 0

    @property
    def flying(self) -> bool:
        return bool(self._cells.traffic.flying)

    @property
    def adapter_limit(self) -> int:
        """Blocks of the largest adapter that leaves room for at least one block of KV."""
        return min(self._cells.limit(ADAPTER), self.total - 1)

    @property
    def share_hint(self) -> str:
        """For messages: the other key that limits adapters, where a policy splits the device."""
        share = self.policy.share
        return "" if share is None else f", or under vllm-fair cache.share (adapters have {share:g} of them)"

    @property
    def host_use(self) -> str:
        """For messages: what the host tier holds."""
        host = self.host
        return f"{host.adapters} of {host.total} blocks are adapters', {host.history_kv} are KV's"

    def capacity(self, adapter: AdapterNode, pinned: AdapterNode | None = None) -> int:
        """Tokens of the longest sequence that could run if it had the pool to itself and `pinned` were pinned."""
        held = sum(node.size for node in {*self._pinned, adapter, *([pinned] if pinned else [])})
        if held > self._cells.limit(ADAPTER):
            return 0
        return max(0, min(self._cells.limit(KV), self.total - held)) * self.block_tokens

    def pins(self, added: AdapterNode | None = None, without: AdapterNode | None = None) -> Pins:
        """The pinned adapters, with `added` among them, and what needs room beside them if `without` goes."""
        pinned = {*self._pinned, *([added] if added else [])} - {without}
        others = [a.size for a in self.adapters.values() if not (a.dying or a is without or a in pinned)]
        # Where adapters have a share of the device, pins and the largest other must fit into that.
        total = min(self.total, self._cells.limit(ADAPTER) + self._longest)
        return Pins(sum(node.size for node in pinned), max(others, default=0), self._longest, total)

    def lacks_share(self, adapter: AdapterNode) -> bool:
        """Whether adapters have a fixed share without room for this one: requests for other adapters may have room."""
        return self._cells.lacks_share(adapter)

    def cached_tokens(self, origin: Origin, tokens: Sequence[int]) -> int:
        """How many of `tokens` are on the device now; changes nothing."""
        path = self.tree.match(origin, tokens, limit=len(tokens) - 1)
        return next((i for i, node in enumerate(path) if not node.on_device), len(path)) * self.block_tokens

    # -- adapters ---------------------------------------------------------------------------

    def reserve(self, size: int) -> tuple[int, ...] | None:
        """Takes `size` host blocks for an adapter's master copy; None if the host has no room for it.

        The caller fills the blocks, and hands them to `add_adapter` or back to `cancel`.
        """
        if not self._cells.make_host_room(size):
            return None
        blocks = self._cells.host.take(ADAPTER, size)
        self.reserved.update(blocks)
        return blocks

    def make_way(self, size: int, place: float) -> AdapterNode | None:
        """Drops the idle adapter that the queue needs last to the disk, for the request at `place`.

        None, and nothing has changed, unless all those that the queue needs behind `place` would make room for `size`
        host blocks. The requests for the adapter wait now until it is read again. One whose answer has begun would
        break off if that failed, so its adapter stays.
        """
        begun = {want.adapter for want in self._wants if want.begun}
        later = [node for node in self._cells.displaceable(place) if node not in begun]
        room = self._cells.room_with_shelf() + sum(node.size for node in later)
        if not later or room < size or room - self._kept_beside(later) < size:
            return None
        self._cells.displace(later[-1])
        for want in self._wants:
            if want.adapter is later[-1]:
                self._unwant(want, 1)
        return later[-1]

    def _kept_beside(self, leaving: Collection[AdapterNode]) -> int:
        """Host blocks of KV that copies under way and the queue keep there when these adapters have left."""
        wanted = [node for want in self._wants if want.adapter not in leaving for node in want.nodes]
        kept: set[Node] = set()
        for last in (*self._cells.traffic.flying, *wanted):
            node: Node | None = last
            while node is not None and node.kind == KV and node not in kept and (node.moving or not node.device):
                kept.add(node)
                node = node.parent  # it stays as long as what hangs below it
        return sum(len(node.host) for node in kept)

    def cancel(self, blocks: Sequence[int]) -> None:
        self.reserved.difference_update(blocks)
        self._cells.host.give(ADAPTER, blocks)
        self._cells.epoch += 1

    def add_adapter(self, uid: int, blocks: tuple[int, ...]) -> AdapterNode:
        """Registers an adapter whose master copy is in these reserved host blocks."""
        node = AdapterNode(uid, len(blocks))
        self.adapters[uid] = node
        self._own(node, blocks)
        self._cells.visit([node])  # an adapter that is loaded is about to be used
        self._cells.candidates.offer(node)
        return node

    def expect_adapter(self, uid: int, size: int, last: AdapterNode | None = None) -> AdapterNode:
        """Registers an adapter that is on the disk only: requests may queue for it, and `arrive` gives it its data.

        Args:
            last: its node when it was in memory; its visits count on.
        """
        node = AdapterNode(uid, size)
        node.reading = True
        if last is not None:
            node.count, node.last_use, node.hits = last.count, last.last_use, last.hits
        self.adapters[uid] = node
        return node

    def arrive(self, node: AdapterNode, blocks: tuple[int, ...], visited: bool) -> None:
        """An expected adapter's master copy is in these reserved host blocks; `visited`: it is about to be used."""
        node.reading = False
        self._own(node, blocks)
        if visited:
            self._cells.visit([node])
        self._cells.candidates.offer(node)
        self._cells.epoch += 1

    def give_up(self, node: AdapterNode) -> None:
        """An expected adapter does not come, and nobody waits for it any more."""
        assert node.reading and not (node.users or node.wanted), "gave up an adapter that is waited for"
        node.gone, node.reading = True, False
        del self.adapters[node.uid]

    def back(self, node: AdapterNode, backed: bool) -> None:
        """Whether the adapter may be dropped from memory: its files are on the disk as they were read."""
        node.backed = backed
        self._cells.candidates.offer(node)
        self._cells.epoch += 1

    def _own(self, node: AdapterNode, blocks: tuple[int, ...]) -> None:
        self.reserved.difference_update(blocks)
        node.host = blocks

    def pin(self, node: AdapterNode, pinned: bool) -> bool:
        """Pins or unpins; pinning brings the adapter in. False: no room now, nothing changed."""
        if pinned and not self._cells.bring_adapter(node, demand=True):
            return False
        self._cells.pin(node, pinned)
        (self._pinned.add if pinned else self._pinned.discard)(node)
        self._cells.retire(node)
        return True

    def bring_in(self, node: AdapterNode) -> None:
        """Starts an adapter's copy into free blocks, if nothing else is on its way.

        When many are loaded at once, the monitor fetches the others while the link idles: all their copies
        together would delay a request's, and blocks that are being filled cannot be evicted.
        """
        idle = not self._cells.traffic.backlog["in"]
        if idle and node.on_host and not node.device and not node.dying and node.size <= self._cells.room(ADAPTER):
            self._cells.bring_adapter(node, demand=False)

    def hasten(self, node: AdapterNode) -> None:
        """A request waits for the adapter: its copy, if one is under way, overtakes prefetches."""
        self._cells.traffic.promote(node)

    def kill(self, node: AdapterNode) -> None:
        """Ends an adapter version: no new lease, everything freed when its last user is gone."""
        self._cells.pin(node, False)
        self._pinned.discard(node)
        node.dying = True
        for flying, copy in self._cells.traffic.flying.items():
            if copy.adapter is node:  # its end waits for them: copies on demand must not delay them
                self._cells.traffic.promote(flying)
        self._cells.retire(node)

    # -- the queue ----------------------------------------------------------------------------

    def expect(self, origin: Origin, tokens: Sequence[int], reuse: bool, place: int, begun: bool = False) -> Want:
        """The queued sequence at this place of the order of service will need this adapter version and prefix.

        `begun`: it has drawn tokens before, which its client may have.
        """
        adapter = origin.adapter
        assert self.adapters.get(adapter.uid) is adapter, "a sequence is queued for an adapter version that is gone"
        nodes: list[Node] = [adapter]
        if reuse and self.prefix_reuse and not adapter.reading:  # or its prefix might keep the room that this needs
            path = self.tree.match(origin, tokens, limit=len(tokens) - 1)
            resident = [node for node in path if node.device]
            nodes += dict.fromkeys((*resident[-1:], *path[-1:]))  # the nodes above are kept by them
        for node in nodes:
            self._cells.want(node, place)
        want = Want(adapter, tuple(nodes), place, begun)
        self._wants[want] = None
        return want

    def unexpect(self, want: Want) -> None:
        """The queued sequence runs or is gone."""
        del self._wants[want]
        self._unwant(want, 0)
        self._cells.retire(want.adapter)

    def _unwant(self, want: Want, first: int) -> None:
        """The queued sequence needs only the first so many of its nodes any more."""
        for node in want.nodes[first:]:
            self._cells.unwant(node, want.place)
        want.nodes = want.nodes[:first]

    def serve(self, place: int) -> None:
        """The sequence at this place has got its lease."""
        self.grants += 1
        self._cells.candidates.queued.served = place

    def hint(self, origin: Origin, tokens: Sequence[int]) -> int:
        """`Prefetch`: starts the copies that a request would need; its blocks that are under way.

        Takes only free blocks, and idle ones that have a copy and that the queue does not need.
        """
        cells, adapter = self._cells, origin.adapter
        path = self.tree.match(origin, tokens, len(tokens) - 1) if self.prefix_reuse else []
        missing = [node for node in path if not node.device]
        need = 0 if adapter.device else adapter.size
        much = cells.traffic.backlog["in"] + need + len(missing) > HINT_SHARE * self.total
        if much or self.forecast.queued_s > HINT_S:
            return _coming(adapter, path)
        for node in (adapter, *path):  # the room is not made of the nodes that the hint names
            cells.lock(node)
        try:
            room = cells.make_room(need, len(missing), gently=True)
            log.debug("hint for adapter %d: %d blocks missing, room=%s", adapter.uid, need + len(missing), room)
            if room:
                cells.bring_adapter(adapter, demand=False)
                cells.bring_path(origin, path, demand=False)
                cells.visit((adapter, *path))
        finally:
            for node in (*reversed(path), adapter):
                cells.unlock(node, used=False)
        return _coming(adapter, path)

    # -- copies -------------------------------------------------------------------------------

    def tend(self, now: float, running: int) -> None:
        """Makes a round of the monitor if one is due; its copies go out with the next `take_copies`."""
        self._monitor.tend(now, running)

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies decided since the last call; they must be started before the step that is planned with them."""
        traffic = self._cells.traffic
        copies, traffic.outbox = tuple(traffic.outbox), []
        return copies

    def landed(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._cells.landed(copy)
            self._cells.retire(copy.adapter)

    def lost(self, copy: Copy) -> bool:
        """A copy has failed, and no lease waits for it: a pinned adapter is not pinned any more.

        False while copies of what depends on it are under way; then ask again.
        """
        if not self._cells.lost(copy):
            return False
        for adapter in self._pinned & set(copy.nodes):
            self.pin(adapter, False)
        self._cells.retire(copy.adapter)
        return True

    def flush(self) -> int:
        """Drops all KV that no lease or copy uses, in both tiers; device blocks freed."""
        before = self._cells.device.free
        for adapter in self.adapters.values():
            for node in reversed(list(self.tree.below(adapter))):
                if node.parent is not None and not (node.users or node.moving or node.children):
                    self._cells.forget(node)
        return self._cells.device.free - before


def _coming(adapter: AdapterNode, path: Sequence[Node]) -> int:
    """Blocks of these nodes that are on their way to the device."""
    return sum(node.size for node in (adapter, *path) if node.coming)
