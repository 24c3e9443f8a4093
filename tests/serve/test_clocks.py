"""The wall clock jumps under a running answer. That no module measures by it: `tests/security/test_code.py`."""

from __future__ import annotations

import time
import urllib.request

import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests.serve._server import Served, add, request

HOUR, DECADE = 3600.0, 10 * 365.25 * 86400
LENGTH = 1500


def test_a_jump_of_the_wall_clock_ends_no_request(served: Served, monkeypatch: pytest.MonkeyPatch):
    """The jumps come once the stream has begun: gRPC makes a deadline of the wall clock, at the client too."""
    asked, real, whole = request("Hello", LENGTH), time.time, pb.GenerateResponse(outputs=[pb.Output()])
    undisturbed = served.generate(asked).outputs[0]
    stream = served.inference.GenerateStream(asked, timeout=60)
    add(whole, next(stream))
    for i, jump in enumerate((HOUR, -HOUR, DECADE, -DECADE), 1):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        while len(whole.outputs[0].token_ids) < i * LENGTH // 5:
            add(whole, next(stream))
        with urllib.request.urlopen(f"{served.http}/health", timeout=20) as answer:
            assert answer.status == 200
    for delta in stream:
        add(whole, delta)
    assert list(whole.outputs[0].token_ids) == list(undisturbed.token_ids)
    assert whole.outputs[0].finish_reason == undisturbed.finish_reason
    assert 0 < whole.timing.ttft_s < 60
    served.check_idle()
