# ruff: noqa
# fmt: off
from jlora.serve.proto import jlora_pb2 as _jlora_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Using(_message.Message):
    __slots__ = ("router", "epoch", "keys", "served", "leaves")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    router: str
    epoch: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    served: _containers.RepeatedCompositeFieldContainer[Served]
    leaves: bool
    def __init__(self, router: _Optional[str] = ..., epoch: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ..., served: _Optional[_Iterable[_Union[Served, _Mapping]]] = ..., leaves: _Optional[bool] = ...) -> None: ...

class Served(_message.Message):
    __slots__ = ("name", "requests", "prompt", "output", "ended")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    requests: int
    prompt: int
    output: int
    ended: int
    def __init__(self, name: _Optional[str] = ..., requests: _Optional[int] = ..., prompt: _Optional[int] = ..., output: _Optional[int] = ..., ended: _Optional[int] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("epoch", "whole", "more", "entries", "gone", "placed", "places")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    whole: bool
    more: bool
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    gone: _containers.RepeatedScalarFieldContainer[str]
    placed: bool
    places: _containers.RepeatedCompositeFieldContainer[Places]
    def __init__(self, epoch: _Optional[int] = ..., whole: _Optional[bool] = ..., more: _Optional[bool] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ..., placed: _Optional[bool] = ..., places: _Optional[_Iterable[_Union[Places, _Mapping]]] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("key", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    parts: _containers.ScalarMap[str, float]
    def __init__(self, key: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("info", "path")
    INFO_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    info: _jlora_pb2.AdapterInfo
    path: str
    def __init__(self, info: _Optional[_Union[_jlora_pb2.AdapterInfo, _Mapping]] = ..., path: _Optional[str] = ...) -> None: ...
