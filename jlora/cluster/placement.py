"""Which replicas serve which adapters: LoRAServe's Algorithm 1, and the placements that it is compared with.

A placement gives each adapter its servers with their parts of its requests, which sum to 1. Utilisation is an
adapter's tokens per second over the operating point of its rank: what share of a server it takes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linear_sum_assignment

Placement = Mapping[str, Mapping[str, float]]  # adapter -> server -> its part
LEAST = 1e-9  # utilisation below this is none
QUIET = 0.1  # utilisation below which a server need not give anything away
SLACK = 0.25  # of the mean: how much more a server may have to do before adapters move


@dataclass(frozen=True, slots=True)
class Wanted:
    """An adapter to place. `rate`: tokens per second; `size`: what moving it costs."""

    key: str
    rank: int
    rate: float
    size: int = 1


@dataclass(slots=True)
class _Bin:
    """What one server would serve; which one is decided last."""

    used: float = 0.0
    rank: int = 0  # the largest
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, adapter: Wanted, part: float, used: float) -> None:
        self.parts[adapter.key] = self.parts.get(adapter.key, 0.0) + part
        self.used += used
        self.rank = max(self.rank, adapter.rank)

    def take(self, key: str, part: float, use: float) -> float:
        """Takes a part of an adapter out, and returns it. `use`: of the whole adapter."""
        self.used -= part * use
        self.parts[key] -= part
        if self.parts[key] <= LEAST:
            del self.parts[key]
        return part


def loraserve(
    servers: Sequence[str],
    adapters: Sequence[Wanted],
    points: Mapping[int, float],
    last: Placement | None = None,
    slack: float = 0.0,
) -> Placement:
    """Algorithm 1. At equal demands the result is the same.

    Args:
        points: tokens per second of a server by rank.
        last: the placement so far.
        slack: while no server has this much more than the mean, nothing moves, and then only what is above the mean
            does (ours). 0: the paper's rule.
    """
    use = {adapter.key: adapter.rate / points[adapter.rank] for adapter in adapters}
    target = sum(use.values()) / len(servers)
    # Above 1, a server is slower than it should be; with all of them near it, noise may still take one above.
    most = max(QUIET, min((1 + slack) * target, max((1 + slack / 2) * target, 1.0)))
    if slack and last and (kept := _kept(servers, adapters, use, last, most)):
        return kept
    by_rank: dict[int, list[Wanted]] = {}
    for adapter in sorted(adapters, key=lambda a: (-a.rank, -use[a.key], a.key)):
        by_rank.setdefault(adapter.rank, []).append(adapter)
    budgets = budget({rank: sum(use[a.key] for a in group) for rank, group in by_rank.items()}, len(servers))
    bins: list[_Bin] = []
    leftovers: list[tuple[Wanted, float]] = []  # with the part that has no server yet
    for rank, group in by_rank.items():
        own = [_Bin() for _ in range(budgets[rank])]
        leftovers += _pack(own, group, use, target)
        bins += own
    bins += [_Bin() for _ in range(len(servers) - len(bins))]
    for adapter, part in leftovers:  # highest rank first
        _place_left(bins, adapter, part, use[adapter.key], target)
    return _permuted(bins, servers, adapters, last or {})


def budget(use: Mapping[int, float], servers: int) -> dict[int, int]:
    """Servers of each rank's own: its utilisation over the mean, rounded, and together at most all of them."""
    whole = sum(use.values())
    exact = {rank: servers * used / whole if whole > LEAST else 0.0 for rank, used in use.items()}
    found = {rank: int(share + 0.5) for rank, share in exact.items()}
    while sum(found.values()) > servers:  # the one that was rounded up most gives one back
        found[max(found, key=lambda rank: found[rank] - exact[rank])] -= 1
    return found


def _pack(
    bins: Sequence[_Bin], group: Sequence[Wanted], use: Mapping[str, float], target: float
) -> list[tuple[Wanted, float]]:
    """Fractional bin packing of one rank, the largest first; what has no room, with its part."""
    left = []
    at = 0
    for adapter in group:
        need, part = use[adapter.key], 1.0
        if need <= LEAST and bins:  # nobody asks for it: it only takes room
            min(bins, key=lambda b: len(b.parts)).add(adapter, 1.0, 0.0)
            continue
        while at < len(bins) and part > LEAST:
            room = target - bins[at].used
            taken = min(part, room / need)
            if taken > LEAST:
                bins[at].add(adapter, taken, taken * need)
                part -= taken
            if part > LEAST:
                at += 1
        if part > LEAST:
            left.append((adapter, part))
    return left


def _place_left(bins: Sequence[_Bin], adapter: Wanted, part: float, use: float, target: float) -> None:
    """To servers of the highest ranks that have room: there it makes nothing slower that is not slow already."""
    while True:
        room = [b for b in bins if b.used < target - LEAST] or list(bins)
        fits = [b for b in room if b.rank >= adapter.rank]
        if use <= LEAST:
            chosen = min(fits or room, key=lambda b: len(b.parts))
        elif fits:
            chosen = max(fits, key=lambda b: (b.rank, -b.used))
        else:
            chosen = max(room, key=lambda b: (not b.parts, b.rank, -b.used))
        space = target - chosen.used
        taken = part if use <= LEAST or space <= LEAST else min(part, space / use)
        chosen.add(adapter, taken, taken * use)
        part -= taken
        if part <= LEAST:
            return


def _kept(
    servers: Sequence[str],
    adapters: Sequence[Wanted],
    use: Mapping[str, float],
    last: Placement,
    most: float,
) -> Placement | None:
    """The last placement, without what servers have above `most`, and with homes for newcomers.

    Demand is noisy, and each new home is a transfer. None if that does not do: a server has no home at all, as one that
    has come, or there is too little room where an adapter may go. That is on servers of its rank or a higher one; an
    adapter that leaves a server goes to no higher rank than that server's, or ranks would mix more and more.
    """
    bins = {server: _Bin() for server in servers}
    left: list[tuple[Wanted, float, float]] = []  # with its part, and the highest rank of a server that it may go to
    for adapter in sorted(adapters, key=lambda a: (-a.rank, -use[a.key], a.key)):
        homes = {server: part for server, part in last.get(adapter.key, {}).items() if server in bins}
        for server, part in _normalised(homes).items():
            bins[server].add(adapter, part, part * use[adapter.key])
        left += [] if homes else [(adapter, 1.0, math.inf)]
    if not all(each.parts for each in bins.values()):
        return None
    by_key = {adapter.key: adapter for adapter in adapters}
    mean = sum(use.values()) / len(servers)
    for each in bins.values():
        if each.used > most:
            left += [(by_key[key], part, each.rank) for key, part in _cut(each, use, mean, most)]
    for adapter, part, highest in left:
        may = [each for each in bins.values() if adapter.rank <= each.rank <= highest]
        if not _place_beside(may, adapter, part, use, most):
            return None
    return _placed(bins, adapters)


def _place_beside(bins: Sequence[_Bin], adapter: Wanted, part: float, uses: Mapping[str, float], most: float) -> bool:
    """To those with room, the lowest rank first; False if they have too little."""
    use = uses[adapter.key]
    while part > LEAST:
        room = [each for each in bins if each.used < most - LEAST]
        if not room:
            return False
        chosen = min(room, key=lambda each: (each.rank, each.used))
        taken = part if use <= LEAST else min(part, (most - chosen.used) / use)
        chosen.add(adapter, taken, taken * use)
        part -= taken
    return True


def _cut(each: _Bin, use: Mapping[str, float], mean: float, most: float) -> list[tuple[str, float]]:
    """Takes what a server has above the mean: whole adapters, the largest that fit, and a part of one if it must."""
    taken = []
    for key in sorted(each.parts, key=lambda key: -each.parts[key] * use[key]):
        if LEAST < each.parts[key] * use[key] <= each.used - mean:
            taken.append((key, each.take(key, each.parts[key], use[key])))
    if each.used > most:
        key = max(each.parts, key=lambda key: each.parts[key] * use[key])
        taken.append((key, each.take(key, (each.used - mean) / use[key], use[key])))
    return taken


def _permuted(bins: Sequence[_Bin], servers: Sequence[str], adapters: Sequence[Wanted], last: Placement) -> Placement:
    """Gives the bins to servers such that as little as possible moves."""
    sizes = {adapter.key: adapter.size for adapter in adapters}
    stay = np.zeros((len(bins), len(servers)))
    column = {server: i for i, server in enumerate(servers)}
    for row, each in enumerate(bins):
        for key in each.parts:
            for server in last.get(key, ()):
                if server in column:
                    stay[row, column[server]] += sizes[key]
    rows, columns = linear_sum_assignment(stay, maximize=True)
    return _placed({servers[int(to)]: bins[row] for row, to in zip(rows, columns, strict=True)}, adapters)


def _placed(bins: Mapping[str, _Bin], adapters: Sequence[Wanted]) -> Placement:
    """The homes that servers' bins give adapters."""
    placed: dict[str, dict[str, float]] = {adapter.key: {} for adapter in adapters}
    for server, each in bins.items():
        for key, part in each.parts.items():
            placed[key][server] = part
    return {key: _normalised(parts) for key, parts in placed.items()}


def _normalised(parts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {server: part / whole for server, part in parts.items()}


def random_placement(servers: Sequence[str], adapters: Sequence[Wanted], seed: int = 0) -> Placement:
    """Each adapter on one server, with equal chances ("S-LoRA Random")."""
    draw = random.Random(seed)
    return {adapter.key: {draw.choice(servers): 1.0} for adapter in adapters}


def contiguous(servers: Sequence[str], adapters: Sequence[Wanted]) -> Placement:
    """Equal numbers of adapters on each server in order of rank ("S-LoRA Contiguous")."""
    ordered = sorted(adapters, key=lambda adapter: (adapter.rank, adapter.key))
    return {a.key: {servers[i * len(servers) // len(ordered)]: 1.0} for i, a in enumerate(ordered)}


def fitted(placed: Placement, adapters: Sequence[Wanted], room: Mapping[str, int]) -> Placement:
    """As much of a placement as the servers have room for.

    The parts that ask most for their size have room first. What has none goes to the adapter's other servers, or else
    to the one with most room left.

    Args:
        room: server -> the sum of its adapters' sizes at most.

    Returns:
        The same placement if all of it fits; else without the adapters that no server has room for.
    """
    sizes, rates = {a.key: a.size for a in adapters}, {a.key: a.rate for a in adapters}
    order = [
        (rates[key] * part / sizes[key], key, server) for key, parts in placed.items() for server, part in parts.items()
    ]
    left, kept, lost = dict(room), dict[str, dict[str, float]](), []
    for _, key, server in sorted(order, key=lambda one: (-one[0], *one[1:])):
        if sizes[key] <= left[server]:
            left[server] -= sizes[key]
            kept.setdefault(key, {})[server] = placed[key][server]
        else:
            lost.append(key)
    if not lost:
        return placed
    for key in lost:
        to = max(left, key=lambda server: left[server])
        if key not in kept and sizes[key] <= left[to]:
            left[to] -= sizes[key]
            kept[key] = {to: 1.0}
    return {key: _normalised(parts) for key, parts in kept.items()}


def moves(last: Placement, new: Placement) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(adapter, server) pairs: what servers have to fetch, and what they may drop."""
    changed = [key for key in {**last, **new} if last.get(key) is not new.get(key)]
    before, after = ({(key, server) for key in changed for server in p.get(key, ())} for p in (last, new))
    return sorted(after - before), sorted(before - after)
