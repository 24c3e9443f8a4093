"""What a tenant may use: its own limits, and its share of what all tenants use together. No server."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from jlora.errors import LimitReached, QueueFull, ResourceExhausted
from jlora.serve.access.keys import Limits
from jlora.serve.access.tenants import Tenants
from jlora.serve.gate import MOST_BYTES, MOST_CALLS, Gate, Room


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_allows_a_seconds_worth_at_once_and_refills():
    clock = Clock()
    tenants = Tenants(clock)
    tenants.limit({"a": Limits(requests_per_s=4.0)})
    for _ in range(4):
        tenants.arrive("a")
    with pytest.raises(LimitReached) as e:
        tenants.arrive("a")
    assert e.value.retry_s == 0.25
    clock.now += 0.25
    tenants.arrive("a")
    clock.now += 3600
    for _ in range(4):
        tenants.arrive("a")
    with pytest.raises(LimitReached):
        tenants.arrive("a")
    for name in ("b", "", None):
        tenants.arrive(name)


def test_queued_tokens_count_until_a_request_begins_and_limits_may_change():
    tenants, begun = Tenants(), [False, False]
    tenants.limit({"a": Limits(queued_tokens=100)})
    with tenants.queued("a", 60, lambda: begun[0]):
        with pytest.raises(LimitReached), tenants.queued("a", 60, lambda: False):
            pass
        begun[0] = True
        with tenants.queued("a", 60, lambda: begun[1]):
            tenants.limit({"a": Limits(queued_tokens=70)})
            with pytest.raises(ResourceExhausted, match="limit queued_tokens = 70"), tenants.queued("a", 71, bool):
                pass
            with pytest.raises(LimitReached), tenants.queued("a", 11, bool):
                pass
            tenants.limit({})
            with tenants.queued("a", 10**9, bool):
                pass
    tenants.limit({"a": Limits(queued_tokens=100)})
    with tenants.queued("a", 100, bool):
        pass


def test_two_requests_that_want_a_tenants_limit_do_not_refuse_each_other():
    tenants = Tenants()
    tenants.limit({"a": Limits(concurrent=2)})
    with tenants.call("a", True), tenants.call("a", True):  # both messages are on their way
        with pytest.raises(LimitReached, match="has 2 requests under way"), tenants.call("a", True):
            pass
        with tenants.completions("a", 2):
            with pytest.raises(LimitReached, match="has 2 requests under way"), tenants.completions("a", 2):
                pass
        with tenants.completions("a", 2):
            pass
    with tenants.call("a", True), tenants.completions("a", 2):
        with pytest.raises(LimitReached), tenants.call("a", True):
            pass


def test_a_tenant_takes_as_many_places_as_it_leaves_free():
    gate, room = Gate(), Room(2, 14)
    with ExitStack() as stack:
        for tenant, most in (("a", 8), ("b", 4), ("c", 2), ("d", 2)):  # the last has its slots, and no more
            for _ in range(most):
                stack.enter_context(gate.completions(room, 1, tenant))
            with pytest.raises(
                LimitReached if tenant != "d" else QueueFull, match=f"limit 16|'{tenant}' has {most} co"
            ):
                gate.check_completions(room, 1, tenant)
    with gate.completions(room, 16, "a"), pytest.raises(QueueFull):  # one request may take all
        gate.check_completions(room, 1, "b")
    with ExitStack() as stack:  # without keys there are no tenants
        for _ in range(16):
            stack.enter_context(gate.completions(room, 1))
    with ExitStack() as stack:
        for _ in range(MOST_CALLS // 2):
            stack.enter_context(gate.call(1, counts=True, tenant="a"))
        with pytest.raises(LimitReached, match=f"'a' has {MOST_CALLS // 2} calls under way"):
            gate.check_calls("a")
        gate.check_calls("b")
    tenth = MOST_BYTES // 10
    with gate.call(4 * tenth, False, "a"):
        with pytest.raises(LimitReached, match=f"'a' has {4 * tenth} bytes"), gate.call(3 * tenth, False, "a"):
            pass
        with gate.call(3 * tenth, False, "b"):
            pass
