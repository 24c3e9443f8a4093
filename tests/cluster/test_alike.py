"""Replicas of one service serve one model: no answer goes on with another, and what most of them serve is used."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from jlora.cluster.alike import RECENT_S, Alike
from jlora.cluster.attach import Attached, Terms
from jlora.cluster.requests import Broken
from jlora.errors import WeightsGone
from jlora.replica import ReplicaInfo
from tests.cluster._links import INFO, Service, answer, request, service, submit, wait_for
from tests.cluster.test_router import whole
from tests.cluster.test_weights import InOrder

ONE, OTHER = (replace(INFO, base=letter * 64) for letter in "ab")
ASKED = request("begun", max_tokens=300)


def used(made: Service) -> set[str]:
    return {one.name for one in made.router.replicas}


def refused(made: Service, name: str, info: ReplicaInfo) -> None:
    """A replica joins, and is refused."""
    replica = made.add(name, info=info)
    made.place(*made.replicas)
    wait_for(lambda: len(replica.epochs) >= 2)


def test_an_answer_ends_when_all_replicas_serve_another_model_and_a_request_without_tokens_is_answered():
    with service(1, info=ONE) as made:
        refused(made, "r1", OTHER)
        begun = submit(made, ASKED)
        wait_for(lambda: len(begun.tokens()) > 5)
        made.replicas[0].paused = True
        waits = submit(made, request("waits", max_tokens=5))
        wait_for(lambda: len(made.replicas[0].running) == 2)
        made.kill(made.replicas[0])
        begun.wait()
        assert isinstance(begun.last.error, WeightsGone) and "the model has changed" in str(begun.last.error)
        assert begun.tokens() == answer(ASKED)[: len(begun.tokens())]
        whole(waits, request("waits", max_tokens=5), made)
        assert used(made) == {"r1"} and len(made.replicas[1].started) == 1


def test_an_answer_passes_a_replica_of_another_model_for_one_that_may_serve_its_own():
    """A replica without a fingerprint goes with both."""
    with service(1, info=ONE, policy=InOrder()) as made:
        first = made.replicas[0]
        unknown = [made.add(name, info=INFO) for name in ("r2", "r3")]
        made.place(*made.replicas)
        wait_for(lambda: len(made.router.replicas) == 3)
        refused(made, "r1", OTHER)  # which the policy prefers
        client = submit(made, ASKED)
        wait_for(lambda: len(client.tokens()) > 5)
        for replica in unknown:
            replica.paused = True
        made.kill(first)
        wait_for(lambda: unknown[0].running and used(made) == {"r1", "r2", "r3"})
        unknown[1].paused = False
        made.kill(unknown[0])
        client.wait()
        assert client.tokens() == answer(ASKED) and client.last.error is None
        assert not made.replicas[-1].started


def test_the_model_of_most_replicas_is_used_whichever_comes_first(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "jlora")
    with service(1, info=OTHER) as made:
        most = [made.add(f"r{i}", info=ONE) for i in (1, 2, 3)]
        made.place(*made.replicas)
        wait_for(lambda: used(made) == {"r1", "r2", "r3"})
        whole(submit(made, request()), request(), made)
        assert not made.replicas[0].started and any(one.started for one in most)
        assert made.router.info.base == ONE.base
    (said,) = [line for line in caplog.messages if "serve another model than it does" in line]
    assert "r0 at" in said and f"weights '{'b' * 12}', not '{'a' * 12}'" in said


def test_replicas_in_use_make_no_room_while_a_request_is_under_way():
    with service(1, info=OTHER) as made:
        made.replicas[0].paused = True
        client = submit(made, request("live", max_tokens=20))
        for name in ("r1", "r2"):
            refused(made, name, ONE)
        wait_for(lambda: all(len(replica.epochs) > 3 for replica in made.replicas[1:]))
        assert used(made) == {"r0"}
        made.replicas[0].paused = False
        whole(client, request("live", max_tokens=20), made)
        wait_for(lambda: used(made) == {"r1", "r2"})


def test_a_refused_replica_is_named_once_and_never_lost(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "jlora")
    with service(1, info=ONE) as made:
        made.add("r1", info=OTHER)
        made.place(*made.replicas)
        wait_for(lambda: len(made.replicas[1].epochs) > 3)
        lost = [line for line in caplog.messages if "is lost" in line]
        named = [line for line in caplog.messages if "cannot be used" in line]
    assert not lost and len(named) == 1
    assert f"weights '{'b' * 12}', not '{'a' * 12}'" in named[0]


def test_replicas_that_were_refused_and_went_away_do_not_count():
    now = 100.0
    alike = Alike(lambda: now)
    old, new, newer = (_attached(name, info) for name, info in (("r0", ONE), ("r1", OTHER), ("r2", OTHER)))
    with pytest.raises(Broken, match="it does not serve what the others do"):
        alike.check(new, [old], idle=True)
    with pytest.raises(Broken):  # it is one, however often it asks
        alike.check(new, [old], idle=True)
    now += RECENT_S + 1
    with pytest.raises(Broken):
        alike.check(newer, [old], idle=True)
    assert list(alike.check(new, [old], idle=True)) == ["r0"]


def test_replicas_that_a_router_has_lost_may_come_back_before_another_model_begins(caplog: pytest.LogCaptureFixture):
    now = 100.0
    alike = Alike(lambda: now)
    old, new = _attached("r0", ONE), _attached("r1", OTHER)
    assert alike.check(old, [], idle=True) == {}
    with pytest.raises(Broken):
        alike.check(new, [old], idle=False)
    for _ in range(2):
        alike.lost(old)
        with pytest.raises(Broken, match=f"are lost, and it does not serve what they did: weights '{'b' * 12}'"):
            alike.check(new, [], idle=True)
        now += RECENT_S - 1
        assert alike.check(old, [], idle=True) == {}, "the wait begins anew with the next loss"
    alike.lost(old)
    with pytest.raises(Broken):
        alike.check(new, [], idle=True)
    now += RECENT_S
    assert not caplog.messages
    assert alike.check(new, [], idle=True) == {}
    assert "the service changes its model" in caplog.text and "keeps that" in caplog.text
    alike.lost(new)
    with pytest.raises(Broken, match=f"not '{'b' * 12}'"):
        alike.check(old, [], idle=True)


def test_nobody_waits_for_a_replica_that_has_drained(monkeypatch: pytest.MonkeyPatch):
    alike = Alike(lambda: 100.0)
    old, new = _attached("r0", ONE), _attached("r1", OTHER)
    assert alike.check(old, [], idle=True) == {}
    monkeypatch.setattr(Attached, "draining", True)
    alike.lost(old)
    assert alike.check(new, [], idle=True) == {}


def _attached(name: str, info: ReplicaInfo) -> Attached:
    nobody: Any = None
    made = Attached(name, "127.0.0.1:1", Terms("router"), nobody)
    made.info = info
    return made
