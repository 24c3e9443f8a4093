"""One name, several adapters in turn: an answer is that of what the name stands for, down to its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.serve._server import Served, request

PROMPT = [(7 * i) % 300 + 5 for i in range(64)]


def load(served: Served, path: Path) -> pb.AdapterInfo:
    return served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="turn", path=str(path), replace=True), timeout=60)


def answer(served: Served) -> tuple[int, list[int], list[float]]:
    """Cached tokens, tokens and their log-probabilities."""
    got = served.generate(request(PROMPT, model="turn", logprobs=0))
    return got.usage.cached_tokens, list(got.outputs[0].token_ids), [e.logprob for e in got.outputs[0].logprobs]


def test_a_name_that_goes_back_and_forth_answers_as_what_it_stands_for(served: Served, tmp_path: Path):
    first, other = (
        _make.make_adapter(tmp_path / name, served.spec, seed=seed, r=4, targets=("q", "v"))
        for name, seed in (("a", 51), ("b", 52))
    )
    alone, uids = {}, []
    for path in (first, other, first):  # A, B, A'
        info = load(served, path)
        uids.append(info.uid)
        cold, *got = answer(served)
        warm, *again = answer(served)
        assert (cold, warm) == (0, 48)  # nothing of the version before, and then its own
        wanted = alone.setdefault(info.digest, got)
        for tokens, logprobs in (got, again):
            assert tokens == wanted[0] and logprobs == pytest.approx(wanted[1], abs=1e-3)
    (_, one), (_, two) = alone.values()
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) > 1e-2  # A and B do differ
    assert len(set(uids)) == 3
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="turn"))
    served.check_idle()
