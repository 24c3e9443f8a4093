"""What the engine counts, to the token and to the second: its own code over a modelled device and a virtual clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jlora.sim.device import answer
from jlora.sim.replica import Replica
from jlora.types import Request, TokenEvent
from tests.sim._sim import SPEC, replica_of, request, sized

PROMPT = 8
HOST_S = {"plan": 2e-3, "run": 3e-3, "commit": 5e-4}  # what Python takes for each part of a step


def run(replica: Replica, steps: float = math.inf) -> list[TokenEvent]:
    """Steps until nothing is left, or so many times."""
    events = []
    while replica.busy and steps > 0:
        events += replica.step(math.inf)
        steps -= 1
    return events


def settled(replica: Replica) -> Replica:
    """With the copies of its start done."""
    for _ in range(100):
        replica.idle(math.inf)
    assert not replica.manager.flying
    return replica


def stopping(at: int) -> Request:
    """A request that could draw 24 tokens and ends with this one."""
    made = request("r", PROMPT, 24)
    return replace(made, sampling=replace(made.sampling, stop_token_ids=(answer(1, PROMPT, 24)[at - 1],)))


def test_tokens_drawn_beyond_a_stop_token_do_not_count():
    """The step that draws them is dispatched before the host has read the stop token."""
    drawn = {}
    for overlap in (True, False):
        replica = settled(replica_of(replace(SPEC, engine=replace(SPEC.engine, overlap=overlap))))
        replica.submit(stopping(at=5), replica.clock.now)
        events = run(replica)
        assert [event.token_id for event in events] == list(answer(1, PROMPT, 5))
        assert replica.engine.stats().generated_tokens == 5
        drawn[overlap] = replica.device.counts.steps
    assert drawn == {True: 6, False: 5}  # a step draws one token


@pytest.mark.parametrize("ended_by", ["abort", "stop"])
def test_tokens_of_the_step_on_its_way_do_not_count_when_a_request_is_ended(ended_by: str):
    replica = settled(replica_of())
    handle = replica.submit(request("r", PROMPT, 24), replica.clock.now)
    told = run(replica, steps=7)
    if ended_by == "abort":
        replica.engine.abort(handle)
    else:
        replica.engine.stop(handle, 0, 4)  # its text has the stop string in the fourth token
    told += run(replica)
    tokens = [event.token_id for event in told if event.token_id is not None]
    assert told[-1].finish_reason == ended_by and len(tokens) == 6
    assert replica.engine.stats().generated_tokens == 6
    assert replica.device.counts.steps == replica.engine.stats().steps == 7


def test_tokens_that_a_preempted_request_draws_count_once():
    replica = settled(replica_of(sized(device=24)))
    for seed in range(1, 5):  # four times 8 blocks at the end: they cannot all stay
        replica.submit(request(f"r{seed}", PROMPT, 24, seed), replica.clock.now)
    told = run(replica)
    assert replica.engine.stats().preemptions > 0
    assert replica.engine.stats().generated_tokens == len(told) == 4 * 24


class Host:
    """Lets Python's part of each step take `HOST_S`, and notes how long the engine waits for copies.

    `stalled_s`: in a dispatch, for streamed ones; `rested_s`: where there is nothing to run.
    """

    def __init__(self, replica: Replica):
        self.replica = replica
        self.calls: Counter[str] = Counter()
        self.stalled_s = self.rested_s = 0.0
        for owner, name in ((replica.scheduler, "plan"), (replica.device, "run"), (replica.scheduler, "commit")):
            self._slow(owner, name, getattr(owner, name))
        self._place, self._wait = replica.link.place, replica.link.wait
        replica.link.place, replica.link.wait = self._placed, self._waited

    def _placed(self, *args: Any) -> float:
        seconds = self._place(*args)
        self.stalled_s += seconds
        return seconds

    def _waited(self, seconds: float) -> None:
        began = self.replica.clock.now
        self._wait(seconds)
        self.rested_s += self.replica.clock.now - began

    def _slow(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        clock = self.replica.clock

        def slow(*args: Any) -> Any:
            self.calls[name] += 1
            clock.advance(clock.now + HOST_S[name])
            return call(*args)

        setattr(owner, name, slow)

    def seconds(self, *names: str) -> float:
        return sum(HOST_S[name] * self.calls[name] for name in names)


@pytest.mark.parametrize("overlap", [True, False])
def test_host_seconds_leave_out_waits_for_the_device_and_for_streamed_copies(overlap: bool):
    replica = replica_of(replace(sized(device=40), engine=replace(SPEC.engine, overlap=overlap)), "lru")
    for seed in (1, 2, 3):  # the third one's prompt pushes the first one's out
        replica.submit(request(f"r{seed}", 112, 1, seed), replica.clock.now)
        run(settled(replica))
    before, host = replica.engine.stats(), Host(replica)
    known = request("again", 64, 1, 1)
    replica.submit(replace(known, prompt=known.prompt + tuple(range(48))), replica.clock.now)
    began = replica.clock.now
    run(replica)
    after = replica.engine.stats()
    assert replica.manager.counters.streamed and host.stalled_s > 0.005
    assert after.plan_s - before.plan_s == pytest.approx(host.seconds("plan"))
    assert after.dispatch_s - before.dispatch_s == pytest.approx(host.seconds("run"))
    assert after.commit_s - before.commit_s == pytest.approx(host.seconds("commit"))
    assert replica.engine.host_s == pytest.approx(host.seconds("plan", "run", "commit"))  # before, Python took no time
    assert after.host_step_s == pytest.approx(replica.engine.host_s / after.steps)
    waits = after.read_s - before.read_s + host.stalled_s + host.rested_s
    assert replica.clock.now - began == pytest.approx(replica.engine.host_s + waits)
