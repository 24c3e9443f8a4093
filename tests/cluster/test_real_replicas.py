"""Two real engines behind a router: a client cannot tell them from one, also if one of them dies under its answer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from jlora.adapters.registry import Record
from jlora.cluster import balance
from jlora.cluster.attach import Terms
from jlora.cluster.balancing import Balancing
from jlora.cluster.prefixes import Prefixes
from jlora.cluster.router import Router
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.routing.policy import Ask, Bookless
from jlora.cluster.view import View
from jlora.engine.loaders import Read
from jlora.engine.records import NewAdapter
from jlora.serve.client import Login, connect
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as jlora
from jlora.types import Request, SamplingParams
from tests.cluster import _port as port
from tests.cluster._links import Client, FakeDirectory, wait_for
from tests.cluster._real import INVOCATION, SECRET, Cluster, Seat, adapters_of, cluster, same
from tests.serve._server import add, refused, request

PROMPT = tuple(5 + i * 7 % 200 for i in range(40))
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 17, "top_p": 0.95}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {9: 1.5}
}  # fmt: skip


@pytest.fixture(scope="module")
def two(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(text_model, adapters_of(text_model, tmp_path_factory.mktemp("adapters"))) as made:
        yield made
        for seat in made.seats:
            wait_for(lambda seat=seat: not seat.running)
            seat.engine.check_integrity().result(20)


def dying(two: Cluster, asked: pb.GenerateRequest, after: int = 5) -> tuple[pb.GenerateResponse, Seat]:
    """The streamed answer, of which the replica dies behind `after` messages; and that replica."""
    dead: list[Seat] = []
    whole = pb.GenerateResponse(outputs=[pb.Output(index=i) for i in range(asked.sampling.n or 1)])
    for count, delta in enumerate(two.served.inference.GenerateStream(asked, timeout=60)):
        add(whole, delta)
        if count == after:
            dead.append(two.busy())
            dead[0].kill()
    assert dead, "it ended before its replica could die"
    return whole, dead[0]


def revive(two: Cluster, seat: Seat) -> None:
    wait_for(lambda: not seat.running)  # its requests end with their link
    seat.start()
    two.place(*two.seats)


def test_a_replica_that_dies_while_it_reads_the_adapter_changes_nothing(two: Cluster):
    """Its read is held, so only the other one can have the first token."""
    reading: list[Seat] = []
    go_on = threading.Event()

    def held(seat: Seat) -> Read:
        def read(record: Record, from_files: Callable[[], NewAdapter], unwanted: Callable[[], bool]) -> NewAdapter:
            if record.name.startswith("late@") and not reading:
                reading.append(seat)
                assert go_on.wait(60)
            return from_files()

        return read

    for seat in two.seats:
        seat.engine.read_with(held(seat))
    asked = request(PROMPT, 60, model="late", **SAMPLED)
    future = two.served.inference.Generate.future(asked, timeout=60)
    wait_for(lambda: reading)
    reading[0].kill()
    try:
        same(future.result(), two.alone.generate(asked))
        assert not go_on.is_set()
    finally:
        go_on.set()
        revive(two, reading[0])


CASES: dict[str, Callable[[], pb.GenerateRequest]] = {
    "greedy": lambda: request(PROMPT, 120),
    "sampled with penalties": lambda: request(PROMPT, 120, **SAMPLED, **PENALTIES),
    "two completions": lambda: request(PROMPT, 80, n=2, **SAMPLED),
    "an adapter": lambda: request(PROMPT, 120, model="wide", **SAMPLED),
    "an activated adapter": lambda: request((*PROMPT, *INVOCATION, 9, 10), 120, model="check"),
    "log-probabilities": lambda: request(PROMPT, 80, logprobs=2, prompt_logprobs=1, model="upper"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replica_that_dies_under_an_answer_changes_nothing_of_it(two: Cluster, case: str):
    asked = CASES[case]()
    alone = two.alone.generate(asked)
    got, dead = dying(two, asked)
    try:
        same(got, alone)
    finally:
        revive(two, dead)


def test_a_stop_string_is_found_across_a_death(two: Cluster):
    whole = two.alone.generate(request(PROMPT, 100, **SAMPLED)).outputs[0].text
    stop = whole[60:64]
    at = whole.index(stop)
    assert at > 20
    asked = request(PROMPT, 100, stop=[stop], min_tokens=0, **SAMPLED)
    alone = two.alone.generate(asked)
    assert alone.outputs[0].finish_reason == "stop" and alone.outputs[0].text == whole[:at]
    got, dead = dying(two, asked)
    try:
        same(got, alone)
    finally:
        revive(two, dead)


def test_behind_a_move_only_those_with_its_salt_find_its_kv(two: Cluster):
    """A replica makes the salt of what the request says, so no key is needed for two to make the same."""
    prompt = tuple(9 + i * 11 % 190 for i in range(40))
    salts = [("mine", "a"), ("mine", "b"), ("other", "a"), ("", "")]

    def cached(tenant: str, salt: str) -> int:
        asked = request(prompt, 1, tenant=tenant, cache_salt=salt)
        return two.served.generate(asked).usage.cached_tokens

    _, dead = dying(two, request(prompt, 100, tenant="mine", cache_salt="a"))
    try:
        assert [cached(*salt) > 0 for salt in salts] == [True, False, False, False]
        assert all(cached(*salt) > 0 for salt in salts)  # each has its own now
    finally:
        revive(two, dead)


def streaming(two: Cluster, tokens: int) -> tuple[Callable[[], list[int]], list[int]]:
    """A stream that has begun: what reads all of its tokens, and those of an engine alone."""
    asked = request(PROMPT, tokens, **SAMPLED)
    expected = list(two.alone.generate(asked).outputs[0].token_ids)
    stream = two.served.inference.GenerateStream(asked, timeout=60)
    first = [next(stream) for _ in range(3)]
    return lambda: [t for delta in (*first, *stream) for out in delta.outputs for t in out.token_ids], expected


def test_a_draining_replica_hands_its_requests_on(two: Cluster):
    rest, expected = streaming(two, 200)
    drained = two.busy()
    drained.backend.draining = True
    assert rest() == expected
    drained.backend.draining = False
    wait_for(lambda: port.dispatcher(two.router).books.view[drained.name].health == "up")


def test_http_streams_on_when_a_replica_dies(two: Cluster):
    body = {
        "model": "wide", "prompt": list(PROMPT), "max_tokens": 120, "temperature": 0.8, "seed": 4, "ignore_eos": True,
    }  # fmt: skip
    alone = httpx.post(f"{two.alone.http}/v1/completions", json=body, timeout=60).json()
    text, dead = "", None
    with httpx.stream("POST", f"{two.served.http}/v1/completions", json={**body, "stream": True}, timeout=60) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if dead is None and len(text) > 5:
                dead = two.busy()
                dead.kill()
    assert dead is not None
    try:
        assert text == alone["choices"][0]["text"]
    finally:
        revive(two, dead)


def test_many_at_once_over_both_fronts_are_what_one_engine_says(two: Cluster):
    asked = [
        request(PROMPT[: 10 + i], 24, model=("", "wide", "upper")[i % 3], seed=i, temperature=0.7) for i in range(8)
    ]
    futures = [two.served.inference.Generate.future(one, timeout=60) for one in asked]
    for one, future in zip(asked, futures, strict=True):
        same(future.result(), two.alone.generate(one))


class Crowding(Bookless):
    """Sends everything to the first replica."""

    def choose(self, view: View, ask: Ask) -> str | None:
        return next((name for name, seen in view.items() if seen.health == "up"), None)


@contextmanager
def balanced(two: Cluster, terms: balance.Terms) -> Iterator[Balancing]:
    """A router that sends all to one replica, and moves requests off it again."""
    dispatcher, loop = port.dispatcher(two.router), two.seats[0].loop
    usual, dispatcher.choice.policy = dispatcher.choice.policy, Crowding()
    balancing = Balancing(dispatcher, 0.05, terms)

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(balancing.run())

    async def stop(task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait((task,))

    task = loop.run(start())
    try:
        yield balancing
    finally:
        loop.run(stop(task))
        dispatcher.choice.policy = usual


def test_requests_and_their_adapters_move_under_load_and_no_token_changes(two: Cluster):
    models = ("", "wide", "upper", "check")
    asked = [
        request((*PROMPT[: 10 + i], *INVOCATION, 9), 100, model=models[i % 4], seed=i, temperature=0.7)
        for i in range(24)
    ]
    alone = [two.alone.generate(one) for one in asked]
    with balanced(two, balance.Terms(queue_s=0.01, gain=0.01, limit_s=5.0)) as balancing:
        futures = [two.served.inference.Generate.future(one, timeout=120) for one in asked]
        for future, expected in zip(futures, alone, strict=True):
            same(future.result(), expected)
    assert balancing.moved > 0
    assert {"wide@1", "upper@1", "check@1"} & set(port.dispatcher(two.router).books.view["r1"].tiers)
    assert not len(port.dispatcher(two.router).table) and not port.dispatcher(two.router).entries


@pytest.mark.parametrize(
    "asked",
    [
        request(PROMPT, 8, model="missing"),
        request(PROMPT, 5000),
        request((), 8),
        request(PROMPT, 8, temperature=-1.0),
        request(PROMPT, 8, model="check"),
        request(PROMPT, 8, n=65),
        request((400,), 8),
        request(PROMPT, 8, logprobs=21),
    ],
)
def test_errors_are_those_of_one_engine(two: Cluster, asked: pb.GenerateRequest):
    with pytest.raises(grpc.RpcError) as alone:
        two.alone.generate(asked)
    with refused(alone.value.code()) as routed:
        two.served.generate(asked)
    if asked.model != "missing":  # near names are the directory's affair
        assert routed.value.details() == alone.value.details()


def test_a_router_that_is_wrong_about_caches_changes_no_answer(two: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Its hashes choose a replica, and the replica compares tokens: here all prompts are one to the router."""
    monkeypatch.setattr(Prefixes, "chain", lambda *_: [25] * 3)
    for i in range(4):
        asked = request([300 + i, *PROMPT], 8, logprobs=1, tenant=f"tenant {i % 2}")
        got = two.served.generate(asked)
        same(got, two.alone.generate(asked))
        assert got.usage.cached_tokens == 0


def test_abort_ends_a_request_wherever_it_runs(two: Cluster):
    asked = request(PROMPT, 3000)
    asked.request_id = "mine"
    stream = two.served.inference.GenerateStream(asked, timeout=60)
    next(stream)
    busy = two.busy()
    assert two.served.control.Abort(pb.AbortRequest(request_id="mine")).aborted
    *_, last = stream
    assert last.outputs[0].finish_reason == "abort" and last.usage.prompt_tokens == len(PROMPT)
    wait_for(lambda: not busy.running)


def test_a_client_that_goes_ends_its_request(two: Cluster):
    stream = two.served.inference.GenerateStream(request(PROMPT, 3000), timeout=60)
    next(stream)
    stream.cancel()
    wait_for(lambda: not any(seat.running for seat in two.seats))


def generated(two: Cluster) -> int:
    """Tokens of all seats so far."""
    return sum(seat.engine.state().result(20).stats.generated_tokens for seat in two.seats)


@pytest.mark.parametrize("way", ["Generate", "GenerateStream"])
def test_a_deadline_ends_a_request_wherever_it_runs(two: Cluster, way: str):
    before = generated(two)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        list(getattr(two.served.inference, way)(request(PROMPT, 3000), timeout=1.0))  # a stream fails while it is read
    wait_for(lambda: not any(seat.running for seat in two.seats))
    assert generated(two) > before


@pytest.mark.parametrize("dies", [False, True])
def test_a_replica_itself_ends_a_request_at_its_deadline(two: Cluster, dies: bool, monkeypatch: pytest.MonkeyPatch):
    """Also one that has got the request behind the death of another: the router is patient here."""
    monkeypatch.setattr("jlora.cluster.dispatch.GRACE_S", 3600.0)
    client, deadline = Client(), time.monotonic() + 1.0
    sampling = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    two.router.submit(Request("late", PROMPT, sampling, deadline=deadline), client).result(20)
    dead = two.busy()
    if dies:
        dead.kill()
    try:
        last = client.wait().last
        assert time.monotonic() >= deadline and last.finish_reason == "abort" and last.error is None
        wait_for(lambda: not any(seat.running for seat in two.seats))
    finally:
        if dies:
            revive(two, dead)


def test_without_replicas_a_request_waits_for_the_next_one(two: Cluster):
    for seat in two.seats:
        seat.kill()
    wait_for(lambda: not two.router.replicas)
    asked = request(PROMPT, 8)
    future = two.served.inference.Generate.future(asked, timeout=60)
    with pytest.raises(grpc.RpcError) as e:
        two.served.inference.Generate(asked, timeout=0.2)
    # The client's clock and the router's run out together, and either may speak first.
    assert e.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    for seat in two.seats:
        seat.start()
    two.place(*two.seats)
    same(future.result(), two.alone.generate(asked))


def test_metrics_are_those_of_one_engine(two: Cluster):
    for one in (two.served, two.alone):
        one.generate(request(PROMPT, 4, model="wide"))
    texts = [httpx.get(f"{one.http}/metrics", timeout=20).text for one in (two.served, two.alone)]
    routed, alone = ({(family.name, family.type) for family in parse(text)} for text in texts)
    ours = "jlora_replica_", "jlora_router_", "jlora_placement_", "jlora_balance_"
    own = {one for one in routed if one[0].startswith(ours)}
    assert routed - own == alone and len(alone) > 20 and own


def test_state_and_flush_mean_all_replicas(two: Cluster):
    each = [seat.engine.state().result(20) for seat in two.seats]
    cache = two.served.control.GetCacheState(pb.GetCacheStateRequest())
    assert cache.hbm.total == sum(one.cache.hbm.total for one in each)
    info = two.served.control.GetServerInfo(pb.GetServerInfoRequest())
    assert [one.name for one in info.replicas] == ["r0", "r1"]
    two.served.control.FlushCache(pb.FlushCacheRequest())
    assert not any(seat.engine.state().result(20).cache.hbm.history_kv for seat in two.seats)


def test_a_hint_reaches_the_replica_that_would_have_the_request(two: Cluster):
    asked = request(PROMPT, 4, model="wide")
    for _ in two.seats:  # both meet the adapter
        futures = [two.served.inference.Generate.future(asked, timeout=60) for _ in two.seats]
        assert all(future.result() for future in futures)
    hint = two.served.inference.Prefetch(asked)
    assert hint.adapter_resident and not hint.coming_bytes
    two.served.inference.Prefetch(request(PROMPT, 4, model="upper"))  # one that nobody has does no harm
    with refused(grpc.StatusCode.NOT_FOUND):
        two.served.inference.Prefetch(request(PROMPT, 4, model="missing"))


def test_a_routers_requests_end_with_it_and_anothers_go_on(two: Cluster):
    loop = two.seats[0].loop

    async def another() -> Router:
        return Router(FakeDirectory(), LeastLoaded(), Terms("another", Login(SECRET.token), suspect_s=5.0))

    stream = two.served.inference.GenerateStream(request(PROMPT, 3000), timeout=60)
    next(stream)
    before = sum(seat.running for seat in two.seats)
    router = loop.run(another())
    router.place({seat.name: seat.address for seat in two.seats})
    router.submit(Request("r", PROMPT, SamplingParams(max_tokens=3000)), lambda events: None).result(20)
    wait_for(lambda: sum(seat.running for seat in two.seats) == before + 1)
    router.close()
    wait_for(lambda: sum(seat.running for seat in two.seats) == before)
    next(stream)
    stream.cancel()


def test_a_replica_that_is_told_to_drain_moves_its_requests_instead_of_waiting_for_them(two: Cluster):
    """Last: an engine that has drained takes no more requests."""
    rest, expected = streaming(two, 400)
    drained = two.busy()
    (other,) = (seat for seat in two.seats if seat is not drained)
    before = other.engine.state().result(20).stats.generated_tokens
    with connect(drained.address, Login(SECRET.token)) as channel:
        drain = jlora.ControlStub(channel).Drain.future(pb.DrainRequest(timeout_s=60), timeout=60)
        assert rest() == expected
        assert drain.result().drained and not drained.running
    assert other.engine.state().result(20).stats.generated_tokens > before
