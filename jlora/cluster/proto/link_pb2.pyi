# ruff: noqa
# fmt: off
from jlora.serve.proto import jlora_pb2 as _jlora_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToReplica(_message.Message):
    __slots__ = ("hello", "start", "cancel", "stop", "fetch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    start: Start
    cancel: Cancel
    stop: Stop
    fetch: Fetch
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class FromReplica(_message.Message):
    __slots__ = ("hello", "tokens", "failures", "state", "begun")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    hello: HelloBack
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    state: State
    begun: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[HelloBack, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., begun: _Optional[_Iterable[int]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router", "epoch", "protocol", "beat_s", "replica")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    router: str
    epoch: int
    protocol: int
    beat_s: float
    replica: str
    def __init__(self, router: _Optional[str] = ..., epoch: _Optional[int] = ..., protocol: _Optional[int] = ..., beat_s: _Optional[float] = ..., replica: _Optional[str] = ...) -> None: ...

class HelloBack(_message.Message):
    __slots__ = ("replica", "protocol", "info")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    replica: str
    protocol: int
    info: bytes
    def __init__(self, replica: _Optional[str] = ..., protocol: _Optional[int] = ..., info: _Optional[bytes] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("key", "path", "digest", "peers", "lost")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    key: str
    path: str
    digest: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    lost: bool
    def __init__(self, key: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ..., lost: _Optional[bool] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("rid", "request", "adapter", "done", "deadline_s", "waited_s")
    RID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    rid: int
    request: _jlora_pb2.GenerateRequest
    adapter: Version
    done: _containers.RepeatedCompositeFieldContainer[Done]
    deadline_s: float
    waited_s: float
    def __init__(self, rid: _Optional[int] = ..., request: _Optional[_Union[_jlora_pb2.GenerateRequest, _Mapping]] = ..., adapter: _Optional[_Union[Version, _Mapping]] = ..., done: _Optional[_Iterable[_Union[Done, _Mapping]]] = ..., deadline_s: _Optional[float] = ..., waited_s: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("tokens", "ended")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., ended: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("rid", "moved")
    RID_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    rid: int
    moved: bool
    def __init__(self, rid: _Optional[int] = ..., moved: _Optional[bool] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("adapter", "prompt")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    adapter: Version
    prompt: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, adapter: _Optional[_Union[Version, _Mapping]] = ..., prompt: _Optional[_Iterable[int]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("rid", "index", "outputs")
    RID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    rid: int
    index: int
    outputs: int
    def __init__(self, rid: _Optional[int] = ..., index: _Optional[int] = ..., outputs: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("rid", "index", "position", "id", "logprob", "prompt_logprobs", "finish_reason", "usage", "timing", "digest")
    RID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    rid: int
    index: int
    position: int
    id: int
    logprob: _jlora_pb2.TokenLogprob
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_jlora_pb2.TokenLogprob]
    finish_reason: str
    usage: _jlora_pb2.Usage
    timing: _jlora_pb2.Timing
    digest: str
    def __init__(self, rid: _Optional[int] = ..., index: _Optional[int] = ..., position: _Optional[int] = ..., id: _Optional[int] = ..., logprob: _Optional[_Union[_jlora_pb2.TokenLogprob, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_jlora_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[_jlora_pb2.Usage, _Mapping]] = ..., timing: _Optional[_Union[_jlora_pb2.Timing, _Mapping]] = ..., digest: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("rid", "kind", "message", "elsewhere")
    RID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    rid: int
    kind: str
    message: str
    elsewhere: bool
    def __init__(self, rid: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., elsewhere: _Optional[bool] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("number", "steps", "running", "waiting", "free_blocks", "blocks", "draining", "compiling", "adapters", "age_s", "host_blocks", "peer_bps", "path_bps", "programs_left", "read")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEER_BPS_FIELD_NUMBER: _ClassVar[int]
    PATH_BPS_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_LEFT_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    number: int
    steps: int
    running: int
    waiting: int
    free_blocks: int
    blocks: int
    draining: bool
    compiling: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Residency]
    age_s: float
    host_blocks: int
    peer_bps: float
    path_bps: float
    programs_left: int
    read: int
    def __init__(self, number: _Optional[int] = ..., steps: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., draining: _Optional[bool] = ..., compiling: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[Residency, _Mapping]]] = ..., age_s: _Optional[float] = ..., host_blocks: _Optional[int] = ..., peer_bps: _Optional[float] = ..., path_bps: _Optional[float] = ..., programs_left: _Optional[int] = ..., read: _Optional[int] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("key", "tier", "rank")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    key: str
    tier: str
    rank: int
    def __init__(self, key: _Optional[str] = ..., tier: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("key", "digest", "offset", "insists")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    INSISTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    digest: str
    offset: int
    insists: bool
    def __init__(self, key: _Optional[str] = ..., digest: _Optional[str] = ..., offset: _Optional[int] = ..., insists: _Optional[bool] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("head", "data", "size", "checksum")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    data: bytes
    size: int
    checksum: bytes
    def __init__(self, head: _Optional[bytes] = ..., data: _Optional[bytes] = ..., size: _Optional[int] = ..., checksum: _Optional[bytes] = ...) -> None: ...
