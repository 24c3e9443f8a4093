"""Between protobuf messages and the frozen records of `jlora.types`.

An unset `optional` field takes the record's default, so that each default is written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import AdapterInfo, CacheState, Request, SamplingParams, TierState, Timing, TokenLogprob, Usage


def sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """`sampling`, `stopping` and the two logprob fields as one record, unchecked."""
    s, stop = request.sampling, request.stopping
    set_fields: dict[str, Any] = {}
    for message, names in (
        (s, ("temperature", "top_p", "seed", "repetition_penalty", "n")),
        (stop, ("max_tokens",)),
        (request, ("logprobs", "prompt_logprobs")),
    ):
        set_fields |= {name: getattr(message, name) for name in names if message.HasField(name)}
    return SamplingParams(
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=dict(s.logit_bias),
        min_tokens=stop.min_tokens,
        stop=tuple(stop.stop),
        stop_token_ids=tuple(stop.stop_token_ids),
        include_stop=stop.include_stop,
        ignore_eos=stop.ignore_eos,
        **set_fields,
    )


def engine_request(
    message: pb.GenerateRequest, request_id: str, prompt: Sequence[int], adapter: str | None, deadline: float | None
) -> Request:
    """The engine's record of a request, not yet validated; `deadline` is on the monotonic clock."""
    return Request(
        id=request_id,
        prompt=tuple(prompt),
        sampling=sampling_params(message),
        adapter=adapter,
        priority=message.priority,
        bypass_prefix_cache=message.bypass_prefix_cache,
        tenant=message.tenant,
        deadline=deadline,
    )


def token_logprob(entry: TokenLogprob | None) -> pb.TokenLogprob:
    """None (the prompt's first token) is an empty message."""
    if entry is None:
        return pb.TokenLogprob()
    top = [pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def total_usage(usages: Sequence[Usage]) -> pb.Usage:
    """Of n completions: the prompt counts once, the output tokens add up."""
    return pb.Usage(
        prompt_tokens=usages[0].prompt_tokens,
        cached_tokens=usages[0].cached_tokens,
        completion_tokens=sum(u.completion_tokens for u in usages),
    )


def joint_timing(timings: Iterable[Timing]) -> pb.Timing:
    """Of n completions: the one with the first token, and the mean of the gaps where there are any."""
    timings = list(timings)
    first = min(timings, key=lambda t: t.ttft or math.inf)  # one that was aborted early has no first token
    gaps = [t.tpot for t in timings if t.tpot > 0]
    return pb.Timing(
        queue_s=first.queue,
        adapter_cold_start_s=first.adapter_cold_start,
        kv_cold_start_s=first.kv_cold_start,
        prefill_s=first.prefill,
        ttft_s=first.ttft,
        tpot_s=sum(gaps) / len(gaps) if gaps else 0.0,
    )


def adapter_info(info: AdapterInfo) -> pb.AdapterInfo:
    """Field by field."""
    return pb.AdapterInfo(
        name=info.name,
        uid=info.uid,
        digest=info.digest,
        rank=info.rank,
        ranks=dict(info.ranks),
        target_modules=info.target_modules,
        bytes=info.bytes,
        blocks=info.blocks,
        tier=info.tier,
        pinned=info.pinned,
        running=info.running,
        waiting=info.waiting,
        hits=info.hits,
        last_used_s=info.last_used_s,
        load_cost_s=info.load_cost_s,
        alora_invocation_tokens=info.alora_invocation_tokens,
    )


def tier_state(tier: TierState) -> pb.TierState:
    """Field by field."""
    return pb.TierState(
        total=tier.total,
        free=tier.free,
        adapters=tier.adapters,
        history_kv=tier.history_kv,
        running_kv=tier.running_kv,
    )


def cache_state(state: CacheState) -> pb.CacheState:
    """Field by field."""
    return pb.CacheState(
        hbm=tier_state(state.hbm),
        host=tier_state(state.host),
        invalid_kv=state.invalid_kv,
        adapter_hits=state.adapter_hits,
        adapter_lookups=state.adapter_lookups,
        kv_hit_tokens=state.kv_hit_tokens,
        kv_lookup_tokens=state.kv_lookup_tokens,
        bytes_swapped_in=state.bytes_swapped_in,
        bytes_swapped_out=state.bytes_swapped_out,
        clean_evictions=state.clean_evictions,
        policy=state.policy,
        in_flight=state.in_flight,
        kv_host_hit_tokens=state.kv_host_hit_tokens,
        kv_base_hit_tokens=state.kv_base_hit_tokens,
        blocks_lost=state.blocks_lost,
        recomputed_tokens=state.recomputed_tokens,
        streamed=state.streamed,
    )
