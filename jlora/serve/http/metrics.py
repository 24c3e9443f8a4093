"""`/metrics`: one scrape as Prometheus's metrics, ours (`jlora_*`) and vLLM's names (`vllm:*`).

A scrape takes one snapshot of the replica, so its numbers belong together; nothing is kept between two scrapes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jlora.replica import ReplicaInfo, ReplicaState
from jlora.serve import pages
from jlora.serve.backend import Backend
from jlora.serve.http.call import Call
from jlora.serve.observed import Observed
from jlora.types import AdapterInfo

CLASSES = ("free", "adapters", "history_kv", "running_kv")
TIERS = ("HBM", "HOST", "DISK", "LOADING")
REASONS = ("stop", "length", "abort", "error")
THERE = ("up", "draining")  # health of a replica that says what it has
OPEN = "application/openmetrics-text"
NAMED = 64  # adapters in a label: as many as run and wait at once, within reason


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of one scrape, in place of prometheus_client's registry, of which only `collect` is called.

    `adapters`: None if they are not known yet.
    """

    info: ReplicaInfo
    state: ReplicaState
    adapters: Sequence[AdapterInfo] | None
    observed: Observed
    loop_gap_s: float

    def collect(self) -> Iterator[Metric]:
        yield from self._cache()
        yield from self._engine()
        yield from self._adapters()
        yield from self._router()
        yield from self._vllm()
        yield from self._vllm_cache()
        yield from self._vllm_times()

    def _cache(self) -> Iterator[Metric]:
        cache = self.state.cache
        blocks = GaugeMetricFamily("jlora_blocks", "Blocks of a tier by what they hold.", labels=("tier", "class"))
        for tier, blocks_of in (("hbm", cache.hbm), ("host", cache.host)):
            for kind in CLASSES:
                blocks.add_metric((tier, kind), getattr(blocks_of, kind))
        yield blocks
        adapters = GaugeMetricFamily("jlora_adapters", "Adapters by where their weights are.", labels=("tier",))
        for name, count in self._where().items():
            adapters.add_metric((name.lower(),), count)
        yield adapters
        said = "Those of tier loading that come from the disk; a router sums them over its replicas."
        yield _gauge("jlora_adapters_reading", said, cache.adapters_reading)
        moved = CounterMetricFamily("jlora_moved_bytes", "Bytes copied between the tiers.", labels=("direction",))
        moved.add_metric(("in",), cache.bytes_swapped_in)
        moved.add_metric(("out",), cache.bytes_swapped_out)
        yield moved
        yield _gauge("jlora_in_flight_blocks", "Blocks being copied between the tiers.", cache.in_flight)
        yield _gauge("jlora_invalid_kv_blocks", "Device blocks of KV that no request can use.", cache.invalid_kv)
        for name, said, value in (
            ("adapter_lookups", "Admitted requests with an adapter.", cache.adapter_lookups),
            ("adapter_hits", "Those whose adapter was on the device.", cache.adapter_hits),
            ("kv_lookup_tokens", "Prompt tokens looked up in the prefix cache.", cache.kv_lookup_tokens),
            ("kv_hit_tokens", "Those found in either tier.", cache.kv_hit_tokens),
            ("kv_host_hit_tokens", "Those found on the host only.", cache.kv_host_hit_tokens),
            ("clean_evictions", "Evictions that needed no copy.", cache.clean_evictions),
            ("lost_blocks", "Blocks of KV dropped without a copy elsewhere.", cache.blocks_lost),
            ("adapters_dropped", "Adapters that left memory for the disk.", cache.adapters_dropped),
            ("adapter_reads", "Reads of registered adapters into memory.", cache.adapter_reads),
            ("adapter_reads_failed", "Reads of registered adapters that failed.", cache.adapter_reads_failed),
            ("adapter_read_seconds", "Seconds of the reads that did not fail.", cache.adapter_read_s),
            ("cold_predicted_starts", "Cold starts whose first token was predicted.", cache.cold_predicted),
            ("cold_predicted_seconds", "Their time to the first token as predicted.", cache.cold_predicted_s),
            ("cold_measured_seconds", "Their time to the first token as it was.", cache.cold_measured_s),
            ("cold_error_seconds", "The differences between the two, without signs.", cache.cold_error_s),
            ("recomputed_tokens", "Tokens found on the host but recomputed.", cache.recomputed_tokens),
            ("streamed_requests", "Requests that started before their copies landed.", cache.streamed),
        ):
            yield _counter(f"jlora_{name}", said, value)

    def _where(self) -> dict[str, int]:
        """Adapters by tier. A router's replicas count theirs each: there it is where the list has them, once known."""
        if self.state.router is None:
            return {name: getattr(self.state.cache, f"adapters_{name.lower()}") for name in TIERS}
        listed = Counter(info.tier for info in self.adapters or ())
        return {name: listed[name] for name in TIERS if self.adapters is not None}

    def _engine(self) -> Iterator[Metric]:
        stats = self.state.stats
        yield _gauge("jlora_running_sequences", "Sequences in the batch.", stats.running)
        yield _gauge("jlora_waiting_sequences", "Sequences that wait for room or copies.", stats.waiting)
        yield _gauge("jlora_live_requests", "Requests that have not ended.", stats.live_requests)
        yield _gauge("jlora_programs_left", "Programs that are still being compiled.", stats.programs_left)
        yield _gauge("jlora_host_step_seconds", "Mean Python time of a step.", stats.host_step_s)
        yield _gauge("jlora_longest_loop_gap_seconds", "The event loop's longest stall in a minute.", self.loop_gap_s)
        gap = self.state.longest_gap_s
        yield _gauge("jlora_longest_engine_gap_seconds", "The longest time between two steps in a minute.", gap)
        parts = CounterMetricFamily("jlora_step_seconds", "Time of all steps by part.", labels=("part",))
        for part in ("plan", "dispatch", "read", "commit"):
            parts.add_metric((part,), getattr(stats, f"{part}_s"))
        yield parts
        merged = GaugeMetricFamily("jlora_merged", "The share of the weights with the adapter.", labels=("adapter",))
        merged.add_metric((stats.merge.adapter,), stats.merge.share)  # 0 of "" if nothing is merged, not a gap
        yield merged
        kept = stats.merge.host_bytes
        yield _gauge("jlora_merge_host_bytes", "Host memory that taking the adapter out of the weights needs.", kept)
        cost = stats.merge.adapters_cost
        yield _gauge("jlora_merge_adapters_cost", "The share of a step that an adapter of rank 16 costs.", cost)
        limits = GaugeMetricFamily("jlora_merge_threshold", "It merges above alpha, until below beta.", labels=("of",))
        for name in ("alpha", "beta"):
            limits.add_metric((name,), getattr(stats.merge, name))
        yield limits
        yield _counter("jlora_merge_switches", "Merges of an adapter into the weights.", stats.merge.switches)
        yield _counter("jlora_weight_reloads", "Loads of the weights because a merge was left.", stats.merge.reloads)
        yield _counter("jlora_steps", "Steps of the engine.", stats.steps)
        yield _counter("jlora_preemptions", "Sequences that lost their place.", stats.preemptions)
        yield _counter("jlora_compiles", "Programs that a step had to compile.", stats.compiles_after_warmup)

    def _adapters(self) -> Iterator[Metric]:
        seen = self.observed
        families = [
            CounterMetricFamily(f"jlora_adapter_{name}", said, labels=("adapter",))
            for name, said in (
                ("requests", "Answered requests by adapter; the base goes by its name."),
                ("prompt_tokens", "Prompt tokens of answered requests by adapter."),
                ("output_tokens", "Output tokens of answered requests by adapter."),
            )
        ]
        for name, counts in seen.by_adapter.lines().items():
            for family, count in zip(families, counts, strict=True):
                family.add_metric((name,), count)
        yield from families
        cold = HistogramMetricFamily("jlora_cold_start_seconds", "Waits for copies, by what came and how.",
                                     labels=("of", "kind"))  # fmt: skip
        for kind, histogram in seen.adapter_cold.items():
            cold.add_metric(("adapter", kind), histogram.buckets(), histogram.sum)
        cold.add_metric(("kv", "wait"), seen.kv_cold.buckets(), seen.kv_cold.sum)
        yield cold

    def _router(self) -> Iterator[Metric]:
        """The replicas behind a router, and what it has done; an engine has none of it."""
        done = self.state.router
        if done is None:
            return
        up = GaugeMetricFamily("jlora_replica_up", "1 for a replica that takes requests.", labels=("replica", "health"))
        for one in self.state.members:
            up.add_metric((one.name, one.health), one.health == "up")
        yield up
        for name, said in (
            ("sent", "This router's live requests there."),
            ("running", "Sequences in the batch of a replica."),
            ("waiting", "Sequences that wait at a replica."),
            ("free_blocks", "Blocks of a replica's pool that hold nothing, while it is there."),
        ):
            family = GaugeMetricFamily(f"jlora_replica_{name}", said, labels=("replica",))
            for one in self.state.members:
                if name != "free_blocks" or one.health in THERE:  # a pool that is gone is neither full nor free
                    family.add_metric((one.name,), getattr(one, name))
            yield family
        yield _counter("jlora_router_moves", "Requests that the balance has moved.", done.moves)
        yield _gauge("jlora_balance_longest_solve_seconds", "The longest time of a plan of moves.", done.solve_s)
        yield _gauge("jlora_balance_most_candidates", "Requests of the largest plan of moves.", done.candidates)
        yield _counter("jlora_router_resumed", "Requests sent again after a loss, drain or refusal.", done.resumed)
        yield _counter("jlora_placement_fetches", "Adapters that the placement has had replicas fetch.", done.fetches)

    @property
    def _labels(self) -> dict[str, str]:
        return {"model_name": self.info.model, "engine": "0"}

    def _vllm(self) -> Iterator[Metric]:
        stats, labels = self.state.stats, self._labels
        yield _gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running, labels)
        yield _gauge("vllm:num_requests_waiting", "Sequences that wait for room or copies.", stats.waiting, labels)
        yield _counter("vllm:num_preemptions", "Sequences that lost their place.", stats.preemptions, labels)
        yield _counter("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens, labels)
        yield _counter("vllm:generation_tokens", "Tokens that requests received.", stats.generated_tokens, labels)
        ends = CounterMetricFamily(
            "vllm:request_success", "Completions by how they ended.", labels=(*labels, "finished_reason")
        )
        for reason in REASONS:
            ends.add_metric((*labels.values(), reason), self.observed.ends[reason])
        yield ends
        busy = {
            "max_lora": str(self.info.config.engine.max_seqs),  # one for each sequence of a step
            "running_lora_adapters": _names(info.name for info in self.adapters or () if info.running),
            "waiting_lora_adapters": _names(info.name for info in self.adapters or () if info.waiting),
        }
        yield _gauge("vllm:lora_requests_info", "Adapters of running and waiting requests.", time.time(), busy)

    def _vllm_cache(self) -> Iterator[Metric]:
        cache, labels = self.state.cache, self._labels
        facts = {"block_size": str(self.info.block_tokens), "num_gpu_blocks": str(cache.hbm.total)}
        yield _gauge("vllm:cache_config_info", "The cache's settings.", 1, {**facts, "engine": "0"})
        # Idle KV and idle adapters leave when a request needs their blocks, so they count as free, as in vLLM.
        used = cache.hbm.running_kv / max(1, cache.hbm.total)
        yield _gauge("vllm:kv_cache_usage_perc", "The share of blocks that running requests use.", used, labels)
        lookups, hits = cache.kv_lookup_tokens, cache.kv_hit_tokens
        yield _counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lookups, labels)
        yield _counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", hits, labels)

    def _vllm_times(self) -> Iterator[Metric]:
        seen, labels = self.observed, self._labels
        for name, said, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", seen.first_token),
            ("inter_token_latency_seconds", "Between two tokens.", seen.gap),
            ("time_per_output_token_seconds", "Between two tokens; an older name.", seen.gap),
            ("request_time_per_output_token_seconds", "A request's mean between two tokens.", seen.per_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", seen.whole),
            ("request_queue_time_seconds", "In the queue.", seen.queue),
            ("request_prefill_time_seconds", "From the blocks to the first token.", seen.prefill),
            ("request_decode_time_seconds", "From the first token to the end.", seen.decode),
            ("request_prompt_tokens", "Tokens of a prompt.", seen.prompt_tokens),
            ("request_generation_tokens", "Tokens of an answer.", seen.output_tokens),
            ("request_max_num_generation_tokens", "Tokens of an answer's longest completion.", seen.longest),
            ("request_params_n", "Completions that a request asks for.", seen.completions),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", said, labels=tuple(labels))
            family.add_metric(tuple(labels.values()), histogram.buckets(), histogram.sum)
            yield family


def _gauge(name: str, said: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, said, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family


def _counter(name: str, said: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    """The name gets `_total`."""
    family = CounterMetricFamily(name, said, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family


def _names(names: Iterable[str]) -> str:
    return ",".join(sorted(names)[:NAMED])


async def metrics(backend: Backend, seen: pages.Seen, call: Call) -> None:
    """`GET /metrics`, in the format that the scraper accepts."""
    replica = backend.loaded
    adapters = await seen.infos(replica)
    state = await asyncio.wrap_future(replica.state())  # afterwards: the load is that of now
    shown = Snapshot(replica.info, state, adapters, backend.observed, backend.gaps.longest())
    # A colon is no character to escape, but prometheus_client's default for OpenMetrics would replace it.
    wanted = f"{OPEN}; version=1.0.0;escaping=allow-utf-8" if OPEN in call.headers.get("accept", "") else ""
    encode, kind = choose_encoder(wanted)
    await call.whole(encode(shown), 200, {"content-type": kind})
