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
MERGE_COUNTERS = ("switches", "reloads")  # of `MergeState`
CACHE_NOW = (  # of `CacheState`
    "in_flight", "invalid_kv", "adapters_registered", "adapters_hbm", "adapters_host", "adapters_disk",
    "adapters_loading", "adapters_reading",
)  # fmt: skip
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Life:
    """One process of a replica, as its last answer showed it.

    Attributes:
        process: its name.
        asked: when it was asked for this answer, by the router's clock; uptime_s: what it said then.
        now: its counters; first: what they were before they counted here.
    """

    process: str
    asked: float
    uptime_s: float
    now: Mapping[str, float]
    first: Mapping[str, float]

    def total(self, key: str) -> float:
        return self.now[key] - self.first[key]


class Counted:
    """What the replicas have counted since this router began to hear them.

    Of a process that is older than the router, only what comes after its first answer counts: a restart of the router
    adds no lives to a counter's rate. One that restarts, or does not answer for a while, takes nothing back.
    """

    def __init__(self, began: float) -> None:
        """`began`: of the router."""
        self._began = began
        self._lives: dict[str, _Life] = {}  # by replica
        self._before: Counter[str] = Counter()  # by processes that have ended

    def hear(self, told: Mapping[str, Told], asked: float, now: float) -> None:
        """The counters of the replicas that have answered, by name; when they were asked, and when this is."""
        for name, (server, cache) in told.items():
            counts = {key: getattr(server, key) for key in COUNTERS}
            counts |= {key: getattr(server.merge, key) for key in MERGE_COUNTERS}
            counts |= {key: getattr(cache, key) for key in CACHE_COUNTERS}
            last = self._lives.get(name)
            if last is not None and asked < last.asked:
                continue  # a later answer has been heard already
            younger = last is not None and server.uptime_s < last.uptime_s
            # An older release has no names: one that is younger than before is another process.
            if last is None or server.process != last.process or (younger and not server.process):
                if last is not None:
                    self._before.update({key: last.total(key) for key in counts})
                first = counts if now - server.uptime_s < self._began else dict.fromkeys(counts, 0)
            elif younger:
                continue  # as above
            else:
                first = last.first
            self._lives[name] = _Life(server.process, asked, server.uptime_s, counts, first)

    def total(self, key: str) -> Any:
        """The sum over all processes that this router has heard of."""
        return self._before[key] + sum(life.total(key) for life in self._lives.values())


def state(
    told: Sequence[Told],
    members: Iterable[Member],
    policy: str,
    router: RouterStats,
    counted: Counted,
    waiting: Sequence[int] = (),
) -> ReplicaState:
    """Sums over the replicas that have answered, but for counters; the longest gap is that of the worst.

    Args:
        policy: of the cache, if none has answered.
        waiting: open completions of each request that waits at the router, which no replica knows.
    """
    servers = [server for server, _ in told]
    steps = max(1, sum(server.steps for server in servers))
    now = {name: sum(getattr(server, name) for server in servers) for name in NOW}
    now["waiting"] += sum(waiting)
    now["live_requests"] += len(waiting)
    stats = EngineStats(
        **now,
        **{name: counted.total(name) for name in COUNTERS},
        host_step_s=sum(server.host_s_per_step * server.steps for server in servers) / steps,
        merge=_merge([server.merge for server in servers], counted),
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


def _merge(merges: Sequence[pb.MergeState], counted: Counted) -> MergeState:
    """Of the first replica that has merged an adapter, or of the first one; by the name that clients know."""
    shown = next((merge for merge in merges if merge.adapter), merges[0] if merges else pb.MergeState(uid=-1))
    return MergeState(
        adapter=shown.adapter.rpartition("@")[0],
        uid=shown.uid if shown.adapter else -1,
        share=shown.share,
        **{name: counted.total(name) for name in MERGE_COUNTERS},
        host_bytes=sum(merge.host_bytes for merge in merges),
        adapters_cost=shown.adapters_cost,
        alpha=shown.alpha,
        beta=shown.beta,
    )


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
