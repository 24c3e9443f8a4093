"""The load generator's client against a gRPC server that answers by the clock, on the same event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import pytest

from jlora.loadgen.player import Call, Pace, Player
from jlora.loadgen.server import GrpcTarget, look
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.sim.trace import Trace, Turn
from jlora.sim.workloads import closed

FIRST_S, NEXT_S = 0.04, 0.01
REAL_TIME = Pace()


@dataclass
class Scripted(rpc.InferenceServicer):
    """Streams `max_tokens` ids that begin at the prompt's length, at a fixed pace; fails models named by a status."""

    seen: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.seen.append((request.model, tuple(request.token_ids.ids)))
        assert request.sampling.temperature == 0 and request.stopping.ignore_eos
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(FIRST_S)
            if request.model.isupper():
                await context.abort(grpc.StatusCode[request.model], f"told to fail: {request.model}\nand more")
            count, length = request.stopping.max_tokens, len(request.token_ids.ids)
            count = count // 2 if request.model == "half" else count
            for i in range(count):
                await asyncio.sleep(NEXT_S if i else 0)
                last = {"usage": pb.Usage(prompt_tokens=length, cached_tokens=1), "timing": pb.Timing(queue_s=0.5)}
                output = pb.Output(token_ids=[1000 + length + i])
                yield pb.GenerateResponse(outputs=[output], **(last if i == count - 1 else {}))
        finally:
            self.running -= 1


def play(
    trace: Trace, models: list[str], pace: Pace = REAL_TIME, tick: Callable[[], object] = lambda: None
) -> tuple[list[Call], Scripted]:
    """The calls by session and turn, and the server."""

    async def both() -> tuple[list[Call], Scripted]:
        server, servicer = grpc.aio.server(), Scripted()
        rpc.add_InferenceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await channel.channel_ready()
                player = Player(GrpcTarget(channel), trace, models, pace, tick)
                await player.history()
                calls = await player.play()
        finally:
            await server.stop(None)
        return sorted(calls, key=lambda call: (call.turn.session, call.turn.turn)), servicer

    return asyncio.run(both())


def turn(at: float, session: int = 0, number: int = 0, adapter: int | None = 0, **fields) -> Turn:
    return Turn(at, session, number, (3, 4, 5), fields.pop("output", 3), adapter, **fields)


def trace(*turns: Turn) -> Trace:
    return Trace("t", turns, ("a0", "a1"))


def test_times_count_from_when_a_request_was_due():
    (call,), _ = play(trace(turn(0.1)), ["x", "y"])
    assert call.due == pytest.approx(0.1) and call.sent >= 0.1 and call.ok
    assert call.ttft >= FIRST_S and call.ttft == pytest.approx(call.first - 0.1) and call.tpot > 0
    assert call.latency >= call.ttft + 2 * call.tpot - 1e-9
    assert (call.usage.prompt_tokens, call.usage.cached_tokens, call.timing.queue) == (3, 1, 0.5)


def test_a_session_asks_on_with_the_answer_it_got_and_not_before():
    calls, server = play(trace(turn(0.0), turn(0.0, number=1)), ["x", "y"])
    first, second = calls
    assert server.most == 1
    assert server.seen[1] == ("x", (3, 4, 5, 1003, 1004, 1005, 3, 4, 5))
    assert second.sent >= second.due >= first.ended


def test_an_open_loop_does_not_wait_for_other_sessions():
    calls, server = play(trace(*(turn(0.0, session=i, output=60) for i in range(20))), ["x", "y"])
    assert server.most == 20
    assert max(call.sent for call in calls) < min(call.ended for call in calls)


def test_a_closed_loop_keeps_its_users_and_thinks():
    sessions = trace(
        *(turn(0.01 * i, session=i, output=2) for i in range(6)), turn(1.0, session=5, number=1, after=0.1)
    )
    calls, server = play(closed(sessions, 2), ["x", "y"])
    assert server.most == 2 and len(calls) == 7
    before, thought = calls[-2:]
    assert thought.due >= before.ended + 0.1 - 1e-9


def test_an_adapter_is_asked_for_by_the_servers_name_and_the_base_by_none():
    _, server = play(trace(turn(0.0, adapter=1), turn(0.0, session=1, adapter=None)), ["x", "y"])
    assert sorted(model for model, _ in server.seen) == ["", "y"]


def test_a_failed_request_keeps_its_status_and_its_session_goes_on():
    turns = trace(turn(0.0, adapter=1), turn(0.0, number=1, adapter=0))
    (failed, after), server = play(turns, ["x", "RESOURCE_EXHAUSTED"])
    assert (failed.status, failed.detail) == ("RESOURCE_EXHAUSTED", "told to fail: RESOURCE_EXHAUSTED")
    assert not failed.ok and math.isnan(failed.ttft) and failed.latency >= FIRST_S
    assert after.ok and server.seen[1][1] == (3, 4, 5, 3, 4, 5)


def test_an_answer_that_stops_early_is_no_success():
    (call,), _ = play(trace(turn(0.0, output=6)), ["half", "y"])
    assert (call.ok, call.status, call.detail) == (False, "INCOMPLETE", "3 of 6 tokens came")


def test_a_request_that_takes_too_long_is_a_deadline():
    (call,), _ = play(trace(turn(0.0, output=500)), ["x", "y"], Pace(timeout_s=0.2))
    assert call.status == "DEADLINE_EXCEEDED" and 0 < len(call.tokens) < 500


def test_history_comes_first_and_is_no_part_of_the_figures():
    ticks: list[int] = []
    turns = trace(turn(-9.0, number=-1, output=1), turn(-5.0, session=1, number=-1, output=1), turn(0.0), turn(0.0, 1))
    calls, server = play(turns, ["x", "y"], tick=lambda: ticks.append(1))
    assert len(server.seen) == 4 and len(calls) == len(ticks) == 2
    assert all(call.turn.turn == 0 and call.due == 0 for call in calls)
    assert [len(prompt) for _, prompt in server.seen] == [3, 3, 7, 7]


def test_a_history_that_fails_ends_the_run():
    with pytest.raises(RuntimeError, match="history failed: INTERNAL"):
        play(trace(turn(-1.0, number=-1), turn(0.0)), ["INTERNAL", "y"])


def test_no_server_is_one_clear_line():
    with pytest.raises(RuntimeError, match="no jlora server at 127.0.0.1:1: UNAVAILABLE"):
        asyncio.run(look("127.0.0.1:1", timeout_s=5))
