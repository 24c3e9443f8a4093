"""Adapters that always have requests give way to one that waits for host memory: no reading waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from jlora.cache import inspect
from jlora.cache.manager import Sizes
from jlora.engine.admission import OVERTAKES
from jlora.engine.records import NewAdapter
from jlora.types import Request, SamplingParams
from tests.sim import _sim

SMALL, LARGE = 4, 12  # blocks


class Busy:
    """A replica whose adapters are on the disk, under requests that never end for some of them."""

    def __init__(self, host: int, small: int, slots: int = 8):
        engine = replace(_sim.ENGINE, max_seqs=slots)
        self.replica = _sim.replica_of(
            replace(_sim.SPEC, sizes=Sizes(64, host, _sim.BLOCK), adapters=(), engine=engine)
        )
        self.sizes = {f"a{i}": SMALL for i in range(small)} | {"large": LARGE}
        for name in self.sizes:
            self.replica.engine.adapters.register(self.made(name))
        self.names = [name for name in self.sizes if name != "large"]
        self.waiting, self.ended, self.asked = Counter[str](), Counter[str](), 0
        self.reads, self.random = Counter[str](), random.Random(7)

    def made(self, name: str) -> NewAdapter:
        size = self.sizes[name]
        return NewAdapter(name, "", {}, (), (), ("q",) * size, None, size, 0.0, path="/there")

    def ask(self, name: str, priority: int = 0, tokens: int = 0) -> int:
        self.asked += 1
        prompt = tuple(self.random.randrange(3, 30000) for _ in range(9))
        sampling = SamplingParams(max_tokens=tokens or self.random.randint(1, 6), ignore_eos=True)
        self.waiting[name] += 1
        request = Request(f"{name}:{self.asked}", prompt, sampling, name, priority=priority)
        return self.replica.submit(request, self.replica.clock.now)

    def turn(self, busy: Sequence[str], depth: int) -> None:
        """One step, with so many requests in the queue for each of these."""
        for name in busy:
            while self.waiting[name] < depth:
                self.ask(name)
        engine, manager = self.replica.engine, self.replica.manager
        for reading in engine.adapters.shelf.begin():
            self.reads[reading.record.name] += 1
            engine.arrived(reading, self.made(reading.record.name))
        for event in self.replica.step(self.replica.clock.now + 1.0):
            if event.finish_reason not in (None, "abort"):
                assert event.error is None and event.finish_reason == "length", event
                name = event.request_id.partition(":")[0]
                self.waiting[name] -= 1
                self.ended[name] += 1
        inspect.check_integrity(manager)
        self.replica.scheduler.check_integrity()

    def until(self, name: str, busy: Sequence[str], depth: int) -> int:
        """Ends once a request for this one has; how many others have ended meanwhile."""
        before, had = self.ended.total(), self.ended[name]
        for _ in range(4000):
            if self.ended[name] > had:
                return self.ended.total() - before
            self.turn(busy, depth)
        raise AssertionError(f"{name} waits for ever: {self.ended}")

    def drain(self) -> None:
        for _ in range(4000):
            if not self.replica.engine.busy:
                return
            self.turn((), 0)
        raise AssertionError(f"requests are left: {+self.waiting}")


@pytest.mark.parametrize(("host", "small", "slots"), [(16, 4, 8), (64, 16, 4), (12, 3, 1)], ids=str)
def test_an_adapter_on_the_disk_is_read_beside_adapters_that_always_have_requests(host: int, small: int, slots: int):
    busy = Busy(host, small, slots)
    for _ in range(60):
        busy.turn(busy.names, 3)
    busy.ask("large")
    others = busy.until("large", busy.names, 3)
    assert others <= OVERTAKES + 3 * small + 2 * slots, "many were admitted before it"
    for _ in range(200):
        busy.turn(busy.names, 3)
    busy.drain()
    assert not +busy.waiting and busy.ended.total() == busy.asked


def test_more_adapters_than_the_host_holds_take_turns():
    """Each of them waits a bounded time, and a reading is paid for by many requests."""
    busy = Busy(16, 9)
    for _ in range(3000):
        busy.turn(busy.names, 2)
    least, most = min(busy.ended[name] for name in busy.names), max(busy.ended.values())
    assert least > most / 4, busy.ended
    assert busy.ended.total() > 4 * busy.reads.total(), (busy.ended, busy.reads)
    busy.drain()
    assert busy.ended.total() == busy.asked


def test_a_pin_waits_for_no_request_for_ever():
    busy = Busy(24, 6)
    for _ in range(60):
        busy.turn(busy.names, 3)
    adapters = busy.replica.engine.adapters
    pinned: Future[object] = adapters.pin_when_read("large", True)  # type: ignore[assignment]
    for _ in range(2000):
        if pinned.done():
            break
        busy.turn(busy.names, 3)
    assert pinned.done() and adapters.get("large").pinned
    busy.drain()


def test_one_that_nobody_waits_for_any_more_holds_up_no_admission():
    busy = Busy(16, 4)
    for _ in range(60):
        busy.turn(busy.names, 3)
    handle = busy.ask("large")
    manager = busy.replica.manager
    for _ in range(2000):
        if manager.give_way_to != float("inf"):
            break
        busy.turn(busy.names, 3)
    else:
        raise AssertionError("nothing gave way")
    busy.replica.engine.abort(handle)
    busy.waiting["large"] -= 1
    had = busy.ended.total()
    for _ in range(100):
        busy.turn(busy.names, 3)
    assert busy.ended.total() > had + 100 and manager.give_way_to == float("inf")
    busy.drain()


def test_earlier_requests_keep_their_adapters():
    """A request of higher priority is served before the one that waits, however long that waits."""
    busy = Busy(16, 4)
    urgent = [busy.ask(name, priority=1) for name in busy.names]
    busy.ask("large")
    ended = Counter[str]()
    while len(ended) < len(urgent):
        busy.turn((), 0)
        ended = Counter({name: busy.ended[name] for name in busy.names if busy.ended[name]})
        assert not busy.ended["large"] or len(ended) == len(urgent)
    busy.drain()


def test_requests_of_a_version_that_ends_do_not_wait_for_a_reading():
    """It frees its memory only when they have run: held back, they and the reading would wait for each other."""
    busy = Busy(16, 4)
    for _ in range(60):
        busy.turn(busy.names, 3)
    busy.ask("large")
    for _ in range(2000):
        if busy.replica.manager.give_way_to != float("inf"):
            break
        busy.turn(busy.names, 3)
    else:
        raise AssertionError("nothing gave way")
    for name in busy.names:
        busy.ask(name)
        busy.replica.engine.adapters.remove(name)
    busy.drain()
    assert busy.ended["large"] == 1 and not +busy.waiting


@pytest.mark.parametrize("host", [16, 12])
def test_an_adapter_whose_request_has_answered_in_part_stays(host: int):
    """That request would end with an error if the adapter could not be read again. It ends before all must go."""
    busy = Busy(host, 4 if host == 16 else 3, slots=2)
    scheduler, (*others, last) = busy.replica.scheduler, busy.names
    busy.ask(last, priority=-1, tokens=20)
    while not scheduler.running or not scheduler.running[0].drawn:
        busy.turn((), 0)
    while len(scheduler.running) < 2:
        busy.turn(others, 3)
    assert scheduler.retract(), "it is preempted, and a slot is taken from the others for a while"
    for _ in range(20):
        busy.turn(others, 3)
    busy.ask("large")
    busy.until("large", others, 3)
    busy.drain()
    assert busy.reads[last] == busy.ended[last] == busy.ended["large"] == 1 and not +busy.waiting
