"""The scheduler alone, in plain Python: a fake device draws token 7 unless told otherwise."""

from __future__ import annotations

import pytest

from jlora.cache.inspect import state
from jlora.cache.manager import CacheManager
from jlora.engine.deadlines import SPARE
from jlora.errors import ResourceExhausted
from jlora.types import Request, SamplingParams
from tests.cache._books import evict_all
from tests.cache._cache import measure
from tests.engine._bench import EOS, Bench, counted, work


def test_a_long_prompt_is_cut_into_chunks_while_others_decode():
    bench = Bench(max_step_tokens=8)
    bench.submit("short", 3, max_tokens=9)
    bench.step()
    bench.submit("long", 20)
    bench.finish()
    chunks = [work(p)["long"] for p in bench.plans if "long" in work(p)]
    assert chunks[:3] == [(0, 8), (8, 8), (16, 4)]
    assert all("short" in work(p) for p in bench.plans[1:4])
    assert bench.tokens("long") == [7] * 4 and bench.tokens("short") == [7] * 9


def test_a_step_is_planned_before_the_last_one_is_read():
    bench = Bench()
    bench.submit("a", 3, max_tokens=3)
    bench.step()
    bench.step()
    assert work(bench.plans[1]) == {"a": (3, 1)} and len(bench.tokens("a")) == 1


def test_no_step_is_spent_past_max_tokens():
    bench = Bench()
    bench.submit("a", 3, max_tokens=2)
    bench.finish()
    assert sum(w.samples for p in bench.plans for w in p.work) == 2
    assert bench.reason("a") == "length"


def test_an_end_token_stops_and_what_was_in_flight_is_dropped():
    bench = Bench(draw=lambda s, position: EOS if position == 5 else 7)
    bench.submit("a", 3, max_tokens=50)
    bench.finish()
    assert bench.tokens("a") == [7, 7, EOS] and bench.reason("a") == "stop"
    assert bench.events[-1].usage is not None and bench.events[-1].usage.completion_tokens == 3


def test_ignore_eos_goes_on_and_stop_token_ids_stop():
    bench = Bench(draw=lambda s, position: {4: EOS, 6: 9}.get(position, 7))
    bench.submit("a", 3, max_tokens=50, ignore_eos=True, stop_token_ids=(9,))
    bench.finish()
    assert bench.tokens("a") == [7, EOS, 7, 9] and bench.reason("a") == "stop"


def test_out_of_blocks_preempts_the_last_in_order_and_loses_no_token():
    bench = Bench(blocks=8, draw=lambda s, position: 100 + position)
    bench.submit("a", 8, max_tokens=12)
    bench.submit("b", [50 + i for i in range(8)], max_tokens=12)
    bench.finish()
    assert bench.scheduler.preemptions > 0
    assert bench.tokens("a") == bench.tokens("b") == [100 + 8 + i for i in range(12)]
    first = next(e for e in bench.events if e.usage)
    assert first.request_id == "a"


def test_a_preempted_sequence_recomputes_only_what_the_tree_lost():
    bench = Bench(blocks=9)
    bench.submit("a", 8, max_tokens=16)
    bench.submit("b", [50 + i for i in range(8)], max_tokens=16)
    bench.finish()
    assert bench.scheduler.preemptions > 0 and bench.tokens("b") == [7] * 16


def test_higher_priority_goes_first_then_arrival():
    bench = Bench(max_seqs=1)
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        bench.submit(name, 3, max_tokens=1, priority=priority)
    bench.finish()
    assert [e.request_id for e in bench.events if e.usage] == ["high", "first", "second", "low"]


def test_n_completions_share_the_prompts_kv_and_draw_apart():
    bench = Bench(draw=lambda s, position: 20 + s.index)
    bench.submit("a", 13, max_tokens=2, n=3, seed=5)
    bench.finish()
    assert [bench.tokens("a", i) for i in range(3)] == [[20, 20], [21, 21], [22, 22]]
    computed = [(w.sequence.index, w.start, w.count) for p in bench.plans for w in p.work if w.start < 13]
    assert computed == [(0, 0, 13), (1, 12, 1), (2, 12, 1)]


def test_abort_frees_blocks_at_once_and_ends_every_completion():
    bench = Bench()
    bench.submit("a", 9, max_tokens=50, n=2)
    for _ in range(4):
        bench.step()
    events = bench.abort("a")
    assert sorted((e.index, e.finish_reason) for e in events) == [(0, "abort"), (1, "abort")]
    assert state(bench.manager, 1).hbm.running_kv == 0
    assert bench.abort("a") == []
    bench.finish()


def test_abort_of_a_waiting_request_leaves_the_queue_in_order():
    bench = Bench(max_seqs=1)
    for name in "abc":
        bench.submit(name, 3, max_tokens=1)
    bench.step()
    bench.abort("b")
    assert bench.scheduler.waiting == 1
    bench.finish()
    assert [e.request_id for e in bench.events if e.token_id is not None] == ["a", "c"]


def test_a_deadline_aborts_wherever_the_request_is():
    bench = Bench(max_seqs=1)
    bench.submit("runs", 3, max_tokens=50, deadline=4.5)
    bench.submit("waits", 3, deadline=2.5)
    for _ in range(6):
        bench.events += bench.scheduler.expire(bench.now + 1)
        bench.step()
    assert bench.reason("runs") == "abort" and bench.reason("waits") == "abort"
    assert not bench.scheduler.live


def test_a_deadline_never_reaches_a_later_request_of_the_same_id():
    bench = Bench()
    bench.submit("d", 3, max_tokens=1, deadline=9.5)
    bench.finish()
    bench.submit("d", 3, max_tokens=40)
    while bench.now < 12:
        bench.events += bench.scheduler.expire(bench.now + 1)
        bench.step()
    assert bench.scheduler.live == 1


def test_deadlines_of_ended_requests_are_forgotten():
    bench = Bench()
    bench.submit("lives", 3, max_tokens=40, deadline=1e9)
    most = 0
    for index in range(10_000):
        bench.submit(f"d{index}", 3, deadline=1e6 + index)
        bench.abort(f"d{index}")
        bench.scheduler.expire(bench.now)
        most = max(most, bench.deadlines)
    assert most <= SPARE + 3
    for index in range(1000):  # many at once
        bench.submit(f"e{index}", 3, deadline=1e6 + index)
    for index in range(1000):
        bench.abort(f"e{index}")
    bench.scheduler.expire(bench.now)
    assert bench.deadlines == 1
    assert [event.request_id for event in bench.scheduler.expire(1e9)] == ["lives"]


def test_a_late_abort_or_stop_spares_a_later_request_of_the_same_id():
    bench = Bench()
    first = bench.scheduler.submit(Request("x", (3, 4), SamplingParams(max_tokens=1)), bench.manager.base, 0.0)
    bench.finish()
    second = bench.scheduler.submit(Request("x", (3, 4), SamplingParams(max_tokens=9)), bench.manager.base, 0.0)
    assert first != second
    assert bench.scheduler.abort(first, 1.0) == [] and bench.scheduler.stop(first, 0, 1, 1.0) == []
    assert len(bench.scheduler.abort(second, 1.0)) == 1


def test_a_pin_that_would_strand_a_live_request_is_refused():
    bench = Bench(blocks=10)
    adapter = bench.adapter(1, 4)
    bench.submit("long", 20, max_tokens=10)
    assert not bench.scheduler.can_pin(adapter)
    bench.finish()
    assert bench.scheduler.can_pin(adapter)


def test_a_front_that_found_a_stop_string_gets_its_own_token_count():
    bench = Bench()
    bench.submit("a", 3, max_tokens=50)
    for _ in range(5):
        bench.step()
    (event,) = bench.scheduler.stop(bench.handles["a"], 0, 2, bench.now)
    assert event.finish_reason == "stop" and event.usage is not None and event.usage.completion_tokens == 2


def test_a_full_queue_is_refused_and_disturbs_nothing():
    bench = Bench(blocks=8, max_queue=2, max_seqs=1)
    bench.submit("a", 3)
    bench.submit("b", 3)
    bench.submit("c", 3)  # all before a step: one of them will run, two wait
    with pytest.raises(ResourceExhausted, match="queue is full: 3 completions run or wait, limit 3"):
        bench.submit("d", 3)
    bench.step()
    with pytest.raises(ResourceExhausted, match="queue is full"):
        bench.submit("d", 3)
    bench.finish()
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("c") == [7] * 4


def test_a_request_bound_to_a_replaced_adapter_keeps_its_version():
    bench = Bench(max_seqs=1)
    old = bench.adapter(1, 2)
    bench.submit("runs", 3, max_tokens=6, adapter=old)
    bench.submit("waits", 3, max_tokens=6, adapter=old)
    bench.step()
    bench.manager.kill(old)
    bench.finish()
    assert bench.tokens("waits") == [7] * 6
    assert 1 not in bench.manager.adapters


def test_host_work_per_step_does_not_grow_with_the_queue():
    """Counted in questions to the cache, not seconds: a full pool touches one queued sequence a step."""
    bench = Bench(blocks=8, max_seqs=4)
    bench.submit("runs", 20, max_tokens=10)
    bench.step()
    for i in range(300):
        bench.submit(f"q{i}", 20, max_tokens=10)
    asked = counted(bench.manager.leases, "acquire")
    bench.step()
    assert len(asked) == 1 and bench.scheduler.waiting == 300


# -- two tiers ----------------------------------------------------------------------------------


def test_a_request_that_waits_for_its_copies_blocks_nobody_and_takes_no_slot():
    bench = Bench(delay=5, max_seqs=2)
    cold = [bench.adapter(uid, 3) for uid in (1, 2)]
    for uid, node in enumerate(cold, 1):
        bench.submit(f"cold{uid}", 9, max_tokens=2, adapter=node)
    bench.submit("warm1", 5, max_tokens=2)
    bench.submit("warm2", 5, max_tokens=2)
    bench.step()
    assert set(work(bench.plans[0])) == {"warm1", "warm2"}
    assert [s.request.id for s in bench.scheduler.loading] == ["cold1", "cold2"]
    bench.finish()
    first = {name: next(i for i, p in enumerate(bench.plans) if name in work(p)) for name in ("cold1", "cold2")}
    assert first == {"cold1": 6, "cold2": 6}  # the step after both copies have landed


def test_waiting_times_tell_adapter_and_kv_apart_and_only_the_first_lease_counts():
    bench = Bench(blocks=32, delay=3)
    node = bench.adapter(1, 3)
    bench.submit("first", 12, max_tokens=1, adapter=node)
    bench.finish()
    evict_all(bench.manager)
    bench.submit("again", 12, max_tokens=1, adapter=node)
    bench.submit("base", 12, max_tokens=1)
    bench.finish()
    timing = {e.request_id: e.timing for e in bench.events if e.timing}
    assert timing["first"].adapter_cold_start == 4 and timing["first"].kv_cold_start == 0
    assert timing["again"].adapter_cold_start == timing["again"].kv_cold_start == 4
    assert timing["again"].prefill == timing["again"].ttft - timing["again"].queue - 4
    assert timing["base"].adapter_cold_start == timing["base"].kv_cold_start == 0
    usage = {e.request_id: e.usage for e in bench.events if e.usage}
    assert usage["again"].host_tokens == usage["again"].cached_tokens > 0
    assert usage["first"].host_tokens == usage["base"].host_tokens == 0


def test_who_has_one_token_to_compute_when_its_copies_land_runs_in_that_step():
    bench = Bench(blocks=32, delay=2)
    bench.submit("first", 9, max_tokens=1)
    bench.finish()
    evict_all(bench.manager)
    begin = len(bench.plans)
    bench.submit("again", 9, max_tokens=1)
    bench.finish()
    assert bench.plans[begin].copies and work(bench.plans[begin + 3]) == {"again": (8, 1)}


def test_an_abort_while_its_copies_are_on_the_way_leaves_nothing_behind():
    bench = Bench(delay=4)
    node = bench.adapter(1, 3)
    bench.submit("gone", 9, adapter=node)
    bench.step()
    assert bench.scheduler.loading and bench.manager.flying
    bench.abort("gone")
    bench.manager.kill(node)
    assert 1 in bench.manager.adapters  # its blocks are being written
    bench.finish()
    assert 1 not in bench.manager.adapters and state(bench.manager, 1).hbm.free == 64


def test_decoding_takes_room_from_those_that_still_load():
    bench = Bench(blocks=8, delay=30)
    node = bench.adapter(1, 2)
    bench.submit("runs", 8, max_tokens=20)
    bench.submit("loads", 8, max_tokens=4, adapter=node)
    bench.finish()
    assert bench.scheduler.preemptions > 0
    assert len(bench.tokens("runs")) == 20 and len(bench.tokens("loads")) == 4


def test_a_step_streams_what_its_prompts_read_and_is_still_on_its_way():
    bench = Bench(delay=3, streams=True)
    measure(bench.manager.policy.meter)
    node = bench.adapter(1, 3)
    bench.submit("early", 9, max_tokens=2, adapter=node)
    bench.step()
    (copy,) = bench.plans[0].copies
    assert bench.plans[0].streams == (copy,) and "early" in work(bench.plans[0])
    bench.finish()
    assert bench.manager.counters.streamed == bench.manager.counters.cold_streamed == 1
    assert not any(p.streams for p in bench.plans[3:])


def test_a_step_follows_copies_one_after_the_other_if_it_takes_longer_than_all():
    bench = Bench(delay=3, streams=True)
    measure(bench.manager.policy.meter)
    for uid, name in ((1, "first"), (2, "second")):
        bench.submit(name, 9, max_tokens=2, adapter=bench.adapter(uid, 3))
    bench.step()
    assert bench.plans[0].streams == bench.plans[0].copies and len(bench.plans[0].copies) == 2
    bench.finish()


def test_a_copy_that_waits_for_the_link_is_streamed_once_the_link_carries_it():
    bench = Bench(delay=3, streams=True)
    meter = bench.manager.policy.meter
    measure(meter)
    meter.token_s = 6e-3  # of one copy's 30 ms, the step may wait for 49
    for uid, name in ((1, "first"), (2, "second")):
        bench.submit(name, 9, max_tokens=2, adapter=bench.adapter(uid, 3))
    bench.step()
    first, second = bench.plans[0].copies
    assert bench.plans[0].streams == (first,) and work(bench.plans[0]) == {"first": (0, 9)}
    bench.step()
    assert "second" not in work(bench.plans[1])
    first.seconds = 0.03  # it has come, and the link takes up the other just before the next step
    second.started = bench.now + 1
    bench.step()
    assert bench.plans[2].streams == (second,) and "second" in work(bench.plans[2])
    bench.finish()


def test_a_refused_lease_is_asked_for_again_only_after_something_changed(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(blocks=8)
    bench.submit("holder", 24, max_tokens=6)
    bench.step()
    calls = []
    acquire = bench.manager.leases.acquire
    monkeypatch.setattr(bench.manager.leases, "acquire", lambda *a: calls.append(1) or acquire(*a))
    bench.submit("waits", 20, max_tokens=2)
    for _ in range(4):
        bench.step()
    assert len(calls) <= 2 and not bench.tokens("waits")
    bench.finish()
    assert len(bench.tokens("waits")) == 2


def test_a_refused_request_runs_when_blocks_come_free_and_a_lost_wake_up_would_show(monkeypatch: pytest.MonkeyPatch):
    """The same run twice; in the second the cache never says that something changed (a planted bug)."""

    def run() -> Bench:
        bench = Bench(blocks=8)
        bench.submit("first", 24, max_tokens=6)
        bench.submit("second", list(range(50, 66)), max_tokens=4)
        bench.step()
        assert bench.scheduler.waiting == 1  # it was refused
        bench.finish(limit=200)
        return bench

    assert len(run().tokens("second")) == 4
    monkeypatch.setattr(CacheManager, "epoch", property(lambda manager: 0))
    with pytest.raises(AssertionError, match="the scheduler does not get on"):
        run()


def test_a_request_without_room_in_the_adapters_share_lets_others_go_ahead():
    bench = Bench(blocks=40, policy="vllm-fair", max_seqs=8)  # the adapters' share: 8 blocks
    a, b = bench.adapter(1, 6), bench.adapter(2, 6)
    bench.submit("first", 5, max_tokens=20, adapter=a)
    for _ in range(3):
        bench.step()
    bench.submit("no room", 5, max_tokens=2, adapter=b)
    bench.submit("warm", 5, max_tokens=2, adapter=a)
    bench.submit("base", 5, max_tokens=2)
    bench.step()
    assert {"warm", "base"} <= set(work(bench.plans[-1])) and "no room" not in work(bench.plans[-1])
    bench.finish()
    assert len(bench.tokens("no room")) == 2


def test_waiting_for_a_slot_counts_as_queue_and_not_as_a_cold_start():
    bench = Bench(delay=2, max_seqs=1)
    node = bench.adapter(1, 3)
    bench.submit("cold", 9, max_tokens=2, adapter=node)
    bench.step()
    bench.submit("long", 5, max_tokens=30)
    bench.finish()
    timing = next(e.timing for e in bench.events if e.request_id == "cold" and e.timing)
    assert timing.adapter_cold_start == 3 and timing.queue > 20
    assert timing.ttft == timing.queue + timing.adapter_cold_start + timing.prefill


def test_what_a_preempted_sequence_finds_again_is_no_hit():
    bench = Bench(blocks=10, draw=lambda s, position: 100 + position)
    for name, start in (("a", 10), ("b", 30), ("c", 50)):
        bench.submit(name, list(range(start, start + 9)), max_tokens=12)
    bench.finish()
    counters = bench.manager.counters
    assert bench.scheduler.preemptions > 0
    assert (counters.kv_hit_tokens, counters.kv_lookup_tokens) == (0, 27)
