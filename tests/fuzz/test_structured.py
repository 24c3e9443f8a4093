"""What hypothesis makes of the schemas: bodies, messages and configurations of the right form and odd values.

It looks for a small example where the fuzzers' mutations look for many.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jlora.serve.http.schema import ChatBody, CompletionBody, PrefetchBody, TokenizeBody
from jlora.serve.proto import jlora_pb2 as pb
from tests import port
from tests.fuzz._engine import Target
from tests.fuzz._targets import TARGETS

MAPPED = {
    "OK",
    "INVALID_ARGUMENT",
    "OUT_OF_RANGE",
    "NOT_FOUND",
    "DATA_LOSS",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
}
MAPPED |= {"ALREADY_EXISTS", "200", "400", "404", "403", "409"}
EXAMPLES = settings(
    max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 64, 65]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*EDGES, 2**64, 10**400]),
    st.floats(),
    st.text(max_size=20),
    st.just("x" * 2000),
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {name: TARGETS[name]() for name in ("http", "protobuf", "config")}


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[bytes]:
    """Some of its fields with any values, on a body that is whole."""
    sound = {"prompt": "Hello"} if kind is not ChatBody else {"messages": [{"role": "user", "content": "Hello"}]}
    fields = st.dictionaries(st.sampled_from(kind.__struct_fields__), JSON, max_size=3)
    return fields.map(lambda odd: json.dumps({**sound, **odd}).encode())


@pytest.mark.parametrize("route, kind", enumerate((CompletionBody, ChatBody, PrefetchBody, TokenizeBody)))
def test_a_body_with_odd_fields_is_answered_or_refused(targets: dict[str, Target], route: int, kind: Any):
    @EXAMPLES
    @given(bodies(kind))
    def look(body: bytes) -> None:
        assert targets["http"].run(bytes([route]) + body) in MAPPED

    look()


def messages(kind: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Any values of a message's fields, as protobuf's JSON has them."""
    return st.fixed_dictionaries({}, optional={field.json_name: values(field) for field in kind.fields})


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    one: st.SearchStrategy[Any]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return st.dictionaries(
            st.sampled_from(["0", "-1", "399", "400"]), st.floats(allow_nan=False, allow_infinity=False)
        )
    if field.message_type is not None:
        one = messages(field.message_type)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        one = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["sql", "base", "x" * 300])
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        one = st.booleans()
    elif field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        one = st.floats().map(lambda x: {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(x), x))
    else:
        wide = field.cpp_type == FieldDescriptor.CPPTYPE_INT64
        one = st.sampled_from([e for e in EDGES if wide or -(2**31) <= e < 2**31])
    return st.lists(one, max_size=4) if field.is_repeated else one


@EXAMPLES
@given(messages(pb.GenerateRequest.DESCRIPTOR))
def test_a_request_with_any_values_is_answered_or_refused(targets: dict[str, Target], fields: dict[str, Any]):
    for oneof in ("tokenIds", "chat") if "text" in fields else ("chat",) if "tokenIds" in fields else ():
        fields.pop(oneof, None)
    message = json_format.ParseDict(fields, pb.GenerateRequest())
    methods = sorted(m.full_name for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods)
    at = next(i for i, name in enumerate(methods) if name.endswith("Inference.Generate"))
    assert targets["protobuf"].run(bytes([at]) + message.SerializeToString()) in MAPPED


OPTIONS = port.peft_options()
SOUND = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}


@EXAMPLES
@given(st.dictionaries(st.sampled_from(OPTIONS), JSON, max_size=3))
def test_a_configuration_with_odd_options_is_read_or_refused(targets: dict[str, Target], odd: dict[str, Any]):
    assert targets["config"].run(json.dumps({**SOUND, **odd}).encode()) in MAPPED
