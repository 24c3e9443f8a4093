"""What is made of calls: who was served in time, what failed, whose adapter it was."""

from __future__ import annotations

import math

import pytest

from jlora.loadgen.player import Call, differing
from jlora.loadgen.report import failures
from jlora.loadgen.sample import Slo, by_adapter, cache, sample, spread
from jlora.serve.proto import jlora_pb2 as pb
from jlora.sim.trace import Turn
from jlora.types import Usage


def call(due: float = 0.0, ttft: float = 0.1, tpot: float = 0.02, tokens: int = 5, **fields) -> Call:
    made = Call(Turn(due, int(due * 10), 0, (3,), tokens, 0), fields.pop("model", "a"), due, due + 0.001)
    made.first = due + ttft
    made.last = made.ended = made.first + (tokens - 1) * tpot
    made.tokens = list(range(tokens))
    made.usage = Usage(10, 5, tokens)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def failed(due: float, status: str, detail: str = "no", model: str = "a") -> Call:
    return Call(Turn(due, 99, 0, (3,), 5, 0), model, due, due, ended=due + 0.2, status=status, detail=detail)


def test_goodput_counts_only_full_answers_in_time():
    calls = [call(0), call(1, ttft=0.6), call(2, tpot=0.2), call(3, tokens=1), failed(4, "UNAVAILABLE")]
    found = sample(calls, Slo(0.5, 0.1), warmup_s=0)
    assert found["attained"] == pytest.approx(2 / 5)
    assert found["seconds"] == pytest.approx(4.2)
    assert found["goodput_per_s"] == pytest.approx(2 / 4.2)
    assert found["requests_per_s"] == pytest.approx(4 / 4.2)
    assert found["tokens_per_s"] == pytest.approx(16 / 4.2)


def test_failures_are_counted_by_status_with_their_words():
    calls = [call(0), failed(1, "UNAVAILABLE"), failed(2, "UNAVAILABLE"), failed(3, "NOT_FOUND", "no adapter")]
    found = sample(calls, Slo(), 0)
    assert found["status"] == {"OK": 1, "UNAVAILABLE": 2, "NOT_FOUND": 1}
    assert found["errors"][0] == {"status": "UNAVAILABLE", "message": "no", "count": 2}
    assert found["ttft"]["mean"] == pytest.approx(0.1)  # a failure has no first token, and is no fast one


def test_the_most_frequent_errors_are_kept_and_all_kinds_are_counted():
    calls = [failed(i, "INTERNAL", f"fault {i}") for i in range(30)] + [failed(30, "INTERNAL", "fault 7")]
    found = sample(calls, Slo(), 0)
    assert len(found["errors"]) == 20 and found["errors"][0] == {"status": "INTERNAL", "message": "fault 7", "count": 2}
    assert found["error_kinds"] == 30 and found["status"] == {"INTERNAL": 31}
    assert list(failures([found]))[-1] == "failed 10 x: 10 more kinds of errors"


def test_a_run_without_an_answer_is_still_a_result():
    found = sample([failed(0, "UNAVAILABLE")], Slo(), 0)
    assert found["attained"] == found["goodput_per_s"] == 0 and found["ttft"]["cdf"] == []
    times = [found["ttft_s"], found["tpot_s"], *(found[name]["mean"] for name in ("ttft", "tpot", "latency"))]
    assert all(math.isnan(value) for value in (*times, *found["server"].values()))  # and not 0, the best there is


def test_the_warm_up_is_not_counted():
    found = sample([call(0, ttft=5.0), call(10), call(11)], Slo(), warmup_s=8)
    assert found["requests"] == 2 and found["ttft_s"] == pytest.approx(0.1)
    assert len(found["answers"]) == 3
    with pytest.raises(RuntimeError, match="warm-up of 20 s"):
        sample([call(0)], Slo(), warmup_s=20)


def test_percentiles_are_of_the_values():
    found = spread([i / 100 for i in range(101)] + [math.nan])
    assert (found["p50"], found["p99"], found["max"]) == pytest.approx((0.5, 0.99, 1.0))
    assert len(found["cdf"]) == 101 and found["cdf"][25] == pytest.approx(0.25)


def test_the_client_says_how_late_it_was():
    late = call(0)
    late.sent = 0.3
    assert sample([late, call(1)], Slo(), 0)["lateness"]["max"] == pytest.approx(0.3)


def test_adapters_are_told_apart():
    rows = by_adapter([call(0, model="b"), call(1, model="b", ttft=0.7), failed(2, "INTERNAL", model="c")], Slo())
    assert [(row["adapter"], row["requests"], row["failed"]) for row in rows] == [("b", 2, 0), ("c", 1, 1)]
    assert rows[0]["attained"] == 0.5 and rows[0]["cached"] == 0.5 and rows[0]["ttft_s"] == pytest.approx(0.4)


def test_the_cache_is_read_between_two_looks():
    before = pb.CacheState(adapter_hits=5, adapter_lookups=10, kv_hit_tokens=100, kv_lookup_tokens=200)
    after = pb.CacheState(
        adapter_hits=11, adapter_lookups=18, kv_hit_tokens=180, kv_lookup_tokens=400, kv_host_hit_tokens=20
    )
    found = cache(before, after)
    assert (found["adapter_hits"], found["kv_device_hits"], found["kv_host_hits"]) == pytest.approx((0.75, 0.3, 0.1))


def test_answers_are_compared_where_both_have_one():
    assert differing({"0.0": 1, "1.0": 2, "2.0": 3}, {"0.0": 1, "1.0": 9}) == 1
    same, other = sample([call(0)], Slo(), 0)["answers"], sample([call(0, tokens=4)], Slo(), 0)["answers"]
    assert differing(same, same) == 0 and differing(same, other) == 1
