"""Many replicas seen as one: their constants, counters and blocks put together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jlora.adapters.names import is_key
from jlora.cluster.attach import Attached
from jlora.cluster.view import ReplicaView
from jlora.replica import Member, ReplicaInfo, ReplicaState, RouterStats
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import CacheState, EngineStats, MergeState, Owners, TierState
from jlora.validation import Limits

# What must be equal, or an answer would depend on the replica.
SAME = ("model", "dtype")
FORMS = ("one_row", "kernels")  # of the same products, added in another order
NOW = ("running", "waiting", "live_requests", "programs_left")  # of `EngineStats`
COUNTERS = (
    "steps", "generated_tokens", "prompt_tokens", "preemptions", "compiles_after_warmup", "plan_s", "dispatch_s",
    "read_s", "commit_s",
)  # fmt: skip
LATE_S = 4.0  # two answers may come in another order within twice their time limit; a process takes longer to start
CACHE_NOW = ("in_flight", "invalid_kv")  # of `CacheState`
CACHE_COUNTERS = tuple(
    field.name for field in dataclasses.fields(CacheState) if field.name not in ("policy", "hbm", "host", *CACHE_NOW)
)


def difference(one: ReplicaInfo, other: ReplicaInfo) -> str:
    """In what two replicas differ that must be equal; "" if in nothing."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in SAME}
    pairs["target_modules"] = one.config.adapters.target_modules, other.config.adapters.target_modules
    pairs["vocab"] = one.limits.vocab, other.limits.vocab
    ends = set(one.eos_ids), set(other.eos_ids)
    if not (ends[0] <= ends[1] or ends[1] <= ends[0]):  # another release may know one more: see `rounding`
        pairs["eos_ids"] = one.eos_ids, other.eos_ids
    if one.base and other.base:
        pairs["weights"] = one.base[:12], other.base[:12]
    return ", ".join(f"{name} {b!r}, not {a!r}" for name, (a, b) in pairs.items() if a != b)


def rounding(one: ReplicaInfo, other: ReplicaInfo) -> str:
    """In what two replicas differ that may make them round or end differently; "" if in nothing."""
    pairs = {f"engine.{name}": (getattr(one.config.engine, name), getattr(other.config.engine, name)) for name in FORMS}
    pairs["eos_ids"] = one.eos_ids, other.eos_ids
    pairs["devices"] = _kinds(one), _kinds(other)  # they decide what "auto" takes, and how XLA adds
    return ", ".join(f"{name} = {b!r}, not {a!r}" for name, (a, b) in pairs.items() if a != b)


def _kinds(replica: ReplicaInfo) -> str:
    """The kind of each device, without its number."""
    return ", ".join(device.rpartition(" ")[0] for device in replica.devices)


def info(infos: Sequence[ReplicaInfo]) -> ReplicaInfo:
    """Of replicas that serve the same: room for the sequences of all, and requests that fit each of them."""
    first = infos[0]
    limits = Limits(
        first.limits.vocab,
        min(one.limits.max_len for one in infos),
        min(one.limits.capacity_tokens for one in infos),
    )
    engine = dataclasses.replace(
        first.config.engine,
        max_seqs=sum(one.config.engine.max_seqs for one in infos),
        max_queue=sum(one.config.engine.max_queue for one in infos),
    )
    return dataclasses.replace(
        first,
        limits=limits,
        devices=tuple(device for one in infos for device in one.devices),
        config=dataclasses.replace(first.config, engine=engine),
    )


Told = tuple[pb.ServerInfo, pb.CacheState]


def member(one: Attached, seen: ReplicaView) -> Member:
    """A replica as the service's state shows it."""
    on_device = sum(tier == "HBM" for tier in seen.tiers.values())
    return Member(
        one.name, one.address, seen.health, seen.sent, seen.running, seen.waiting, seen.free_blocks, seen.blocks,
        on_device, seen.step_s,
    )  # fmt: skip


class Counted:
    """What the replicas have counted. One that restarts, or does not answer for a while, takes nothing back."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}  # by replica
        self._before: Counter[str] = Counter()  # by processes that have ended

    def hear(self, told: Mapping[str, Told]) -> None:
        """The counters of the replicas that have answered, by name."""
        for name, (server, cache) in told.items():
            now = {key: getattr(server, key) for key in ("uptime_s", *COUNTERS)}
            now |= {key: getattr(cache, key) for key in CACHE_COUNTERS}
            last = self._last.get(name, now)
            younger_s = last["uptime_s"] - now["uptime_s"]
            if younger_s > LATE_S:  # another process has the name
                self._before.update(last)
            elif younger_s > 0:  # a later answer has been heard already
                continue
            self._last[name] = now

    def total(self, key: str) -> Any:
        """The sum over all processes that this router has heard of, each since its start."""
        return self._before[key] + sum(last[key] for last in self._last.values())


def state(
    told: Sequence[Told], members: Iterable[Member], policy: str, router: RouterStats, counted: Counted
) -> ReplicaState:
    """Sums over the replicas that have answered, but for counters; the longest gap is that of the worst.

    Args:
        policy: of the cache, if none has answered.
    """
    servers = [server for server, _ in told]
    steps = max(1, sum(server.steps for server in servers))
    stats = EngineStats(
        **{name: sum(getattr(server, name) for server in servers) for name in NOW},
        **{name: counted.total(name) for name in COUNTERS},
        host_step_s=sum(server.host_s_per_step * server.steps for server in servers) / steps,
        merge=_merge(servers),
    )
    gap = max((server.longest_engine_gap_s for server in servers), default=0.0)
    by_name = tuple(sorted(members, key=lambda member: member.name))
    return ReplicaState(_cache([cache for _, cache in told], policy, counted), stats, gap, by_name, router)


Owned = tuple[pb.CacheState, Mapping[int, str]]  # and the keys of its adapters by uid


def owners(told: Sequence[Owned], replicas: int) -> Owners:
    """KV by version number, over those of so many `replicas` that have answered. There are no cells."""
    kv: Counter[int] = Counter()
    known = True
    for cache, keys in told:
        for uid, blocks in cache.kv.items():
            key = keys.get(uid, "")
            if not uid or is_key(key):
                kv[int(key.rpartition("@")[2]) if uid else 0] += blocks
            else:
                known = False  # it has left since
    whole = known and len(told) == replicas and all(cache.kv_whole for cache, _ in told)
    return Owners((), 1, dict(kv), whole)


def _merge(servers: Sequence[pb.ServerInfo]) -> MergeState:
    """Of the first replica that has merged an adapter, by the name that clients know."""
    for server in servers:
        if server.merge.adapter:
            values = {f.name: getattr(server.merge, f.name) for f in dataclasses.fields(MergeState)}
            return MergeState(**{**values, "adapter": server.merge.adapter.rpartition("@")[0]})
    return MergeState()


def _cache(caches: Sequence[pb.CacheState], policy: str, counted: Counted) -> CacheState:
    return CacheState(
        policy=caches[0].policy if caches else policy,
        hbm=_tier([cache.hbm for cache in caches]),
        host=_tier([cache.host for cache in caches]),
        **{name: sum(getattr(cache, name) for cache in caches) for name in CACHE_NOW},
        **{name: counted.total(name) for name in CACHE_COUNTERS},
    )


def _tier(tiers: Sequence[pb.TierState]) -> TierState:
    names = [field.name for field in dataclasses.fields(TierState)]
    return TierState(**{name: sum(getattr(tier, name) for tier in tiers) for name in names})
