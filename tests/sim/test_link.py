"""The link's lanes: order, times, and what a copy out waits for."""

from __future__ import annotations

import pytest

from jlora.cache.transfer import Copy, Direction
from jlora.cache.tree import AdapterNode, Node
from jlora.sim.clock import VirtualClock
from jlora.sim.link import Link, LinkSpec

SPEC = LinkSpec(block_s=1.0, latency_s=0.25, adapter_s=8.0, groups=4)


class World:
    """A link, its clock, and when the device will be done."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.drained = 0.0
        self.link = Link(SPEC, self.clock, lambda: self.drained)

    def land(self, at: float) -> list[Copy]:
        self.clock.now = at
        return self.link.landed()


def copy(blocks: int, direction: Direction = "in", demand: bool = False, streams: bool = False) -> Copy:
    adapter = AdapterNode(1, 0)
    nodes = tuple(Node(adapter, b"") for _ in range(blocks))
    return Copy(direction, adapter, nodes, tuple(range(blocks)), tuple(range(blocks)), demand, streams)


def test_a_copy_takes_its_latency_and_its_bytes_and_says_so():
    world, made = World(), copy(2)
    world.link.start([made])
    assert world.link.next_landing() == 1 + 2.25
    assert world.land(3.24) == [] and world.land(3.25) == [made]
    assert (made.started, made.seconds) == (1.0, 2.25)
    assert world.link.next_landing() == float("inf")


def test_demand_overtakes_prefetch_but_interrupts_nothing():
    world = World()
    first, second, wanted = copy(4), copy(1), copy(1, demand=True)
    world.link.start([first, second])
    world.clock.now = 2.0
    world.link.start([wanted])
    assert world.land(100) == [first, wanted, second]
    assert wanted.started == first.started + first.seconds


def test_a_prefetch_that_somebody_comes_to_wait_for_overtakes_the_others():
    world = World()
    first, second, third = copy(4), copy(1), copy(1)
    world.link.start([first, second, third])
    third.demand = True
    assert world.land(100) == [first, third, second]


def test_directions_do_not_wait_for_each_other():
    world, inward, outward = World(), copy(4), copy(1, "out")
    world.link.start([inward, outward])
    assert world.land(2.25) == [outward]
    assert world.land(5.25) == [inward]
    assert (world.link.busy_s("in"), world.link.busy_s("out")) == (4.25, 1.25)


def test_a_copy_out_holds_its_lane_until_the_device_has_made_its_snapshot():
    world = World()
    world.drained = 6.0
    first, second = copy(1, "out"), copy(1, "out", demand=True)
    world.link.start([first])
    world.drained = 0.0
    world.link.start([second])
    assert world.land(7.24) == [] and world.land(7.25) == [first]
    assert world.land(8.5) == [second]


def test_an_adapter_that_comes_in_takes_its_fixed_seconds_more():
    world = World()
    adapter = AdapterNode(1, 2)
    inward = Copy("in", adapter, (adapter,), (0, 1), (0, 1))
    world.link.start([inward])
    assert world.land(1 + 8 + 0.25 + 2) == [inward]


def test_groups_of_layers_arrive_one_after_the_other_each_a_transfer_of_its_own():
    world, streamed = World(), copy(4, demand=True, streams=True)
    waiting = copy(1, demand=True, streams=True)
    world.link.start([streamed, waiting])
    arrivals = [world.link.arrival(streamed, group) for group in range(4)]
    assert arrivals == pytest.approx([1 + 1.25, 1 + 2.5, 1 + 3.75, 1 + 5.0])
    assert world.link.arrival(waiting, 0) == float("inf")  # not taken up yet
    assert world.land(6.0) == [streamed]
    assert world.link.arrival(streamed, 3) == 0.0  # all there
