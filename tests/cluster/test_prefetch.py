"""A prefetch at a router hints the replica that gets the request afterwards, and no request goes elsewhere for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.cluster.routing.costs import RankCosts
from jlora.cluster.routing.jlora import Jlora
from jlora.cluster.routing.policy import Policy
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.routing.simple import RoundRobin
from tests.cluster import _port as port
from tests.cluster._links import INFO, Service, answer, request, service, submit, wait_for

COSTS = RankCosts(0.01, 0.0, 0.001, 0.0, 1e-5, padded=False)


def started(made: Service) -> list[int]:
    return [len(replica.started) for replica in made.replicas]


def hinted(made: Service) -> list[int]:
    return [len(replica.hinted) for replica in made.replicas]


def rest(made: Service) -> None:
    """Waits until nothing runs, and the router has been told so."""
    dispatcher = port.dispatcher(made.router)
    wait_for(lambda: not dispatcher.names and not any(seen.running for seen in dispatcher.books.view.values()))


@pytest.mark.parametrize("policy", [RoundRobin(), Jlora(COSTS, 1.0)], ids=lambda policy: type(policy).__name__)
def test_hints_and_requests_take_turns_as_requests_alone_do(policy: Policy):
    with service(2, policy=policy) as made:
        for i in range(4):
            asked = request(f"r{i}", max_tokens=2)
            assert made.router.prefetch(asked).result(20).resident_adapter
            submit(made, asked).wait()
            rest(made)
            assert hinted(made) == started(made) == [(i + 2) // 2, (i + 1) // 2]


def test_hints_that_no_request_follows_leave_a_session_where_it_is():
    with service(2, policy=SessionSticky()) as made:
        asked = request("first", session="s", max_tokens=2)
        submit(made, asked).wait()
        home = started(made)
        for replica in made.replicas:
            replica.paused = True
        busy = [submit(made, request(f"busy{i}", session="s")) for i in range(5)]
        made.router.prefetch(replace(asked, id="hint")).result(20)
        assert hinted(made) == home[::-1], "its home has far more to do"
        for i, client in enumerate(busy):
            made.router.abort_named(f"busy{i}")
            client.wait()
        for replica in made.replicas:
            replica.paused = False
        rest(made)
        submit(made, replace(asked, id="second")).wait()
        assert started(made) == [6 * count + count for count in home]


def test_a_hint_goes_where_the_prompt_is_cached():
    with service(2, policy=SessionSticky()) as made:
        first, holder = made.replicas
        first.draining = True
        books = port.dispatcher(made.router).books
        wait_for(lambda: books.view[first.name].health == "draining")
        asked = replace(request("asked", max_tokens=2), prompt=tuple(range(4 * INFO.block_tokens)))
        assert submit(made, asked).wait().tokens() == answer(asked)
        first.draining = False
        wait_for(lambda: books.view[first.name].health == "up")
        made.router.prefetch(replace(asked, id="again")).result(20)
        assert (first.hinted, holder.hinted) == ([], ["again"])
