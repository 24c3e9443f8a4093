"""Many replicas seen as one: their constants, counters and blocks put together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jlora.adapters.names import is_key
from jlora.cluster.attach import Attached
from jlora.cluster.view import ReplicaView
from jlora.replica import Member, ReplicaInfo, ReplicaState, RouterStats
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import CacheState, EngineStats, MergeState, Owners, TierState
from jlora.validation import Limits

# What must be equal, or an answer would depend on the replica.
SAME = ("model", "dtype", "eos_ids")
FORMS = ("one_row", "kernels")  # of the same products, added in another order
SUMMED = (
    "running", "waiting", "live_requests", "steps", "generated_tokens", "prompt_tokens", "preemptions",
    "compiles_after_warmup", "programs_left", "plan_s", "dispatch_s", "read_s", "commit_s",
)  # fmt: skip


def difference(one: ReplicaInfo, other: ReplicaInfo) -> str:
    """In what two replicas differ that must be equal; "" if in nothing."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in SAME}
    pairs["vocab"] = one.limits.vocab, other.limits.vocab
    if one.base and other.base:
        pairs["weights"] = one.base[:12], other.base[:12]
    return ", ".join(f"{name} {b!r}, not {a!r}" for name, (a, b) in pairs.items() if a != b)


def rounding(one: ReplicaInfo, other: ReplicaInfo) -> str:
    """In what two replicas differ that makes them round differently; "" if in nothing."""
    pairs = {f"engine.{name}": (getattr(one.config.engine, name), getattr(other.config.engine, name)) for name in FORMS}
    return ", ".join(f"{name} = {b!r}, not {a!r}" for name, (a, b) in pairs.items() if a != b)


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


def state(told: Sequence[Told], members: Iterable[Member], policy: str, router: RouterStats) -> ReplicaState:
    """Sums over the replicas that have answered; the longest gap is that of the worst.

    Args:
        policy: of the cache, if none has answered.
    """
    servers = [server for server, _ in told]
    steps = max(1, sum(server.steps for server in servers))
    stats = EngineStats(
        **{name: sum(getattr(server, name) for server in servers) for name in SUMMED},
        host_step_s=sum(server.host_s_per_step * server.steps for server in servers) / steps,
        merge=_merge(servers),
    )
    gap = max((server.longest_engine_gap_s for server in servers), default=0.0)
    by_name = tuple(sorted(members, key=lambda member: member.name))
    return ReplicaState(_cache([cache for _, cache in told], policy), stats, gap, by_name, router)


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


def _cache(caches: Sequence[pb.CacheState], policy: str) -> CacheState:
    own = ("policy", "hbm", "host")
    summed = {
        field.name: sum(getattr(cache, field.name) for cache in caches)
        for field in dataclasses.fields(CacheState)
        if field.name not in own
    }
    return CacheState(
        policy=caches[0].policy if caches else policy,
        hbm=_tier([cache.hbm for cache in caches]),
        host=_tier([cache.host for cache in caches]),
        **summed,
    )


def _tier(tiers: Sequence[pb.TierState]) -> TierState:
    names = [field.name for field in dataclasses.fields(TierState)]
    return TierState(**{name: sum(getattr(tier, name) for tier in tiers) for name in names})
