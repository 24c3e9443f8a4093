"""The table of requests: whatever deaths, delays and doubled messages do, every token comes exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.cluster.requests import MOST_LOSSES, Broken, Routed, Table
from jlora.types import Done, Request, SamplingParams, Timing, TokenEvent, Usage


def wanted(index: int, position: int) -> int:
    """A token is a function of completion and position, as it is of seed and position."""
    return 1000 * index + position


@dataclass
class Message:
    rid: int
    index: int
    position: int | None
    event: TokenEvent


@dataclass
class Replica:
    """Goes on behind `done`; its messages wait in `sent` until they arrive."""

    rid: int
    request: Request
    sent: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.request.sampling.n
        self.done = list(self.request.done) or [Done()] * n

    def step(self) -> None:
        most = self.request.sampling.max_tokens or 1
        for index, done in enumerate(self.done):
            if done.ended:
                continue
            position = len(done.tokens)
            ended = position + 1 == most
            event = TokenEvent(
                self.request.id, index, wanted(index, position),
                finish_reason="length" if ended else None,
                usage=Usage(3, 2, position + 1) if ended else None,
                timing=Timing(ttft=0.5) if ended else None,
            )  # fmt: skip
            self.sent.append(Message(self.rid, index, position, event))
            self.done[index] = Done((*done.tokens, wanted(index, position)), ended)


def new(table: Table, n: int = 1, max_tokens: int = 4) -> Routed:
    request = Request("r", (1, 2, 3), SamplingParams(n=n, max_tokens=max_tokens, seed=7))
    return table.add(request, None, lambda events: None, now=10.0)


def arrive(table: Table, message: Message, now: float = 11.0) -> list[TokenEvent]:
    routed = table.attempt(message.rid)
    if routed is None or not routed.wants(message.index, message.position):
        return []
    return [routed.deliver(message.event, now)]


WHAT = st.sampled_from(["step", "step", "arrive", "arrive", "double", "late", "die", "stop"])


@given(st.lists(WHAT, max_size=60), st.integers(1, 3), st.integers(1, 5))
def test_any_interleaving_gives_every_token_exactly_once(script: list[str], n: int, most: int):
    table = Table()
    routed = new(table, n, most)
    got: list[TokenEvent] = []
    old: list[Message] = []  # of dead attempts, and those that come twice

    def begin() -> Replica:
        table.begin(routed, "a", 10.5)
        return Replica(routed.rid, routed.resumed())

    replica = begin()
    stopped: int | None = None
    for what in script:
        if what == "step":
            replica.step()
        elif what == "arrive" and replica.sent:
            message = replica.sent.pop(0)
            old.append(message)
            got += arrive(table, message)
        elif what == "double" and old:
            got += arrive(table, old[len(old) // 2])
        elif what == "late" and old:
            got += arrive(table, old.pop())
        elif what == "die":
            old += replica.sent
            got += table.lose(routed, 12.0)
            replica = begin()
        elif what == "stop" and stopped is None and any(e.index == 0 for e in got):
            stopped = sum(e.index == 0 and e.token_id is not None for e in got)
            routed.stop(0, stopped)
    while routed.open:
        replica.step()
        while replica.sent:
            got += arrive(table, replica.sent.pop(0))
    for index in range(n):
        mine = [e for e in got if e.index == index]
        tokens = [e.token_id for e in mine if e.token_id is not None]
        assert tokens == [wanted(index, i) for i in range(len(tokens))]
        assert len(tokens) == most or (index == 0 and stopped is not None)
        assert [e.finish_reason is not None for e in mine] == [False] * (len(mine) - 1) + [True]
        usage = mine[-1].usage
        assert usage is not None and usage.prompt_tokens == 3
        assert usage.completion_tokens == (len(tokens) if index or stopped is None else min(stopped, len(tokens)))
        assert mine[-1].timing is not None


def test_the_first_attempt_sends_the_request_as_it_is_and_a_later_one_what_is_done():
    table = Table()
    routed = new(table, n=2)
    assert routed.resumed() is routed.request
    table.begin(routed, "a", 10.0)
    first = Replica(routed.rid, routed.request)
    first.step()
    arrive(table, first.sent[1])
    table.lose(routed, 11.0)
    assert routed.resumed() == replace(routed.request, done=(Done(), Done((1000,))))


def test_a_token_from_the_future_breaks_the_stream():
    routed = new(Table())
    with pytest.raises(Broken):
        routed.wants(0, 1)
    with pytest.raises(Broken):
        routed.wants(1, 0)


def test_a_request_that_kills_every_replica_is_given_up_and_one_that_moves_on_is_not():
    table = Table()
    routed = new(table, max_tokens=100)
    for i in range(2 * MOST_LOSSES):
        table.begin(routed, "a", 10.0)
        arrive(table, Message(routed.rid, 0, i, TokenEvent("r", 0, i)))
        table.lose(routed, 11.0)
    assert not routed.given_up
    for _ in range(MOST_LOSSES):
        assert not routed.given_up
        table.begin(routed, "a", 10.0)
        table.lose(routed, 11.0)
    assert routed.given_up


def test_times_count_from_the_requests_arrival():
    table = Table()
    routed = new(table, max_tokens=1)
    table.begin(routed, "a", 12.0)  # two seconds after it came
    told = Timing(queue=1.0, prefill=0.5, ttft=1.5)
    end = TokenEvent("r", 0, 0, finish_reason="length", usage=Usage(3, 2, 1, 1), timing=told)
    whole = routed.deliver(end, 13.5)
    assert whole.timing == Timing(queue=3.0, prefill=0.5, ttft=3.5) and routed.measured(0)
    assert whole.usage == Usage(3, 2, 1, 1)


def test_the_first_token_of_a_dead_attempt_keeps_its_time():
    table = Table()
    routed = new(table)
    table.begin(routed, "a", 10.0)
    arrive(table, Message(routed.rid, 0, 0, TokenEvent("r", 0, 0)), now=11.0)
    table.lose(routed, 12.0)
    table.begin(routed, "b", 12.0)
    arrive(table, Message(routed.rid, 0, 1, TokenEvent("r", 0, 1)), now=14.0)
    end = TokenEvent("r", 0, 2, finish_reason="stop", usage=Usage(3, 5, 3), timing=Timing(ttft=9.0))
    (whole,) = arrive(table, Message(routed.rid, 0, 2, end), now=15.0)
    assert whole.timing is not None and (whole.timing.ttft, whole.timing.tpot) == (1.0, 2.0)
    assert not routed.measured(0), "its times are of two attempts, with what lay between them"
    assert whole.usage == Usage(3, 3, 3)  # no more of the prompt can be cached than there is


def test_an_ended_request_is_forgotten():
    table = Table()
    routed = new(table, n=2)
    table.begin(routed, "a", 10.0)
    rid = routed.rid
    assert [e.finish_reason for e in routed.end("abort")] == ["abort", "abort"] and not routed.open
    table.end(routed)
    assert table.attempt(rid) is None and table.get(routed.handle) is None and len(table) == 0


def test_what_waits_is_ordered_by_priority_then_age():
    table = Table()
    made = [
        table.add(Request(str(i), (1,), priority=p), None, lambda events: None, 0.0) for i, p in enumerate((0, 5, 0))
    ]
    assert [r.request.id for r in table.waiting()] == ["1", "0", "2"]
    table.begin(made[1], "a", 0.0)
    assert [r.request.id for r in table.waiting()] == ["0", "2"]
    assert table.at("a") == [made[1]] and table.completions == 3
