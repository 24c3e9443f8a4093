# ruff: noqa
# fmt: off
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "n")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "stopping", "logprobs", "prompt_logprobs", "priority", "bypass_prefix_cache", "tenant", "cache_salt", "session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: Sampling
    stopping: Stopping
    logprobs: int
    prompt_logprobs: int
    priority: int
    bypass_prefix_cache: bool
    tenant: str
    cache_salt: str
    session: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., bypass_prefix_cache: _Optional[bool] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "finish_reason")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: str
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "host_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    host_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_s", "adapter_cold_start_s", "kv_cold_start_s", "prefill_s", "ttft_s", "tpot_s", "cold_start")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_COLD_START_S_FIELD_NUMBER: _ClassVar[int]
    KV_COLD_START_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    COLD_START_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    adapter_cold_start_s: float
    kv_cold_start_s: float
    prefill_s: float
    ttft_s: float
    tpot_s: float
    cold_start: str
    def __init__(self, queue_s: _Optional[float] = ..., adapter_cold_start_s: _Optional[float] = ..., kv_cold_start_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., cold_start: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "outputs", "prompt_logprobs", "usage", "timing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    usage: Usage
    timing: Timing
    def __init__(self, request_id: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("adapter_resident", "cached_tokens", "coming_bytes")
    ADAPTER_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMING_BYTES_FIELD_NUMBER: _ClassVar[int]
    adapter_resident: bool
    cached_tokens: int
    coming_bytes: int
    def __init__(self, adapter_resident: _Optional[bool] = ..., cached_tokens: _Optional[int] = ..., coming_bytes: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "keep_special")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keep_special: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., keep_special: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "uid", "digest", "rank", "ranks", "target_modules", "bytes", "blocks", "tier", "pinned", "running", "waiting", "hits", "last_used_s", "load_cost_s", "alora_invocation_tokens", "merged", "merge_error", "merge_refusal")
    class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TIER_UNSPECIFIED: _ClassVar[AdapterInfo.Tier]
        HBM: _ClassVar[AdapterInfo.Tier]
        HOST: _ClassVar[AdapterInfo.Tier]
        LOADING: _ClassVar[AdapterInfo.Tier]
        DISK: _ClassVar[AdapterInfo.Tier]
    TIER_UNSPECIFIED: AdapterInfo.Tier
    HBM: AdapterInfo.Tier
    HOST: AdapterInfo.Tier
    LOADING: AdapterInfo.Tier
    DISK: AdapterInfo.Tier
    class RanksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_COST_S_FIELD_NUMBER: _ClassVar[int]
    ALORA_INVOCATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    MERGE_ERROR_FIELD_NUMBER: _ClassVar[int]
    MERGE_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: int
    digest: str
    rank: int
    ranks: _containers.ScalarMap[str, int]
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    bytes: int
    blocks: int
    tier: AdapterInfo.Tier
    pinned: bool
    running: int
    waiting: int
    hits: int
    last_used_s: float
    load_cost_s: float
    alora_invocation_tokens: _containers.RepeatedScalarFieldContainer[int]
    merged: bool
    merge_error: float
    merge_refusal: str
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[int] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[_Mapping[str, int]] = ..., target_modules: _Optional[_Iterable[str]] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., tier: _Optional[_Union[AdapterInfo.Tier, str]] = ..., pinned: _Optional[bool] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., hits: _Optional[int] = ..., last_used_s: _Optional[float] = ..., load_cost_s: _Optional[float] = ..., alora_invocation_tokens: _Optional[_Iterable[int]] = ..., merged: _Optional[bool] = ..., merge_error: _Optional[float] = ..., merge_refusal: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "pinned", "replace", "lazy")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    LAZY_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    pinned: bool
    replace: bool
    lazy: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., pinned: _Optional[bool] = ..., replace: _Optional[bool] = ..., lazy: _Optional[bool] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "view")
    class View(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VIEW_UNSPECIFIED: _ClassVar[ListAdaptersRequest.View]
        FULL: _ClassVar[ListAdaptersRequest.View]
        SUMMARY: _ClassVar[ListAdaptersRequest.View]
    VIEW_UNSPECIFIED: ListAdaptersRequest.View
    FULL: ListAdaptersRequest.View
    SUMMARY: ListAdaptersRequest.View
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    view: ListAdaptersRequest.View
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., view: _Optional[_Union[ListAdaptersRequest.View, str]] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "next_page_token")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    next_page_token: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("name", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "model", "platform", "devices", "tp", "dtype", "max_model_len", "vocab", "block_tokens", "blocks", "config", "uptime_s", "compiles_after_warmup", "host_s_per_step", "steps", "running", "waiting", "draining", "text", "chat", "recent_requests", "recent_ttft_mean_s", "recent_ttft_p99_s", "longest_loop_gap_s", "longest_engine_gap_s", "programs_left", "merge", "replicas", "live_requests", "generated_tokens", "prompt_tokens", "preemptions", "plan_s", "dispatch_s", "read_s", "commit_s", "recent_ttft_p50_s", "recent_ttft_p90_s", "recent_tpot_requests", "recent_tpot_mean_s", "recent_tpot_p50_s", "recent_tpot_p90_s", "recent_tpot_p99_s", "start_s", "process")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class StartSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    COMPILES_AFTER_WARMUP_FIELD_NUMBER: _ClassVar[int]
    HOST_S_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    RECENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECENT_TTFT_MEAN_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_TTFT_P99_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_LOOP_GAP_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_ENGINE_GAP_S_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_LEFT_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_S_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_TTFT_P50_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_TTFT_P90_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_TPOT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECENT_TPOT_MEAN_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_TPOT_P50_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_TPOT_P90_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_TPOT_P99_S_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    platform: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    tp: int
    dtype: str
    max_model_len: int
    vocab: int
    block_tokens: int
    blocks: int
    config: _containers.ScalarMap[str, str]
    uptime_s: float
    compiles_after_warmup: int
    host_s_per_step: float
    steps: int
    running: int
    waiting: int
    draining: bool
    text: bool
    chat: bool
    recent_requests: int
    recent_ttft_mean_s: float
    recent_ttft_p99_s: float
    longest_loop_gap_s: float
    longest_engine_gap_s: float
    programs_left: int
    merge: MergeState
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    live_requests: int
    generated_tokens: int
    prompt_tokens: int
    preemptions: int
    plan_s: float
    dispatch_s: float
    read_s: float
    commit_s: float
    recent_ttft_p50_s: float
    recent_ttft_p90_s: float
    recent_tpot_requests: int
    recent_tpot_mean_s: float
    recent_tpot_p50_s: float
    recent_tpot_p90_s: float
    recent_tpot_p99_s: float
    start_s: _containers.ScalarMap[str, float]
    process: str
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., platform: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., tp: _Optional[int] = ..., dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab: _Optional[int] = ..., block_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., config: _Optional[_Mapping[str, str]] = ..., uptime_s: _Optional[float] = ..., compiles_after_warmup: _Optional[int] = ..., host_s_per_step: _Optional[float] = ..., steps: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., draining: _Optional[bool] = ..., text: _Optional[bool] = ..., chat: _Optional[bool] = ..., recent_requests: _Optional[int] = ..., recent_ttft_mean_s: _Optional[float] = ..., recent_ttft_p99_s: _Optional[float] = ..., longest_loop_gap_s: _Optional[float] = ..., longest_engine_gap_s: _Optional[float] = ..., programs_left: _Optional[int] = ..., merge: _Optional[_Union[MergeState, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., live_requests: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., plan_s: _Optional[float] = ..., dispatch_s: _Optional[float] = ..., read_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., recent_ttft_p50_s: _Optional[float] = ..., recent_ttft_p90_s: _Optional[float] = ..., recent_tpot_requests: _Optional[int] = ..., recent_tpot_mean_s: _Optional[float] = ..., recent_tpot_p50_s: _Optional[float] = ..., recent_tpot_p90_s: _Optional[float] = ..., recent_tpot_p99_s: _Optional[float] = ..., start_s: _Optional[_Mapping[str, float]] = ..., process: _Optional[str] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "address", "health", "sent", "running", "waiting", "free_blocks", "blocks", "adapters", "step_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    health: str
    sent: int
    running: int
    waiting: int
    free_blocks: int
    blocks: int
    adapters: int
    step_s: float
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., health: _Optional[str] = ..., sent: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., adapters: _Optional[int] = ..., step_s: _Optional[float] = ...) -> None: ...

class MergeState(_message.Message):
    __slots__ = ("adapter", "uid", "share", "switches", "reloads", "host_bytes", "adapters_cost", "alpha", "beta")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_COST_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    uid: int
    share: float
    switches: int
    reloads: int
    host_bytes: int
    adapters_cost: float
    alpha: float
    beta: float
    def __init__(self, adapter: _Optional[str] = ..., uid: _Optional[int] = ..., share: _Optional[float] = ..., switches: _Optional[int] = ..., reloads: _Optional[int] = ..., host_bytes: _Optional[int] = ..., adapters_cost: _Optional[float] = ..., alpha: _Optional[float] = ..., beta: _Optional[float] = ...) -> None: ...

class GetCacheStateRequest(_message.Message):
    __slots__ = ("with_kv",)
    WITH_KV_FIELD_NUMBER: _ClassVar[int]
    with_kv: bool
    def __init__(self, with_kv: _Optional[bool] = ...) -> None: ...

class TierState(_message.Message):
    __slots__ = ("total", "free", "adapters", "history_kv", "running_kv")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_KV_FIELD_NUMBER: _ClassVar[int]
    RUNNING_KV_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    adapters: int
    history_kv: int
    running_kv: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., adapters: _Optional[int] = ..., history_kv: _Optional[int] = ..., running_kv: _Optional[int] = ...) -> None: ...

class CacheState(_message.Message):
    __slots__ = ("hbm", "host", "invalid_kv", "adapter_hits", "adapter_lookups", "kv_hit_tokens", "kv_lookup_tokens", "bytes_swapped_in", "bytes_swapped_out", "clean_evictions", "policy", "in_flight", "kv_host_hit_tokens", "blocks_lost", "recomputed_tokens", "streamed", "kv_base_hit_tokens", "merge", "adapters_dropped", "kv", "kv_whole", "cold_waited", "cold_streamed", "cold_helped", "adapter_reads", "adapter_reads_failed", "adapter_read_s", "adapters_registered", "adapters_hbm", "adapters_host", "adapters_disk", "adapters_loading", "adapters_reading", "cold_predicted", "cold_predicted_s", "cold_measured_s", "cold_error_s")
    class KvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    HBM_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INVALID_KV_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HITS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    KV_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    CLEAN_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    KV_HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOST_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    KV_BASE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    KV_WHOLE_FIELD_NUMBER: _ClassVar[int]
    COLD_WAITED_FIELD_NUMBER: _ClassVar[int]
    COLD_STREAMED_FIELD_NUMBER: _ClassVar[int]
    COLD_HELPED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_READS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_READS_FAILED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_READ_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_HBM_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_HOST_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_DISK_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_LOADING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_READING_FIELD_NUMBER: _ClassVar[int]
    COLD_PREDICTED_FIELD_NUMBER: _ClassVar[int]
    COLD_PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    COLD_MEASURED_S_FIELD_NUMBER: _ClassVar[int]
    COLD_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    hbm: TierState
    host: TierState
    invalid_kv: int
    adapter_hits: int
    adapter_lookups: int
    kv_hit_tokens: int
    kv_lookup_tokens: int
    bytes_swapped_in: int
    bytes_swapped_out: int
    clean_evictions: int
    policy: str
    in_flight: int
    kv_host_hit_tokens: int
    blocks_lost: int
    recomputed_tokens: int
    streamed: int
    kv_base_hit_tokens: int
    merge: MergeState
    adapters_dropped: int
    kv: _containers.ScalarMap[int, int]
    kv_whole: bool
    cold_waited: int
    cold_streamed: int
    cold_helped: int
    adapter_reads: int
    adapter_reads_failed: int
    adapter_read_s: float
    adapters_registered: int
    adapters_hbm: int
    adapters_host: int
    adapters_disk: int
    adapters_loading: int
    adapters_reading: int
    cold_predicted: int
    cold_predicted_s: float
    cold_measured_s: float
    cold_error_s: float
    def __init__(self, hbm: _Optional[_Union[TierState, _Mapping]] = ..., host: _Optional[_Union[TierState, _Mapping]] = ..., invalid_kv: _Optional[int] = ..., adapter_hits: _Optional[int] = ..., adapter_lookups: _Optional[int] = ..., kv_hit_tokens: _Optional[int] = ..., kv_lookup_tokens: _Optional[int] = ..., bytes_swapped_in: _Optional[int] = ..., bytes_swapped_out: _Optional[int] = ..., clean_evictions: _Optional[int] = ..., policy: _Optional[str] = ..., in_flight: _Optional[int] = ..., kv_host_hit_tokens: _Optional[int] = ..., blocks_lost: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., streamed: _Optional[int] = ..., kv_base_hit_tokens: _Optional[int] = ..., merge: _Optional[_Union[MergeState, _Mapping]] = ..., adapters_dropped: _Optional[int] = ..., kv: _Optional[_Mapping[int, int]] = ..., kv_whole: _Optional[bool] = ..., cold_waited: _Optional[int] = ..., cold_streamed: _Optional[int] = ..., cold_helped: _Optional[int] = ..., adapter_reads: _Optional[int] = ..., adapter_reads_failed: _Optional[int] = ..., adapter_read_s: _Optional[float] = ..., adapters_registered: _Optional[int] = ..., adapters_hbm: _Optional[int] = ..., adapters_host: _Optional[int] = ..., adapters_disk: _Optional[int] = ..., adapters_loading: _Optional[int] = ..., adapters_reading: _Optional[int] = ..., cold_predicted: _Optional[int] = ..., cold_predicted_s: _Optional[float] = ..., cold_measured_s: _Optional[float] = ..., cold_error_s: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: _Optional[bool] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("steps", "replica")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    steps: int
    replica: str
    def __init__(self, steps: _Optional[int] = ..., replica: _Optional[str] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("name", "steps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    steps: int
    def __init__(self, name: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...
