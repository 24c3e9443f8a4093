"""Frozen records that every part of jlora shares. This module never imports jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
ColdStart = Literal["", "wait", "stream", "cpu"]  # see `Timing.cold_start`
Salt = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Limits are checked by `jlora.validation`.

    Attributes:
        temperature: 0 is greedy; 1 (the default) samples from the model's own distribution.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        seed: makes the tokens reproducible whatever else is in the batch; None draws one.
        repetition_penalty: divides (multiplies, if negative) logits of tokens seen in the
            prompt or the output; 1 is off.
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output,
            once, and once per occurrence.
        logit_bias: token id -> value added to its logit, before the penalties.
        n: how many completions to draw for the prompt.
        max_tokens: at most this many output tokens; None means up to the context.
        min_tokens: no stop of any kind before this many output tokens.
        stop: strings that end the text; cut from it unless include_stop.
        stop_token_ids: token ids that end the output, beside the model's own end tokens.
        ignore_eos: do not stop at the model's own end tokens.
        logprobs: report the chosen token's logprob and this many of the most likely (0..20).
        prompt_logprobs: the same for the prompt's tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Invocation:
    """Where a prompt last holds an activated LoRA's `alora_invocation_tokens`; `at` is None if nowhere."""

    tokens: tuple[int, ...]
    at: int | None


@dataclass(frozen=True, slots=True)
class Done:
    """What earlier attempts at a request have delivered of one completion: its tokens, and whether it has ended."""

    tokens: tuple[int, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request, as the engine takes it.

    Attributes:
        id: the client's name for it, unique among the live requests of its tenant.
        adapter: None is the base model.
        priority: higher runs first; equal priorities run nearly in order of arrival (`jlora.engine.admission`).
        bypass_prefix_cache: the request neither reads KV from the prefix cache nor leaves KV there.
        tenant: two tenants never share KV, even for equal prompts.
        cache_salt: neither do two salts of one tenant.
        deadline: `time.monotonic()` seconds at which the engine aborts the request; None means never.
        invocation: where the prompt invokes the adapter; None before the search.
        session: ties requests together that share a long prefix, such as the turns of a chat; "": nothing does.
            A router keeps the requests of a session at one replica.
        waited: seconds since it came to a router; it is served as if it had come here so much earlier.
        done: what another replica has delivered of each completion; the engine goes on behind it. Empty: nothing.
        chat: the answer is a message of its own; otherwise its text goes on where the prompt's ends.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    adapter: str | None = None
    priority: int = 0
    bypass_prefix_cache: bool = False
    tenant: str = ""
    deadline: float | None = None
    invocation: Invocation | None = None
    cache_salt: str = ""
    done: tuple[Done, ...] = ()
    session: str = ""
    waited: float = 0.0
    chat: bool = False

    @property
    def open(self) -> tuple[int, ...]:
        """The completions that have not ended elsewhere."""
        return tuple(i for i in range(self.sampling.n) if not (self.done and self.done[i].ended))

    @property
    def salt(self) -> Salt:
        """What the prefix cache keeps apart: the tenant, and its salt if there is one."""
        return (self.tenant, self.cache_salt) if self.cache_salt else self.tenant


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural-log probability and the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt came from the prefix cache, `host_tokens` of these from the host."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds.

    Attributes:
        queue: from submit until the request first holds its blocks, without the wait for the disk.
        adapter_cold_start: from submit until its adapter is in host memory, if it was on the disk only, and from
            the end of `queue` until it is on the device; 0 if it was there. A request for an
            activated LoRA computes the tokens before its invocation meanwhile, so only the remaining wait counts.
        kv_cold_start: from the end of `queue` until its cached KV is on the device; overlaps adapter_cold_start.
        prefill: from the end of the later cold start to the first token.
        ttft: from submit to the first token.
        tpot: mean gap between later tokens; 0 if there are none.
        cold_start: how the request met the copy of its adapter (`engine.cold_start`); "" if it met none. Metrics
            count cold starts by it. "wait": the copy landed before the first step that needed it. "stream": that
            step ran behind the copy, layer by layer. "cpu": the host computed the adapter's part meanwhile.
    """

    queue: float = 0.0
    adapter_cold_start: float = 0.0
    kv_cold_start: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0
    cold_start: ColdStart = ""

    def fields(self) -> dict[str, Any]:
        """The values by the names that clients see: seconds end in _s."""
        values = dataclasses.asdict(self)
        return {"cold_start": values.pop("cold_start"), **{f"{name}_s": value for name, value in values.items()}}


@dataclass(slots=True)  # one for each token: a frozen one takes three times as long to make
class TokenEvent:
    """One output token of a submitted request, or the end of one completion; fields as in `Delta`.

    `token_id` is None on a final event without a token (an abort). `error` says why a request has failed. `handle` is
    the engine's own name for the request: see `jlora.replica.Replica.submit`.
    """

    request_id: str
    index: int
    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    handle: int = -1
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one completion. Every front converts this record to its own format.

    Attributes:
        index: which of the request's n completions.
        text: new text; empty if the model has no tokenizer, or while a character or a stop string is unfinished.
        token_ids: new output tokens, the end token included. Tokens after a stop string are left out.
        logprobs: one per token id, if asked for.
        prompt_logprobs: one per prompt token, the first None; on the first delta of completion 0, if asked for.
        finish_reason: set on the completion's last delta, with usage and timing.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """The public state of an adapter. `bytes` is the size of its packed form on the device.

    Attributes:
        merged: it is merged into the base's weights, wholly or in part.
        merge_error: the error of the merged path against float32, over the unmerged path's; 0 before it is measured.
        merge_refusal: why it is never merged; "" if it may be, or if that is not known yet.
    """

    name: str
    uid: int
    digest: str
    rank: int
    ranks: Mapping[str, int]
    target_modules: tuple[str, ...]
    bytes: int
    blocks: int
    tier: Literal["HBM", "HOST", "DISK", "LOADING"]
    pinned: bool
    running: int
    waiting: int
    hits: int
    last_used_s: float
    load_cost_s: float
    alora_invocation_tokens: tuple[int, ...] = ()
    merged: bool = False
    merge_error: float = 0.0
    merge_refusal: str = ""


@dataclass(frozen=True, slots=True)
class TierState:
    """Blocks of one tier by class; the classes sum to `total`. On the host all KV counts as history."""

    total: int
    free: int
    adapters: int
    history_kv: int
    running_kv: int


@dataclass(frozen=True, slots=True)
class CacheState:
    """A snapshot of both tiers and the counters since start.

    Attributes:
        in_flight: blocks being copied between the tiers; they also count in their class.
        invalid_kv: device blocks of KV whose prefix or adapter has left the device; always 0 for policies
            that keep dependencies.
        kv_hit_tokens: prompt tokens found in either tier.
        kv_host_hit_tokens: the part of kv_hit_tokens found on the host only.
        kv_base_hit_tokens: the part of kv_hit_tokens that requests for activated LoRAs found in the base's KV.
        blocks_lost: blocks evicted or dropped without a copy elsewhere; recomputed if needed.
        cold_waited, cold_streamed, cold_helped: requests that have ended or lost their place, and whose adapter
            was not on the device, by how they met its copy: see `Timing.cold_start`. "cpu" counts as helped.
        cold_predicted: of these, under `engine.cold_start=auto`, those whose first token came and had been predicted:
            the prompt was left to one step, and the adapter acted on all of it.
        cold_predicted_s, cold_measured_s: sums over cold_predicted, of the seconds to the first token as predicted
            for the way in which they started, and as they were, both from the grant of their blocks.
        cold_error_s: the sum of the differences between the two, without their signs.
        adapters_dropped: adapters that left memory and are read from the disk again when a request needs them.
        adapter_reads: reads of registered adapters into memory, from the disk or from another replica. The first
            load of an adapter by `LoadAdapter` is none.
        adapter_reads_failed: reads that ended the requests for their adapter with an error.
        adapter_read_s: seconds of adapter_reads, from the first file to the packed weights.
        streamed: requests whose first step started before their copies landed.
        recomputed_tokens: tokens found on the host but recomputed, because copying would take far longer.
        adapters_registered: adapters in service. Each is in one of the four tiers that follow; see `AdapterInfo.tier`.
        adapters_hbm, adapters_host, adapters_disk, adapters_loading: of these, by where their weights are.
        adapters_reading: the part of adapters_loading that comes from the disk: being read, or waiting for a reader
            or for host memory. The others are on their way from the host to the device.
    """

    policy: str
    hbm: TierState
    host: TierState
    in_flight: int
    invalid_kv: int
    adapter_hits: int
    adapter_lookups: int
    kv_hit_tokens: int
    kv_host_hit_tokens: int
    kv_base_hit_tokens: int
    kv_lookup_tokens: int
    bytes_swapped_in: int
    bytes_swapped_out: int
    clean_evictions: int
    blocks_lost: int
    streamed: int
    recomputed_tokens: int
    adapters_dropped: int
    cold_waited: int
    cold_streamed: int
    cold_helped: int
    adapter_reads: int
    adapter_reads_failed: int
    adapter_read_s: float
    adapters_registered: int = 0
    adapters_hbm: int = 0
    adapters_host: int = 0
    adapters_disk: int = 0
    adapters_loading: int = 0
    adapters_reading: int = 0
    cold_predicted: int = 0
    cold_predicted_s: float = 0.0
    cold_measured_s: float = 0.0
    cold_error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MergeState:
    """What is merged into the base's weights, and what decides it.

    Attributes:
        adapter: its name; "" if nothing is merged.
        uid: its version; -1 if nothing is merged.
        share: of the weights that are merged; between 0 and 1 during a switch.
        switches: merges begun since start.
        reloads: times that the weights were loaded anew, because taking an adapter out had left others.
        host_bytes: what taking the adapter out needs of the host.
        adapters_cost: the share of a step that an adapter of rank 16 (or `adapters.max_rank`, if smaller) on q, k, v
            and o costs, as measured here: the most that merging it can gain; 0 before it is measured, and in a pool
            without room for one.
        alpha, beta: of `engine.merge=auto`, as tuned by now. An adapter may be merged when its requests exceed alpha
            times the batch in order of arrival, and is taken out below beta times that batch; 0 for other settings.
    """

    adapter: str = ""
    uid: int = -1
    share: float = 0.0
    switches: int = 0
    reloads: int = 0
    host_bytes: int = 0
    adapters_cost: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start. Times are seconds.

    Attributes:
        generated_tokens: output tokens that requests received, without those computed after a completion's end.
        compiles_after_warmup: programs that a step had to compile.
        programs_left: shapes of steps that are still being compiled beside them; larger ones stand in.
        host_step_s: mean Python time of a step; waits for the device and for copies do not count.
        plan_s, dispatch_s, read_s, commit_s: where the time of all steps went. `read_s` is the wait for the device.
    """

    running: int
    waiting: int
    live_requests: int
    steps: int
    generated_tokens: int
    prompt_tokens: int
    preemptions: int
    compiles_after_warmup: int
    programs_left: int
    host_step_s: float
    plan_s: float = 0.0
    dispatch_s: float = 0.0
    read_s: float = 0.0
    commit_s: float = 0.0
    merge: MergeState = MergeState()


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A trace of some steps: its name below `serve.profile_dir`, and the steps that it has."""

    name: str
    steps: int


@dataclass(frozen=True, slots=True)
class Owners:
    """A picture of the device's blocks.

    Attributes:
        cells: what most of a cell's blocks hold: 0 free or not looked at, 2 * uid + 1 an adapter's weights,
            2 * uid + 2 KV below the adapter (the base has uid 0).
        per_cell: blocks of a cell.
        kv: device blocks of KV by the uid of their adapter.
        whole: whether the look reached every node; the tree may be too large.
    """

    cells: tuple[int, ...]
    per_cell: int
    kv: Mapping[int, int]
    whole: bool


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """What a prefetch hint found: residency, cached prompt tokens, bytes now on their way."""

    resident_adapter: bool
    cached_tokens: int
    coming_bytes: int
