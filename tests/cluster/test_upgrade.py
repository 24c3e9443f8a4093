"""Two versions of jlora in one service: what differs by new fields works together, another protocol is refused."""

from __future__ import annotations

import logging

import pytest

from tests.cluster._links import request, service, submit, wait_for
from tests.cluster.test_link import NEWER
from tests.cluster.test_router import whole


def test_replicas_of_another_protocol_are_refused_once_and_the_others_serve(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "jlora")
    with service(1) as made:
        others = [made.add("r8", protocol=0), made.add("r9", protocol=2)]
        made.place(*made.replicas)
        wait_for(lambda: all(len(one.epochs) > 2 for one in others))  # it was tried again
        assert [one.name for one in made.router.replicas] == ["r0"]
        whole(submit(made, request()), request(), made)
    said = sorted(record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage())
    assert [line.partition(": ")[2] for line in said] == [
        "hello: replica r8 speaks protocol 0 of the link, and this side 1: upgrade replica r8",
        "hello: replica r9 speaks protocol 2 of the link, and this side 1: upgrade this side",
    ]


def test_a_rolling_upgrade_moves_requests_between_old_and_new_replicas():
    with service(1) as made:
        old = made.replicas[0]
        client = submit(made, request(max_tokens=200))
        wait_for(client.tokens)
        new = made.add("r1", newer=NEWER)
        made.place(old, new)
        wait_for(lambda: len(made.router.replicas) == 2)
        old.draining = True
        wait_for(lambda: new.started)
        whole(client, request(max_tokens=200), made)
