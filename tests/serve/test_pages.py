"""Lists of adapters in pages: every adapter once, and no answer over a default client's limit."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import cast

import grpc
import pytest

from jlora.replica import Replica, ReplicaState
from jlora.serve import pages, services
from jlora.serve.access.caller import ANYBODY
from jlora.serve.backend import Backend
from jlora.serve.http.call import Call
from jlora.serve.http.metrics import metrics
from jlora.serve.pages import AT_ONCE, CHUNK, MOST, PER_TURN, page, walk
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.status import Context
from jlora.types import AdapterInfo
from tests.serve._server import Served, refused, serving

CODE = grpc.StatusCode
LIMIT = 4 << 20  # a default client's
SUMMARY, FULL = pb.ListAdaptersRequest.SUMMARY, pb.ListAdaptersRequest.FULL
MODULES = 126 * 7  # of the largest Llama


class Busy:
    """A replica in a long step: its adapters come when it has ended. It notes what it is asked for."""

    def __init__(self) -> None:
        self.step: Future[list[AdapterInfo]] = Future()
        self.asked: list[str] = []

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        self.asked.append("adapters")
        return self.step

    def state(self) -> Future[ReplicaState]:
        self.asked.append("state")
        raise RuntimeError("seen")


class Many:
    """A replica's adapters, all of the largest kind; remembers how many each command asked for."""

    def __init__(self, count: int):
        ranks = {f"layers.{i // 7}.self_attn.q_proj.{i % 7}": 64 for i in range(MODULES)}
        self.asked: list[int | None] = []
        self.infos = [
            AdapterInfo(
                f"adapter-{i:05}{'x' * 100}", i, "0" * 64, 64, ranks, ("q", "k"), 1, 1, "HOST", False, 0, 0, 0, -1.0,
                0.0, tuple(range(10_000, 10_256)),
            )
            for i in range(count)
        ]  # fmt: skip

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        self.asked.append(most)
        answer: Future[list[AdapterInfo]] = Future()
        answer.set_result([info for info in self.infos if info.name > after][:most])
        return answer

    def heartbeat_age(self) -> float:
        return 0.0


def listed(served: Served, **fields: object) -> pb.ListAdaptersResponse:
    return served.adapters.ListAdapters(pb.ListAdaptersRequest(**fields), timeout=20)  # type: ignore[arg-type]


def test_pages_of_a_real_server_have_every_adapter_once(served: Served):
    whole = listed(served)
    assert [a.name for a in whole.adapters] == ["lower", "upper", "wide"] and not whole.next_page_token
    first = listed(served, page_size=2)
    assert [a.name for a in first.adapters] == ["lower", "upper"]
    rest = listed(served, page_size=2, page_token=first.next_page_token)
    assert [a.name for a in rest.adapters] == ["wide"] and not rest.next_page_token
    assert rest.adapters[0].ranks and whole.adapters[2].digest == rest.adapters[0].digest


def test_a_summary_leaves_out_what_may_be_long(served: Served):
    whole, short = listed(served).adapters, listed(served, view=SUMMARY).adapters
    for full, summary in zip(whole, short, strict=True):
        assert full.ranks and not summary.ranks and not summary.alora_invocation_tokens
        assert (full.name, full.digest, full.blocks) == (summary.name, summary.digest, summary.blocks)
    assert [a.name for a in walk(served.adapters)] == [a.name for a in short]


def test_bad_pages_are_refused_by_name(served: Served):
    for size in (-1, MOST + 1):
        with refused(CODE.INVALID_ARGUMENT, f"page_size = {size}", str(MOST)):
            listed(served, page_size=size)
    with refused(CODE.INVALID_ARGUMENT, "page_token", "128"):
        listed(served, page_token="x" * 1000)


@pytest.mark.parametrize("view", [FULL, SUMMARY])
def test_no_page_passes_a_default_clients_limit(view: pb.ListAdaptersRequest.View):
    many = Many(MOST + 200)
    with serving(Backend(many)) as server:  # type: ignore[arg-type]
        found, token, count = [], "", 0
        while token or not count:
            answer = listed(server, page_token=token, view=view)
            assert answer.ByteSize() <= LIMIT and 0 < len(answer.adapters) <= MOST
            found += [a.name for a in answer.adapters]
            token, count = answer.next_page_token, count + 1
    assert found == [info.name for info in many.infos]
    assert count >= 2 and set(many.asked) == {CHUNK}, "the engine describes a few at a time"


def test_one_adapter_larger_than_a_page_still_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jlora.serve.pages.PAGE_BYTES", 10)
    answer = asyncio.run(page(Many(3), pb.ListAdaptersRequest(), ANYBODY))  # type: ignore[arg-type]
    assert len(answer.adapters) == 1 and answer.next_page_token == answer.adapters[0].name


def test_few_pages_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch):
    live, most = 0, 0

    async def made(*_: object) -> pb.ListAdaptersResponse:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await asyncio.sleep(0.01)
        live -= 1
        return pb.ListAdaptersResponse()

    monkeypatch.setattr(services, "page", made)

    async def ask() -> None:
        servicer = services.AdaptersServicer(Backend(Many(1)))  # pyright: ignore[reportArgumentType]
        context = Context(None, ANYBODY)  # pyright: ignore[reportArgumentType]
        await asyncio.gather(*(servicer.ListAdapters(pb.ListAdaptersRequest(), context) for _ in range(20)))

    asyncio.run(ask())
    assert most == AT_ONCE


def test_a_page_leaves_the_loop_a_turn_after_a_few_adapters():
    async def count() -> int:
        turns, replica = 0, Many(CHUNK - 1)

        async def watch() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await page(replica, pb.ListAdaptersRequest(view=SUMMARY), ANYBODY)  # pyright: ignore[reportArgumentType]
        watching.cancel()
        return turns

    assert asyncio.run(count()) >= CHUNK // PER_TURN - 1


def test_a_scrape_waits_for_no_step_once_it_has_seen_the_adapters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "FIRST_S", 0.01)
    monkeypatch.setattr(pages, "AGAIN_S", 0.0)
    busy, infos = Busy(), Many(3).infos

    async def looks() -> None:
        seen, replica = pages.Seen(), cast(Replica, busy)
        assert await seen.infos(replica) is None and await seen.infos(replica) is None, "the first look is bounded"
        busy.step.set_result(infos)
        await asyncio.sleep(0.01)
        busy.step = Future()  # the next step
        assert await seen.infos(replica) == infos and await seen.infos(replica) == infos
        assert busy.asked == ["adapters"] * 2, "one look goes on beside them"
        busy.step.set_result(infos[:1])
        await asyncio.sleep(0.01)
        assert await seen.infos(replica) == infos[:1]

    asyncio.run(looks())


def test_the_load_that_a_scrape_tells_is_younger_than_its_look(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "FIRST_S", 0.01)
    busy = Busy()
    with pytest.raises(RuntimeError, match="seen"):
        asyncio.run(metrics(Backend(cast(Replica, busy)), pages.Seen(), cast(Call, None)))
    assert busy.asked == ["adapters", "state"]
