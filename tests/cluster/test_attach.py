"""When a link is given up: silence, and an engine that stands; not compiling, nor time in which nobody could speak."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jlora.cluster.attach import COMPILING_S, Attached, Terms
from jlora.cluster.proto import link_pb2 as link
from tests.cluster import _port as port
from tests.cluster._links import INFO


class Ears:
    """A receiver that notes what it hears."""

    def __init__(self) -> None:
        self.lost_for: list[str] = []

    def begun(self, attached: Attached) -> None: ...

    def received(self, attached: Attached, message: link.FromReplica) -> None: ...

    def lost(self, attached: Attached, why: str) -> None:
        self.lost_for.append(why)


@pytest.fixture
def one() -> Attached:
    """A replica whose stream has just begun; nothing runs."""
    made = Attached("r0", "127.0.0.1:1", Terms("router", suspect_s=0.5, most_sends=3), Ears())
    made.info = INFO
    channel: Any = object()
    port.begin(made, channel, link.FromReplica())
    return made


def hear(one: Attached, **state: Any) -> float:
    """A message now; the time."""
    port.hear(one, link.FromReplica(state=link.State(**state)))
    return time.monotonic()


def lost(one: Attached) -> list[str]:
    ears: Any = port.receiver(one)
    return ears.lost_for


def test_a_view_has_what_the_replica_tells_of_its_fetches(one: Attached):
    assert (one.view().peer_bps, one.view().path_bps) == (0.0, 0.0)
    hear(one, peer_bps=2e9, path_bps=3e8)
    assert (one.view().peer_bps, one.view().path_bps) == (2e9, 3e8)
    hear(one, peer_bps=float("nan"), path_bps=-1.0)
    assert (one.view().peer_bps, one.view().path_bps) == (0.0, 0.0)


def test_silence_is_death_after_a_while(one: Attached):
    now = hear(one)
    one.look(now + 0.4)
    assert not lost(one) and one.view().health == "up"
    one.look(now + 5.0)
    assert len(lost(one)) == 1 and "no message" in lost(one)[0] and one.view().health == "suspect"
    one.look(now + 9.0)
    assert len(lost(one)) == 1


def test_a_replica_that_pauses_often_has_more_time(one: Attached):
    one.forgive(-2.0)  # the next message ends a pause of two seconds
    now = hear(one)
    one.look(now + 5.0)
    assert not lost(one)
    one.look(now + 7.0)
    assert lost(one)


def test_a_compiling_replica_may_be_silent_for_longer(one: Attached):
    now = hear(one, compiling=True, age_s=100.0)
    one.look(now + COMPILING_S - 1)
    assert not lost(one)
    one.look(now + COMPILING_S + 1)
    assert lost(one)


def test_an_engine_that_stands_is_given_up_though_its_process_speaks(one: Attached):
    patience = INFO.config.serve.heartbeat_s
    one.look(hear(one, age_s=patience - 1))
    assert not lost(one)
    one.look(hear(one, age_s=patience + 1))
    assert "its engine has stood" in lost(one)[0]


def test_time_in_which_this_process_stood_still_does_not_count(one: Attached):
    now = hear(one)
    one.forgive(60.0)
    one.look(now + 60.3)
    assert not lost(one)


def test_a_replica_that_reads_nothing_is_given_up(one: Attached):
    for rid in range(4):
        one.send(link.ToReplica(cancel=link.Cancel(rid=rid)))
    assert lost(one) == ["it reads nothing"]
    one.send(link.ToReplica())
    assert port.unsent(one) == 4  # without a stream, messages go nowhere


def test_a_view_follows_the_messages(one: Attached):
    adapters = [link.Residency(key="x@1", tier="HBM", rank=8), link.Residency(key="y@1", tier="DISK", rank=4)]
    hear(one, running=2, waiting=1, free_blocks=5, blocks=9, steps=1, adapters=adapters)
    before = one.view()
    hear(one, running=1, draining=True, steps=3, adapters=[link.Residency(key="y@1")])
    after = one.view()
    assert (before.running, before.waiting, before.free_blocks, before.health) == (2, 1, 5, "up")
    assert before.tiers == {"x@1": "HBM", "y@1": "DISK"} and before.ranks == {"x@1": 8, "y@1": 4}
    assert after.tiers == {"x@1": "HBM"} and after.health == "draining" and after.step_s > 0
