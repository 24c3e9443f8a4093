"""An answer goes on with the weights of its first token: at whichever replica has them, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jlora.cluster.directory import Version
from jlora.cluster.routing.policy import Ask, Bookless, up
from jlora.cluster.view import View
from jlora.errors import WeightsGone
from tests.cluster import _port as port
from tests.cluster._links import Client, Service, answer, request, service, submit, wait_for

ASKED = request(max_tokens=100, adapter="x")


class InOrder(Bookless):
    """Sends everything to the first replica by name."""

    def choose(self, view: View, ask: Ask) -> str | None:
        return min((replica.name for replica in up(view)), default=None)


@contextmanager
def moved(digests: str, holds: str) -> Iterator[tuple[Service, Client]]:
    """An answer that began at the first of some replicas, which is killed.

    Args:
        digests: of the weights of each, a letter; holds: "y" for each that has the adapter in memory.
    """
    with service(len(digests), policy=InOrder()) as made:
        made.directory.versions["x"] = Version("x", 1, "/x")
        for replica, digest, has in zip(made.replicas, digests, holds, strict=True):
            replica.digest, replica.holds = digest, ["x@1"] * (has == "y")
        books = port.dispatcher(made.router).books
        wait_for(lambda: sum("x@1" in seen.tiers for seen in books.view.values()) == holds.count("y"))
        client = submit(made, ASKED)
        wait_for(lambda: len(client.tokens()) > 5)
        made.kill(made.replicas[0])
        yield made, client


def tried(made: Service) -> list[int]:
    return [len(replica.started) for replica in made.replicas]


def test_it_goes_past_replicas_with_other_weights_to_one_that_has_its_own():
    with moved("abca", "yyyy") as (made, client):
        client.wait()
        assert client.tokens() == answer(ASKED, 0) and client.last.error is None
        assert tried(made) == [1, 1, 1, 1]
        for replica in made.replicas[1:3]:
            wait_for(lambda replica=replica: bool(replica.cancelled))


@pytest.mark.parametrize(
    ("digests", "holds", "starts"),
    [
        ("abc", "yyy", [1, 1, 1]),  # all have others
        ("aba", "yyn", [1, 1, 0]),  # the last one would have to read the files, which have changed
    ],
)
def test_it_ends_when_no_other_replica_has_its_weights_in_memory(digests: str, holds: str, starts: list[int]):
    with moved(digests, holds) as (made, client):
        client.wait()
        assert isinstance(client.last.error, WeightsGone)
        assert "the files of adapter 'x' have changed" in str(client.last.error)
        assert client.tokens() == answer(ASKED, 0)[: len(client.tokens())]
        assert tried(made) == starts


def test_it_ends_when_the_last_replica_with_its_weights_is_lost_too():
    with moved("aba", "yyy") as (made, client):
        last = made.replicas[2]
        wait_for(lambda: last.running)
        last.paused = True
        made.kill(last)
        client.wait()
        assert isinstance(client.last.error, WeightsGone) and tried(made) == [1, 1, 1]
        assert not made.directory.uses["x@1"]
