"""A merge serves the requests that it is for, whatever those that it keeps waiting hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jlora.types import Timing
from tests.cache._books import evict_all
from tests.sim._sim import ENGINE, LINK, MODEL, replica_of, request, sized

SLOTS, SIZE = 8, 40  # blocks of an adapter
STEP_S = 0.01


class Crowd:
    """A replica whose slots are taken by requests for adapters 1 to 8 without an end; it merges adapter 0."""

    def __init__(self, device: int, merge: str = "0"):
        engine = replace(ENGINE, max_seqs=SLOTS, merge=merge)
        model = replace(MODEL, fixed_s=0.0, weights_s=STEP_S, adapter_block_s=2e-4 if merge == "auto" else 0.0)
        link = replace(LINK, block_s=2e-4)
        spec = replace(sized(device, 2000), model=model, link=link, engine=engine, adapters=(SIZE,) * (SLOTS + 1))
        spec = replace(spec, cache=replace(spec.cache, monitor_s=60.0))  # nothing is fetched ahead after the start
        self.replica = replica_of(spec)
        self.asked = 0
        self.came: list[float] = []  # when tokens came, anybody's
        for _ in range(2 * SLOTS):
            self.crowd()
        self.until(lambda: self.now > 2.0)

    @property
    def now(self) -> float:
        return self.replica.clock.now

    def ask(self, name: str, adapter: int, output: int) -> None:
        self.asked += 1
        self.replica.submit(request(name, 64, output, seed=self.asked, adapter=adapter), self.now)

    def crowd(self) -> None:
        self.ask(f"crowd{self.asked}", 1 + self.asked % SLOTS, 60)

    def until(self, done: Callable[[], bool], name: str = "") -> Timing:
        """Plays until `done`, or until the request of this name has ended."""
        while not done():
            for event in self.replica.step(self.now + STEP_S):
                self.came += [self.now] if event.token_id is not None else []
                if event.finish_reason and event.request_id == name:
                    assert event.timing is not None
                    return event.timing
                if event.finish_reason and event.request_id.startswith("crowd"):
                    self.crowd()
        return Timing()

    def longest_pause(self, since: float) -> float:
        times = [since, *(at for at in self.came if at > since), self.now]
        return max(b - a for a, b in zip(times, times[1:], strict=False))

    @property
    def merge(self) -> Any:
        return self.replica.engine.stats().merge


def test_where_others_hold_all_room_a_merge_does_not_stop_the_server():
    crowd = Crowd(device=500)
    began = crowd.now
    crowd.ask("merged", 0, 20)
    crowd.until(lambda: crowd.now > 20.0, "merged")
    assert crowd.now < 20.0, "it is never served"
    assert crowd.merge.switches == 2, "it was merged in vain, and then for a request with blocks"
    assert crowd.longest_pause(began) < 0.3


def test_the_most_asked_adapter_is_not_kept_merged_in_vain():
    crowd = Crowd(device=500, merge="auto")
    began = crowd.now
    for index in range(5 * SLOTS):
        crowd.ask(f"merged{index}", 0, 60)
    crowd.until(lambda: crowd.now > began + 5.0)
    assert crowd.merge.switches == 1 and crowd.longest_pause(began) < 0.5


def test_with_room_its_request_runs_at_once_although_its_adapter_is_on_the_host():
    """All slots were taken; those that wait for the merged adapter to go load nothing."""
    crowd = Crowd(device=1200)
    evict_all(crowd.replica.manager)
    assert not crowd.replica.manager.adapters[1].on_device
    crowd.ask("merged", 0, 20)
    assert crowd.until(lambda: crowd.now > 20.0, "merged").ttft < 0.5 and crowd.now < 20.0
