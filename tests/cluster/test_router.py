"""A router over scripted replicas that die, hang, double, refuse, drain and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jlora.cluster.attach import PAUSES_S, Terms
from jlora.cluster.directory import Version
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.requests import MOST_LOSSES, Broken
from jlora.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound, QueueFull, Unavailable
from jlora.serve.client import Login
from tests.cluster import _port as port
from tests.cluster._links import INFO, Client, Service, answer, request, service, submit, wait_for


@pytest.fixture
def two() -> Iterator[Service]:
    with service(2) as made:
        yield made


def whole(client: Client, asked, service: Service) -> None:
    """Every token exactly once, one end for each completion, and nothing left behind."""
    client.wait()
    for index in range(asked.sampling.n):
        assert client.tokens(index) == answer(asked, index)
        ends = [e for e in client.events if e.index == index and e.finish_reason]
        assert [e.finish_reason for e in ends] == ["length"]
        usage = ends[0].usage
        assert usage is not None and usage.completion_tokens == asked.sampling.max_tokens
    assert not port.dispatcher(service.router).names and len(port.dispatcher(service.router).table) == 0


def test_requests_are_spread_and_answered(two: Service):
    asked = [request(f"r{i}", seed=i, n=1 + i % 3) for i in range(12)]
    clients = [submit(two, one) for one in asked]
    for client, one in zip(clients, asked, strict=True):
        whole(client, one, two) if one is asked[-1] else client.wait()
        assert client.tokens(0) == answer(one, 0)
    assert {len(replica.started) for replica in two.replicas} == {6}


def test_the_router_draws_a_seed_before_the_first_send(two: Service):
    client = Client()
    asked = request(max_tokens=3, seed=None)
    two.router.submit(asked, client).result(20)
    client.wait()
    seeds = {s.request.sampling.seed for r in two.replicas for s in r.started}
    assert len(seeds) == 1 and seeds != {0}


def test_a_killed_replicas_requests_go_on_elsewhere(two: Service):
    asked = [request(f"r{i}", max_tokens=100, n=2, seed=i) for i in range(6)]
    clients = [submit(two, one) for one in asked]
    wait_for(lambda: all(len(c.tokens()) > 5 for c in clients))
    two.kill(two.replicas[0])
    for client, one in zip(clients, asked, strict=True):
        client.wait()
        assert [client.tokens(i) for i in range(2)] == [answer(one, i) for i in range(2)]
    resumed = [s for s in two.replicas[1].started if s.done]
    assert len(resumed) == 3 and all(len(s.done) == 2 and s.done[0].tokens for s in resumed)
    assert port.dispatcher(two.router).books.view["r0"].health in ("down", "suspect")


def test_a_hung_replica_is_suspected_and_taken_back_with_a_larger_epoch(two: Service):
    asked = request(max_tokens=400)
    client = submit(two, asked)
    busy = next(r for r in two.replicas if r.started)
    wait_for(lambda: len(client.tokens()) > 5)
    busy.hung = True
    whole(client, asked, two)
    busy.hung = False
    wait_for(lambda: len(two.router.replicas) == 2)
    assert len(busy.epochs) == 2 and busy.epochs[0] < busy.epochs[1]


def test_an_engine_that_stands_is_suspected_though_its_process_speaks(two: Service):
    asked = request(max_tokens=400)
    client = submit(two, asked)
    busy = next(r for r in two.replicas if r.started)
    busy.paused, busy.age_s = True, 1e6
    whole(client, asked, two)


def test_doubled_tokens_arrive_once():
    with service(1, double=True) as one:
        asked = request(n=3, max_tokens=40)
        whole(submit(one, asked), asked, one)


def test_every_death_and_doubling_at_once_loses_and_doubles_nothing():
    with service(3, double=True) as three:
        asked = [request(f"r{i}", max_tokens=60, n=1 + i % 2, seed=i) for i in range(9)]
        for after, replica in zip((40, 90, 150), three.replicas, strict=True):
            replica.dies_after = after
        clients = [submit(three, one) for one in asked]
        wait_for(lambda: sum(r.dies_after == 0 for r in three.replicas) >= 2)
        for replica in three.replicas:
            replica.dies_after = -1
        for client, one in zip(clients, asked, strict=True):
            client.wait()
            assert [client.tokens(i) for i in range(one.sampling.n)] == [answer(one, i) for i in range(one.sampling.n)]


def test_a_request_that_a_replica_gives_up_goes_elsewhere(two: Service):
    for replica in two.replicas:
        replica.refuse = [(Unavailable("drains"), True)]
    asked = request(max_tokens=5)
    whole(submit(two, asked), asked, two)
    assert sum(len(r.started) for r in two.replicas) == 3


def test_a_refusal_is_the_submissions_error(two: Service):
    for replica in two.replicas:
        replica.refuse = [(InvalidArgument("min_tokens = 5: too many"), False)]
    with pytest.raises(InvalidArgument, match="min_tokens"):
        submit(two, request())
    assert not port.dispatcher(two.router).names


def test_a_failure_under_way_reaches_the_client(two: Service):
    for replica in two.replicas:
        replica.tells, replica.paused = True, True
    client, asked = submit(two, request()), []
    for _ in two.replicas:  # the second one is asked whether it has what the first one lacks
        wait_for(lambda: any(r.started and r not in asked for r in two.replicas))
        asked.append(next(r for r in two.replicas if r.started and r not in asked))
        two.loop.loop.call_soon_threadsafe(fail, two, asked[-1])
    error = client.wait().last.error
    assert isinstance(error, DataLoss) and client.last.finish_reason == "abort"


def fail(service: Service, replica) -> None:
    from jlora.cluster import wire

    message = link.FromReplica(failures=[wire.failure(replica.started[0].rid, DataLoss("the file is damaged"))])
    dispatcher = port.dispatcher(service.router)
    dispatcher.received(dispatcher.links[replica.name], message)


def test_a_request_that_kills_replicas_is_given_up(two: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jlora.cluster.requests.AGAIN_S", (0.01, 0.02))
    for replica in two.replicas:
        replica.refuse = [(Unavailable("a step has failed"), True)] * MOST_LOSSES
    with pytest.raises(Unavailable, match="failed often") as e:
        submit(two, request())
    assert not any(name in str(e.value) for name in ("r0", "r1", "127.0.0.1")), "clients know one service"
    assert sum(len(r.started) for r in two.replicas) == MOST_LOSSES
    good = request("good", max_tokens=3)
    for replica in two.replicas:
        replica.refuse = []
    whole(submit(two, good), good, two)


def test_a_full_replica_is_asked_again(two: Service):
    for replica in two.replicas:
        replica.refuse = [(QueueFull("queue is full"), False)] * 2
    asked = request(max_tokens=5)
    whole(submit(two, asked), asked, two)


def test_without_a_replica_requests_wait_until_one_comes(two: Service):
    for replica in two.replicas:
        two.kill(replica)
    wait_for(lambda: not two.router.replicas)
    asked, client = request(max_tokens=20), Client()
    submitted = two.router.submit(asked, client)
    late = two.add("r9")
    two.place(late)
    submitted.result(20)
    whole(client, asked, two)
    assert len(late.started) == 1


def test_without_a_replica_the_deadline_ends_a_request(two: Service):
    for replica in two.replicas:
        two.kill(replica)
    wait_for(lambda: not two.router.replicas)
    with pytest.raises(Unavailable, match="no replica"):
        submit(two, request(deadline=time.monotonic() + 0.1))
    wait_for(lambda: two.router.heartbeat_age() > 0.2)
    assert not two.router.failure.done()


def test_a_replica_with_a_new_address_is_followed(two: Service):
    asked = request(max_tokens=200)
    client = submit(two, asked)
    wait_for(lambda: len(client.tokens()) > 3)
    new = [two.add("r0"), two.add("r1")]
    two.place(*new)
    whole(client, asked, two)
    assert sum(len(r.started) for r in new) >= 1


def test_abort_by_handle_and_by_name_end_the_request_everywhere(two: Service):
    clients = [Client(), Client()]
    handle = two.router.submit(request("a", max_tokens=4000), clients[0]).result(20)
    two.router.submit(request("b", max_tokens=4000, tenant="t"), clients[1]).result(20)
    assert two.router.abort(handle).result(20)
    assert two.router.abort_named("b", "t").result(20)
    for client in clients:
        last = client.wait().last
        assert last.finish_reason == "abort" and last.error is None and last.usage is not None
    assert not two.router.abort(handle).result(20) and not two.router.abort_named("b", "t").result(20)
    wait_for(lambda: sum(len(r.cancelled) for r in two.replicas) == 2)
    assert not port.dispatcher(two.router).names


def test_a_caller_that_goes_before_its_answer_ends_its_request(two: Service):
    for replica in two.replicas:
        replica.tells, replica.paused = False, True
    submitted = two.router.submit(request(), Client())
    wait_for(lambda: any(r.started for r in two.replicas))
    assert submitted.cancel()
    wait_for(lambda: any(r.cancelled for r in two.replicas) and not port.dispatcher(two.router).names)


def test_an_id_in_use_is_refused_and_free_again_at_the_end(two: Service):
    client = submit(two, request(max_tokens=4000))
    with pytest.raises(AlreadyExists, match="request_id"):
        submit(two, request())
    other = request(max_tokens=2, tenant="other")
    submit(two, other).wait()
    two.router.abort_named("r").result(20)
    client.wait()
    again = request(max_tokens=2)
    whole(submit(two, again), again, two)


def room_of(two: Service) -> int:
    """Completions that the service holds, once both replicas are up."""
    room = 2 * (64 + 8)
    wait_for(lambda: (engine := two.router.info.config.engine).max_queue + engine.max_seqs == room)
    return room


def test_the_queue_is_bounded(two: Service):
    for replica in two.replicas:
        replica.paused = True
    room = room_of(two)
    clients = [submit(two, request(f"r{i}", n=12)) for i in range(room // 12)]
    with pytest.raises(QueueFull, match="queue is full"):
        submit(two, request("more"))
    for i, client in enumerate(clients):
        two.router.abort_named(f"r{i}")
        client.wait()


def test_a_stop_string_ends_a_completion_also_if_its_replica_dies(two: Service):
    for replica in two.replicas:
        replica.paused = False
    asked, client = request(max_tokens=4000, n=2), Client(n=2)
    handle = two.router.submit(asked, client).result(20)
    busy = next(r for r in two.replicas if r.started)
    wait_for(lambda: len(client.tokens(0)) > 6 and len(client.tokens(1)) > 6)
    two.router.stop(handle, 0, 5).result(20)
    wait_for(lambda: any(e.finish_reason == "stop" for e in client.events))
    busy.hung = True  # it never hears of the second stop
    two.router.stop(handle, 1, 6).result(20)
    ends = {e.index: e for e in client.wait().events if e.finish_reason}
    assert [ends[i].finish_reason for i in range(2)] == ["stop", "stop"]
    assert [e.usage.completion_tokens for e in (ends[0], ends[1]) if e.usage] == [5, 6]


def test_a_sink_that_raises_loses_its_own_request_only(two: Service):
    def broken(events: list) -> None:
        raise SystemError("a receiver's bug")

    two.router.submit(request("broken", max_tokens=4000), broken).result(20)
    asked = request("good")
    client = submit(two, asked)
    client.wait()
    assert client.tokens() == answer(asked)
    wait_for(lambda: not port.dispatcher(two.router).names)
    wait_for(lambda: any(r.cancelled for r in two.replicas))


def test_an_adapters_version_is_fixed_at_the_first_attempt(two: Service):
    two.directory.versions["x"] = Version("x", 1, "/x1", "abc")
    asked = request(max_tokens=300, adapter="x")
    client = submit(two, asked)
    wait_for(lambda: len(client.tokens()) > 3)
    two.directory.versions["x"] = Version("x", 2, "/x2")
    two.kill(next(r for r in two.replicas if r.started))
    whole(client, asked, two)
    sent = [s.adapter for r in two.replicas for s in r.started]
    assert [(a.key, a.path, a.digest) for a in sent] == [("x@1", "/x1", "abc")] * 2
    assert two.directory.uses == {"x@1": 0}
    with pytest.raises(NotFound, match="did you mean 'x'"):
        submit(two, request(adapter="y"))
    with pytest.raises(NotFound):
        two.router.check(request(adapter="y")).result(20)


def test_a_prompt_that_does_not_invoke_its_activated_lora_is_refused_at_once(two: Service):
    two.directory.versions["a"] = Version("a", 1, "/a", alora_invocation_tokens=(2, 3))
    submit(two, request(adapter="a", max_tokens=2)).wait()
    two.directory.versions["a"] = Version("a", 1, "/a", alora_invocation_tokens=(9, 3))
    with pytest.raises(InvalidArgument, match="alora_invocation_tokens"):
        submit(two, request(adapter="a"))


def test_state_sums_the_replicas_and_names_them(two: Service):
    submit(two, request(max_tokens=5)).wait()
    state = two.router.state().result(20)
    assert state.cache.hbm.total == 200 and state.cache.kv_hit_tokens == 10 and state.cache.policy == "jlora"
    assert state.stats.steps == sum(r.steps for r in two.replicas) and state.stats.host_step_s == 0.5
    assert state.longest_gap_s == 0.1
    assert [(m.name, m.health, m.blocks) for m in state.members] == [("r0", "up", 100), ("r1", "up", 100)]
    assert two.router.flush_cache().result(20) == 14
    assert two.router.profile(3).result(20).name == "r0:trace, r1:trace"
    assert two.router.profile(3, "r1").result(20).name == "r1:trace"
    with pytest.raises(NotFound, match="replica = 'r9': attached are r0, r1"):
        two.router.profile(3, "r9").result(20)
    two.kill(two.replicas[0])
    wait_for(lambda: len(two.router.replicas) == 1)
    assert two.router.state().result(20).cache.hbm.total == 100


def test_a_replica_of_another_model_is_not_used(two: Service):
    other = two.add("r2", info=replace(INFO, model="other"))
    two.place(*two.replicas)
    wait_for(lambda: len(other.epochs) >= 2)
    wait_for(lambda: {one.name for one in two.router.replicas} == {"r0", "r1"})  # between two attempts
    assert two.router.info.model == "base"
    asked = [request(f"r{i}", max_tokens=3) for i in range(6)]
    for client in [submit(two, one) for one in asked]:
        client.wait()
    assert not other.started


def test_drain_waits_for_the_table_and_refuses_new_requests(two: Service):
    client = submit(two, request(max_tokens=4000))
    assert two.router.drain(0.05).result(20) is False
    drained = two.router.drain()
    with pytest.raises(Unavailable, match="draining"):
        submit(two, request("more"))
    two.router.abort_named("r")
    assert drained.result(20) is True and client.wait()


def test_closing_ends_what_runs():
    with service(1) as one:
        client = submit(one, request(max_tokens=4000))
        one.router.close()
        assert isinstance(client.wait().last.error, Unavailable)
        one.router.close()


def test_two_routers_share_a_replica_and_keep_their_own_requests():
    with service(1) as one, service(0) as other:
        other.place(one.replicas[0])
        wait_for(lambda: other.router.replicas)
        # The double keeps one table for each stream, as a replica does for each router.
        asked = [request(max_tokens=30, seed=1), request(max_tokens=30, seed=2)]
        clients = [submit(one, asked[0]), submit(other, asked[1])]
        for client, mine in zip(clients, asked, strict=True):
            client.wait()
            assert client.tokens() == answer(mine)


def test_the_clusters_token_is_shown():
    with service(1, Terms("router", Login("secret"))) as one:
        assert ("authorization", "Bearer secret") in one.replicas[0].metadata


def test_one_batch_for_each_request_and_message(two: Service):
    client = submit(two, request(n=4, max_tokens=10))
    client.n = 4
    client.wait()
    assert set(client.batches) == {4} and len(client.batches) == 10


def test_a_token_that_breaks_the_protocol_takes_none_of_the_others(two: Service):
    for replica in two.replicas:
        replica.paused = True
    asked = [request(f"r{i}", seed=i) for i in range(4)]
    clients = [submit(two, one) for one in asked]
    starts = {s.request.sampling.seed: s.rid for s in two.replicas[0].started}
    seeds = list(starts)  # two requests at the same replica
    good = [link.Token(rid=starts[seeds[0]], position=0, id=answer(asked[seeds[0]])[0])]
    bad = [link.Token(rid=starts[seeds[1]], position=7, id=1)]

    async def hear() -> None:
        dispatcher = port.dispatcher(two.router)
        with pytest.raises(Broken):
            dispatcher.received(dispatcher.links["r0"], link.FromReplica(tokens=good + bad))

    two.loop.run(hear())
    assert clients[seeds[0]].tokens() == answer(asked[seeds[0]])[:1]
    two.kill(two.replicas[0])
    two.replicas[1].paused = False
    for client, one in zip(clients, asked, strict=True):
        assert client.wait().tokens() == answer(one)


def test_a_replica_that_leaves_while_it_is_down_leaves_nothing_behind(two: Service):
    two.kill(two.replicas[0])
    wait_for(lambda: len(two.router.replicas) == 1)
    two.place(two.replicas[1])
    books = port.dispatcher(two.router).books
    wait_for(lambda: set(books.view) == {"r1"})
    assert port.booked(books) == {"r1"}


def test_a_link_that_ends_under_a_question_costs_its_own_answer_alone(two: Service):
    hangs = two.replicas[0]
    hangs.answers = False
    asked = two.router.state()
    wait_for(lambda: hangs.asked)
    hangs.hung = True  # the link is given up, and its channel with the question
    assert asked.result(20).cache.hbm.total == 100


def test_a_replica_that_is_never_of_use_is_asked_ever_less_often(two: Service):
    other = two.add("r2", info=replace(INFO, model="other"))
    two.place(*two.replicas)
    wait_for(lambda: len(other.epochs) >= 3)
    assert port.pause_s(port.dispatcher(two.router).links["r2"]) >= 4 * PAUSES_S[0]


def test_a_request_that_has_begun_waits_for_room_however_often_it_is_refused(
    two: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jlora.cluster.requests.AGAIN_S", (0.01, 0.02))
    asked = request(max_tokens=400)
    client = submit(two, asked)
    busy = next(r for r in two.replicas if r.started)
    other = next(r for r in two.replicas if r is not busy)
    other.refuse = [(QueueFull("queue is full"), False)] * (MOST_LOSSES + 1)
    wait_for(lambda: len(client.tokens()) > 5)
    two.kill(busy)
    whole(client, asked, two)
    assert len(other.started) == MOST_LOSSES + 2


def test_a_replica_gets_no_more_than_it_holds_and_the_rest_waits_here(two: Service, monkeypatch: pytest.MonkeyPatch):
    room = room_of(two) // 2
    for replica in two.replicas:
        replica.paused = True
    asked = [request(f"r{i}", max_tokens=2) for i in range(2 * room)]
    clients = [submit(two, one) for one in asked]
    two.kill(two.replicas[1])
    dispatcher = port.dispatcher(two.router)
    wait_for(lambda: dispatcher.books.view["r1"].health != "up")
    wait_for(lambda: len(two.replicas[0].started) == room == len(dispatcher.table.waiting()))
    calls = []
    choose, dispatcher.choice.policy.choose = dispatcher.choice.policy.choose, lambda *a: calls.append(a) or choose(*a)
    ticks = port.ticks(monkeypatch)
    wait_for(lambda: ticks[0] > 4)
    assert len(calls) <= 20  # not one for each that waits
    two.replicas[0].paused = False
    for client in clients:
        client.wait()


def test_a_replica_that_fails_at_once_is_not_asked_at_once_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jlora.cluster.requests.AGAIN_S", (3600.0, 3600.0))
    with service(1) as one:
        failed, dispatcher, client = one.replicas[0], port.dispatcher(one.router), Client()
        failed.refuse = [(Unavailable("the engine has failed"), True)] * (MOST_LOSSES + 1)
        one.router.submit(request(), client)
        wait_for(lambda: len(failed.started) == 2 and dispatcher.table.waiting())
        ticks = port.ticks(monkeypatch)
        wait_for(lambda: ticks[0] > 4)
        assert len(failed.started) == 2 and len(dispatcher.table) == 1
        one.router.abort_named("r")
        client.wait()


def test_a_version_that_is_replaced_before_it_is_in_use_is_not_used(two: Service):
    old, new = Version("a", 1, "/old"), Version("a", 2, "/new")
    two.directory.versions["a"] = old
    begin = two.directory.begin

    def replaced(version: Version) -> None:
        two.directory.versions["a"] = new  # on the controller's thread, and the old one has been dropped
        begin(version)

    two.directory.begin = replaced
    submit(two, request(max_tokens=2, adapter="a")).wait()
    assert two.directory.uses == {"a@1": 0, "a@2": 0}
    assert [s.adapter.key for r in two.replicas for s in r.started] == ["a@2"]
