"""A replica's end of a link, over real sockets, and requests that move from one replica to another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora import config
from jlora.cluster import link as module
from jlora.cluster import wire
from jlora.cluster.directory import Version
from jlora.cluster.fetches import PathsAlone
from jlora.cluster.link import IDLE_S
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.secret import Secret
from jlora.types import Done, Request, SamplingParams, TokenEvent
from tests.cluster._link import Linked, done_of, linked, outputs
from tests.engine._replica import Running
from tests.engine.test_engine import BASE, GREEDY, SEEDED, TABLES, running, serve, tokens

NEWER = b"\xa2\x1f\x03new"  # field 500, which nobody has yet
PROMPT = tuple(3 + i * 7 % 80 for i in range(21))
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def replicas(tiny_model: Path) -> Iterator[tuple[Running, Running]]:
    with running(tiny_model, {}) as one, running(tiny_model, {}) as other:
        yield one, other


@pytest.fixture(scope="module")
def links(replicas: tuple[Running, Running]) -> Iterator[tuple[Linked, Linked]]:
    with linked(replicas[0].replica) as one, linked(replicas[1].replica) as other:
        yield one, other


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tiny_adapters: dict[str, Path]) -> Iterator[Running]:
    """One engine that nobody disturbs."""
    with running(tiny_model, tiny_adapters, cache__prefix_reuse=False) as service:
        yield service


@pytest.fixture
def versions(tiny_adapters: dict[str, Path]) -> dict[str | None, Version | None]:
    return {None: None, **{name: Version(name, 3, str(path)) for name, path in tiny_adapters.items()}}


@pytest.mark.parametrize(
    "request_",
    [
        Request("greedy", PROMPT, GREEDY),
        Request("seeded", PROMPT, SEEDED, adapter="large"),
        Request("penalties", PROMPT, TABLES, adapter="middle"),
        Request("three", PROMPT, SamplingParams(seed=4, n=3, max_tokens=10, ignore_eos=True), adapter="small"),
    ],
    ids=lambda r: r.id,
)
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_request_goes_on_elsewhere_with_every_token_once(
    links: tuple[Linked, Linked], alone: Running, versions: dict, request_: Request, cut: int
):
    n, version = request_.sampling.n, versions[request_.adapter]
    whole = serve(alone, [request_])[request_.id]
    with links[0].attach(epoch=cut) as one, links[1].attach() as other:
        one.start(1, request_, version)
        one.until(lambda r: len(r.tokens(1)) >= n * cut or r.finished(1, n))
        seen = one.tokens(1)[: n * cut]  # the rest is lost with the link
        one.close()
        other.start(7, replace(request_, done=done_of(seen, request_)), version)
        rest = other.whole(7, sum(not done.ended for done in done_of(seen, request_)))
    for index in range(n):
        wanted = tokens([event for event in whole if event.index == index])
        assert outputs(seen + rest, index) == wanted
    last = {token.index: token for token in rest if token.finish_reason}
    assert all(token.usage.completion_tokens == request_.sampling.max_tokens for token in last.values())


def test_the_first_message_says_who_the_replica_is(links: tuple[Linked, Linked]):
    with links[0].attach() as router:
        first = router.until(lambda r: r.messages)[0]
        assert (first.hello.replica, first.hello.protocol) == ("one", wire.PROTOCOL)
        assert wire.info(first.hello.info) == links[0].backend.loaded.info


def test_an_idle_replica_goes_on_to_say_that_it_lives(links: tuple[Linked, Linked]):
    with links[0].attach() as router:
        router.until(lambda r: len(r.messages) > 4)
        states = [message.state for message in router.messages[1:]]
    numbers = [state.number for state in states]
    assert numbers == list(range(1, len(numbers) + 1))
    assert states[-1].blocks == 160 and states[-1].age_s < 60 and not states[-1].draining


class Heard(PathsAlone):
    """Keeps what a link tells it."""

    def __init__(self) -> None:
        self.peers: list[tuple[str, list[str]]] = []

    @property
    def rates(self) -> tuple[float, float]:
        return 2e9, 3e8

    def heard(self, version: link.Version) -> None:
        self.peers.append((version.key, list(version.peers)))


def test_a_replica_tells_how_fast_it_fetches(replicas: tuple[Running, Running]):
    with linked(replicas[0].replica, fetches=Heard()) as one, one.attach() as router:
        told = router.until(lambda r: r.messages[1:])[0].state
    assert (told.peer_bps, told.path_bps) == (2e9, 3e8)


def test_every_request_says_whom_its_adapter_comes_from_also_one_that_is_known(
    replicas: tuple[Running, Running], versions: dict
):
    heard, version = Heard(), replace(versions["small"], number=21)
    request = Request("r", PROMPT, GREEDY, adapter="small")
    with linked(replicas[0].replica, fetches=heard) as one, one.attach() as router:
        for rid in range(1, 4):
            router.send(start=wire.start(rid, request, version, [f"10.0.0.{rid}:1"]))
            router.whole(rid)
        router.send(fetch=wire.fetch(version, ["10.0.0.9:1"]))
        router.start(4, Request("r", PROMPT, GREEDY))
        router.whole(4)
    assert heard.peers == [("small@21", [f"10.0.0.{host}:1"]) for host in (1, 2, 3, 9)]


def test_a_replica_tells_how_many_programs_it_still_compiles(
    replicas: tuple[Running, Running], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(type(replicas[0].built.runner), "programs_left", 5)
    with linked(replicas[0].replica) as one, one.attach() as router:
        router.until(lambda r: any(message.state.programs_left == 5 for message in r.messages))


def test_a_step_is_one_message_and_begins_with_its_requests(links: tuple[Linked, Linked]):
    with links[0].attach() as router:
        for rid in range(1, 5):
            router.start(rid, Request("r", PROMPT, LONG))
        router.until(lambda r: all(r.finished(rid) for rid in range(1, 5)))
        with_tokens = [message for message in router.messages if message.tokens]
        begun = [rid for message in router.messages for rid in message.begun]
        steps = max(message.state.steps for message in router.messages)
    assert sorted(begun) == [1, 2, 3, 4]
    assert steps > 100
    counts = [Counter(token.rid for token in message.tokens) for message in with_tokens]
    all_run = counts[next(i for i, count in enumerate(counts) if len(count) == 4) :]
    ends = next(i for i, message in enumerate(with_tokens) if any(token.finish_reason for token in message.tokens))
    all_run = all_run[1 : ends - len(counts)]
    assert len(all_run) > 10
    assert [count for count in all_run if len(count) < 4 or len(set(count.values())) > 1] == []  # no step in parts


def test_an_idle_replica_speaks_every_tenth_of_a_second(links: tuple[Linked, Linked]):
    with links[0].attach() as router:
        router.until(lambda r: len(r.messages) > 1)
        began = time.monotonic()
        router.until(lambda r: len(r.messages) > 11)
        assert 9 * IDLE_S < time.monotonic() - began < 50 * IDLE_S, "no more often, and not much less"


@pytest.mark.parametrize("secret", [Secret(), Secret("another token of the tests")])
def test_a_link_needs_the_token(links: tuple[Linked, Linked], secret: Secret):
    with links[0].attach(secret=secret) as router:
        assert router.until_ended() is grpc.StatusCode.UNAUTHENTICATED
        assert not router.messages


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"router": ""}, "hello: router is empty"),
        ({"protocol": 0}, "router r speaks protocol 0 of the link, and this side 1: upgrade router r"),
        ({"protocol": 2}, "router r speaks protocol 2 of the link, and this side 1: upgrade this side"),
    ],
)
def test_a_hello_of_nobody_or_of_another_protocol_is_refused(
    links: tuple[Linked, Linked], hello: dict[str, Any], said: str
):
    with links[0].attach(**hello) as router:
        router.until_ended()
        assert said in router.said and not router.messages


def test_a_router_with_newer_fields_and_messages_is_welcome(links: tuple[Linked, Linked]):
    """Within one protocol, a side that is upgraded first says more than the other one knows."""
    with links[0].attach() as router:
        router.send()  # a message of a kind that is not known here
        start = wire.start(1, Request("r", PROMPT, GREEDY), None)
        router.send(start=link.Start.FromString(start.SerializeToString() + NEWER))
        assert len(router.whole(1)) == 12


def idle(linked: Linked) -> bool:
    stats = linked.backend.loaded.state().result(60).stats
    return stats.live_requests == 0


def test_a_new_epoch_ends_what_the_earlier_one_began(links: tuple[Linked, Linked]):
    with links[0].attach("x", 5) as early:
        early.start(1, Request("r", PROMPT, LONG))
        early.until(lambda r: r.tokens(1))
        with links[0].attach("x", 4) as stale:
            assert stale.until_ended() is grpc.StatusCode.FAILED_PRECONDITION
            assert "epoch = 4" in stale.said
        with links[0].attach("x", 6) as late, links[0].attach("y", 1) as other:
            assert early.until_ended() is grpc.StatusCode.OK
            late.start(1, Request("r", PROMPT, GREEDY))
            other.start(1, Request("r", PROMPT, GREEDY))
            assert outputs(late.whole(1)) == outputs(other.whole(1))
            late.until(lambda r: idle(links[0]))


def test_a_replica_says_that_it_lives_while_it_converts_long_prompts_and_takes_no_more_than_fit(
    links: tuple[Linked, Linked], monkeypatch: pytest.MonkeyPatch
):
    convert = wire.token

    def slow(rid: int, position: int, event: TokenEvent) -> link.Token:
        time.sleep(0.5 * (event.prompt_logprobs is not None))
        return convert(rid, position, event)

    monkeypatch.setattr(module, "SCORES", 4)
    monkeypatch.setattr(module, "MOST_SCORES", 4)
    monkeypatch.setattr(wire, "token", slow)
    request = Request("r", PROMPT, replace(GREEDY, prompt_logprobs=1))
    with links[0].attach() as router:
        for rid in (1, 2):
            router.start(rid, replace(request, id=f"r{rid}"))
        for rid in (1, 2):
            router.whole(rid)
        scored = [i for i, m in enumerate(router.messages) if any(t.prompt_logprobs for t in m.tokens)]
    assert len(scored) == 2  # each has a message of its own
    assert scored[1] - scored[0] >= 3  # and between them others say that the replica lives
    numbers = [message.state.number for message in router.messages[1:]]
    assert numbers == sorted(numbers), "a state never overtakes a later one"


def test_the_end_of_a_stream_ends_its_requests(links: tuple[Linked, Linked]):
    with links[0].attach("gone") as router, links[0].attach("stays") as other:
        router.start(1, Request("r", PROMPT, LONG))
        router.until(lambda r: r.tokens(1))
        router.close()
        other.until(lambda r: r.messages and idle(links[0]))


def test_cancel_and_stop_end_a_request_and_a_completion(links: tuple[Linked, Linked]):
    with links[0].attach() as router:
        router.start(1, Request("a", PROMPT, LONG))
        router.start(2, Request("a", PROMPT, replace(LONG, n=2)))
        router.until(lambda r: r.tokens(1) and len(r.tokens(2)) > 4)
        router.send(cancel=link.Cancel(rid=1))
        router.send(stop=link.Stop(rid=2, index=1, outputs=2))
        router.send(cancel=link.Cancel(rid=99))
        last = router.until(lambda r: [t for t in r.tokens(2) if t.index == 1 and t.finish_reason])[0]
        assert (last.finish_reason, last.usage.completion_tokens) == ("stop", 2)
        router.until(lambda r: r.finished(2, 2) and idle(links[0]))
        assert not router.finished(1) and len(router.tokens(1)) < 100


@pytest.mark.parametrize("at_once", [4, 1024])
def test_prompt_logprobs_come_once_with_the_first_token(
    links: tuple[Linked, Linked], monkeypatch: pytest.MonkeyPatch, at_once: int
):
    monkeypatch.setattr(module, "SCORES", at_once)  # more are converted on a thread
    request = Request("r", PROMPT, replace(GREEDY, prompt_logprobs=1))
    with links[0].attach() as router:
        router.start(1, request)
        got = router.whole(1)
        router.start(2, replace(request, done=done_of(got[:3], request)))
        rest = router.whole(2)
    assert [len(token.prompt_logprobs) for token in got] == [len(PROMPT)] + [0] * 11
    assert not any(token.prompt_logprobs for token in rest)
    assert [token.position for token in rest] == list(range(3, 12))
    assert outputs(got[:3] + rest) == outputs(got)


def test_a_bad_request_fails_alone(links: tuple[Linked, Linked]):
    with links[0].attach() as router:
        router.start(1, Request("a", (1000,), GREEDY))
        router.start(2, Request("a", PROMPT, GREEDY, adapter="x"), Version("x", 1, "/nowhere"))
        router.start(3, Request("a", PROMPT, GREEDY))
        assert len(router.whole(3)) == 12
        router.until(lambda r: r.failures(1) and r.failures(2))
        one, two = router.failures(1)[0], router.failures(2)[0]
        assert (one.kind, one.elsewhere) == ("InvalidArgument", False) and "prompt[0] = 1000" in one.message
        assert not two.elsewhere and "'nowhere'" in two.message


def test_an_adapter_that_is_not_known_is_adopted_for_all_who_wait_for_it(
    replicas: tuple[Running, Running], versions: dict, alone: Running
):
    asked: list[str] = []

    async def adopt(version: link.Version) -> None:
        asked.append(version.key)
        await asyncio.wrap_future(replicas[0].replica.load_adapter(version.key, version.path, lazy=True))

    version = replace(versions["large"], number=9)
    request = Request("r", PROMPT, GREEDY, adapter="large")
    with linked(replicas[0].replica, adopt) as one, one.attach() as router:
        for rid in range(1, 5):
            router.start(rid, request, version)
        got = [outputs(router.whole(rid)) for rid in range(1, 5)]
    assert set(asked) == {"large@9"}
    assert got == [tokens(serve(alone, [request])["r"])] * 4


def test_a_stop_that_comes_before_its_request_is_queued_is_kept(replicas: tuple[Running, Running], versions: dict):
    stopped = threading.Event()

    async def adopt(version: link.Version) -> None:
        await asyncio.to_thread(stopped.wait, 60)
        await asyncio.wrap_future(replicas[0].replica.load_adapter(version.key, version.path, lazy=True))

    version = replace(versions["large"], number=11)
    request = Request("r", PROMPT, LONG, adapter="large", done=(Done((5, 6, 7)),))
    with linked(replicas[0].replica, adopt) as one, one.attach() as router:
        router.start(1, request, version)
        router.send(stop=link.Stop(rid=1, index=0, outputs=2))
        router.start(2, Request("bad", (1000,), GREEDY))
        router.until(lambda r: r.failures(2))  # so the stop has been read, too
        stopped.set()
        last = router.whole(1)[-1]
    assert (last.finish_reason, last.usage.completion_tokens) == ("stop", 2)


def test_a_replica_that_drains_gives_its_requests_up(tiny_model: Path, alone: Running):
    request = Request("r", PROMPT, LONG)
    with running(tiny_model, {}) as service, linked(service.replica) as one, one.attach() as router:
        router.start(1, request)
        router.until(lambda r: len(r.tokens(1)) > 3)
        one.backend.draining = True
        assert service.replica.drain(60).result(60)
        router.start(2, request)
        router.until(lambda r: r.failures(1) and r.failures(2))
        for rid in (1, 2):
            assert [(f.kind, f.elsewhere) for f in router.failures(rid)] == [("Unavailable", True)]
        assert router.messages[-1].state.draining
        seen = outputs(router.tokens(1))
    assert seen == tokens(serve(alone, [request])["r"])[: len(seen)] and len(seen) < 100


def test_a_replica_that_stops_gives_its_requests_up(tiny_model: Path):
    service = Running(config.load(None, {**BASE, "model.path": str(tiny_model)}), warm=False)
    with closing(service.replica), linked(service.replica) as one, one.attach() as router:
        router.start(1, Request("r", PROMPT, replace(LONG, n=2)))
        router.until(lambda r: r.tokens(1))
        service.stop()
        router.until(lambda r: r.failures(1))
        assert [(f.kind, f.elsewhere) for f in router.failures(1)] == [("Unavailable", True)]
