"""Requests of scripted replicas that drain."""

from __future__ import annotations

from jlora.cluster.requests import MOST_LOSSES
from tests.cluster import _port as port
from tests.cluster._links import request, service, submit, wait_for
from tests.cluster.test_router import whole


def test_a_draining_replicas_requests_move_and_new_ones_avoid_it():
    with service(2) as two:
        asked = request(max_tokens=300)
        client = submit(two, asked)
        busy = next(r for r in two.replicas if r.started)
        other = next(r for r in two.replicas if r is not busy)
        wait_for(lambda: len(client.tokens()) > 5)
        busy.draining = True
        wait_for(lambda: other.started)
        assert {member.name: member.draining for member in port.dispatcher(two.router).members()} == {
            busy.name: True,
            other.name: False,
        }
        whole(client, asked, two)
        assert busy.cancelled and other.started[0].done
        more = request("more", max_tokens=5)
        whole(submit(two, more), more, two)
        assert len(busy.started) == 1


def test_a_request_outlives_any_number_of_drains():
    with service(2, paused=True) as made:
        asked = request(max_tokens=5)
        client = submit(made, asked)
        wait_for(lambda: any(replica.started for replica in made.replicas))
        at, other = sorted(made.replicas, key=lambda replica: len(replica.started), reverse=True)
        for _ in range(MOST_LOSSES + 1):
            before, other.draining, at.draining = len(other.started), False, True
            wait_for(lambda there=other, before=before: len(there.started) > before)
            at, other = other, at
        for replica in made.replicas:
            replica.paused = False
        whole(client, asked, made)
