"""When a link is given up: silence, and an engine that stands; not compiling, nor time in which nobody could speak."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from jlora.cluster.attach import COMPILING_S, DEAF_S, Attached, Terms
from jlora.cluster.proto import link_pb2 as link
from tests.cluster import _port as port
from tests.cluster._links import INFO

MOST = 100  # messages that may wait


class Ears:
    """A receiver that notes what it hears."""

    def __init__(self) -> None:
        self.lost_for: list[str] = []

    def check(self, attached: Attached) -> None: ...

    def begun(self, attached: Attached) -> None: ...

    def received(self, attached: Attached, message: link.FromReplica) -> None: ...

    def lost(self, attached: Attached, why: str) -> None:
        self.lost_for.append(why)


@dataclass
class Ground:
    """A replica whose stream has just begun, in a time of its own."""

    now: float = 100.0
    ears: Ears = field(default_factory=Ears)

    def __post_init__(self) -> None:
        terms = Terms("router", suspect_s=0.5, most_sends=MOST, clock=lambda: self.now)
        self.one = Attached("r0", "127.0.0.1:1", terms, self.ears)
        self.one.info = INFO
        channel: Any = object()
        port.begin(self.one, channel, link.FromReplica())

    @property
    def lost(self) -> list[str]:
        return self.ears.lost_for

    def hear(self, **state: Any) -> None:
        """A message comes."""
        port.hear(self.one, link.FromReplica(state=link.State(**state)))

    def run(self, seconds: float) -> None:
        """The router looks again and again; none comes."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.one.look(self.now)


@pytest.fixture
def ground() -> Ground:
    return Ground()


def test_silence_is_death_after_a_while(ground: Ground):
    ground.hear()
    ground.run(0.4)
    assert not ground.lost and ground.one.view().health == "up"
    ground.run(0.2)
    assert len(ground.lost) == 1 and "no message" in ground.lost[0] and ground.one.view().health == "suspect"
    ground.run(4.0)
    assert len(ground.lost) == 1


def test_a_replica_that_pauses_often_has_more_time(ground: Ground):
    for pause_s in (0.4, 1.0):
        ground.run(pause_s)
        ground.hear()
    ground.run(2.8)
    assert not ground.lost
    ground.run(0.4)
    assert ground.lost


def test_a_compiling_replica_may_be_silent_for_longer(ground: Ground):
    ground.hear(compiling=True, age_s=100.0)
    ground.run(COMPILING_S - 1)
    assert not ground.lost
    ground.run(2.0)
    assert ground.lost


def test_a_view_has_what_the_replica_tells_of_its_fetches(ground: Ground):
    def told() -> tuple[float, float]:
        view = ground.one.view()
        return view.peer_bps, view.path_bps

    assert told() == (0.0, 0.0)
    ground.hear(peer_bps=2e9, path_bps=3e8)
    assert told() == (2e9, 3e8)
    ground.hear(peer_bps=float("nan"), path_bps=-1.0)
    assert told() == (0.0, 0.0)


def test_a_replica_tells_how_many_programs_it_still_compiles(ground: Ground):
    assert ground.one.programs_left == 0
    ground.hear(programs_left=3)
    assert ground.one.programs_left == 3


def test_an_engine_that_stands_is_given_up_though_its_process_speaks(ground: Ground):
    patience = INFO.config.serve.heartbeat_s
    ground.hear(age_s=patience - 1)
    ground.run(0.1)
    assert not ground.lost
    ground.hear(age_s=patience + 1)
    ground.run(0.1)
    assert "its engine has stood" in ground.lost[0]


@pytest.mark.parametrize("speaks", [False, True])
def test_time_in_which_this_process_stood_still_does_not_count(ground: Ground, speaks: bool):
    """Neither for the replica nor against it, also if what came meanwhile is read before the clock is looked at."""
    ground.hear()
    ground.now += 60.0
    if speaks:
        ground.hear()
    ground.run(0.4)
    assert not ground.lost
    ground.run(0.3)
    assert ground.lost


def test_messages_must_arrive_also_while_it_speaks(ground: Ground):
    def speak(seconds: float, read: int) -> None:
        for _ in range(round(seconds / 0.1)):
            ground.run(0.1)
            ground.hear(read=read)

    speak(3.0, read=1)  # all that was sent: the hello
    port.wrote(ground.one, 3)
    for read in (1, 2, 3):  # it reads slowly, and does not stand
        speak(DEAF_S - 0.5, read=read)
    speak(DEAF_S + 1, read=4)
    assert not ground.lost
    port.wrote(ground.one, 1)
    speak(DEAF_S + 1, read=0)  # an older one does not count
    assert not ground.lost
    port.wrote(ground.one, 1)
    speak(DEAF_S + 0.3, read=5)
    assert len(ground.lost) == 1 and "has read no message for 5." in ground.lost[0]


def test_a_replica_that_reads_nothing_is_given_up(ground: Ground):
    for rid in range(MOST + 1):
        ground.one.send(link.ToReplica(cancel=link.Cancel(rid=rid)))
    assert ground.lost == ["it reads nothing"]
    ground.one.send(link.ToReplica())
    assert port.unsent(ground.one) == MOST + 1  # without a stream, messages go nowhere


def test_a_view_follows_the_messages(ground: Ground):
    adapters = [link.Residency(key="x@1", tier="HBM", rank=8), link.Residency(key="y@1", tier="DISK", rank=4)]
    ground.hear(running=2, waiting=1, free_blocks=5, blocks=9, steps=1, adapters=adapters)
    before = ground.one.view()
    ground.now += 0.1
    ground.hear(running=1, draining=True, steps=3, adapters=[link.Residency(key="y@1")])
    after = ground.one.view()
    assert (before.running, before.waiting, before.free_blocks, before.health) == (2, 1, 5, "up")
    assert before.tiers == {"x@1": "HBM", "y@1": "DISK"} and before.ranks == {"x@1": 8, "y@1": 4}
    assert after.tiers == {"x@1": "HBM"} and after.health == "draining" and after.step_s > 0


@pytest.mark.parametrize(("closing", "level"), [(True, "INFO"), (False, "WARNING")])
def test_only_a_replica_that_leaves_a_router_which_goes_on_is_warned_of(
    ground: Ground, closing: bool, level: str, caplog: pytest.LogCaptureFixture
):
    async def stop() -> None:
        ground.one.start()
        await asyncio.wait((ground.one.stop(closing),))

    with caplog.at_level(logging.INFO, "jlora.cluster.attach"):
        asyncio.run(stop())
    assert len(ground.lost) == 1
    (line,) = caplog.records
    assert line.levelname == level and line.getMessage().endswith(f"is lost: {ground.lost[0]}")
