"""Long answers are encoded beside the loop, part by part, into the same bytes."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.serve.http import encoding
from jlora.serve.http.encoding import STEP, encode

TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@given(TREES, st.integers(0, 3 * STEP))
def test_the_bytes_are_those_of_msgspec(tree: Any, count: int):
    for value in (tree, [tree] * count, {"a": {"b": [[tree] * count, tree]}}):
        assert b"".join(encode(value)) == msgspec.json.encode(value)


def test_no_step_takes_more_than_a_part(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    whole = msgspec.json.encode

    def noted(value: Any) -> bytes:
        made = whole(value)
        sizes.append(len(made))
        return made

    monkeypatch.setattr(encoding.msgspec.json, "encode", noted)
    entry = {"token": "x", "top_logprobs": [{"token": "y", "logprob": -1.5}] * 20}
    made = encode({"choices": [{"logprobs": {"content": [entry] * 5000}}]})
    assert sum(map(len, made)) > 3_000_000 and max(sizes) < 100_000 and max(map(len, made)) < 200_000


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_answers_that_may_be_long_are_made_beside_the_loop(
    http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
):
    threads: list[str] = []

    def noted(value: Any) -> list[bytes]:
        threads.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr("jlora.serve.http.call.encode", noted)
    body = {"prompt": "Hello"} | ({"return_token_strs": True} if path == "/tokenize" else {"max_tokens": 2})
    assert http.post(path, json=body).status_code == 200
    assert threads and all(name.startswith("asyncio_") for name in threads)  # the default executor's
