"""Every integer of a request at its limits and far beyond: both fronts say the same, by the field's name."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests.serve._server import END, MAX_LEN, VOCAB, Served, request

CODE = grpc.StatusCode
INT32, INT64 = 2**31 - 1, 2**63 - 1
PROMPT = (5, 6, 7)
MOST = 8  # tokens of output; the END token ends each answer at its first one

# Field -> what is served, from least to most. `test_validation` has the values between.
FIELDS = {
    "n": (1, 64),
    "max_tokens": (1, MAX_LEN - len(PROMPT)),
    "min_tokens": (0, MOST),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "top_k": (0, INT32),
    "seed": (-INT64 - 1, INT64),
    "priority": (-INT32, INT32),
    "stop_token_ids": (0, VOCAB - 1),
    "logit_bias": (0, VOCAB - 1),
    "prompt": (0, VOCAB - 1),
    "detokenize": (0, VOCAB - 1),
}
# Where HTTP has a wider field: vLLM's way to say all tokens, numbers that no int32 holds and mean the same, and a
# seed without a sign.
WIDER = {("top_k", -1), ("top_k", INT32 + 1), ("top_k", INT64), ("seed", INT64 + 1)}


def over_grpc(served: Served, field: str, value: int) -> bool:
    """Whether it is served; otherwise it is refused by name, or does not fit the message's field."""
    try:
        if field == "detokenize":
            served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[value]), timeout=60)
        else:
            served.generate(asked(field, value))
    except ValueError:
        return False
    except grpc.RpcError as e:
        assert e.code() in (CODE.INVALID_ARGUMENT, CODE.OUT_OF_RANGE)  # pyright: ignore[reportAttributeAccessIssue]
        assert field.replace("detokenize", "token_ids") in e.details()  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return True


def asked(field: str, value: int) -> pb.GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": MOST, "ignore_eos": False, "logit_bias": {END: 100.0}}
    if field == "prompt":
        return request((value,), **fields)
    if field == "logit_bias":
        return request(PROMPT, **{**fields, field: {END: 100.0, value: 1.0}})
    return request(PROMPT, **{**fields, field: [value] if field == "stop_token_ids" else value})


def over_http(http: httpx.Client, field: str, value: int) -> bool:
    """As `over_grpc`."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": MOST, "logit_bias": {str(END): 100.0}, "temperature": 0}
    match field:
        case "detokenize":
            answer = http.post("/detokenize", json={"tokens": [value]})
        case "prompt" | "stop_token_ids":
            answer = http.post("/v1/completions", json={**body, field: [value]})
        case "logit_bias":
            answer = http.post("/v1/completions", json={**body, field: {str(END): 100, str(value): 1}})
        case _:
            answer = http.post("/v1/completions", json={**body, field: value})
    if answer.status_code == 200:
        return True
    assert answer.status_code == 400, answer.text
    assert field.replace("detokenize", "tokens") in answer.text
    return False


@pytest.mark.parametrize("field", FIELDS)
def test_both_fronts_give_one_verdict(served: Served, field: str):
    least, most = FIELDS[field]
    with httpx.Client(base_url=served.http, timeout=60) as http:
        for value in sorted({-INT64 - 1, -1, 0, 1, most, most + 1, INT32 + 1, INT64}):
            in_range = least <= value <= most
            assert over_grpc(served, field, value) is in_range, (field, value)
            assert over_http(http, field, value) is (in_range or (field, value) in WIDER), (field, value)
    served.check_idle()
