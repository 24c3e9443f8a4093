"""Many pauses share few timers, and none ends far too early."""

import asyncio
from unittest.mock import patch

from jlora.serve.pauses import Pauses

PAUSE_S = 0.2


def test_pauses_that_begin_together_share_a_timer_and_all_end():
    async def main() -> tuple[list[float], int, float]:
        loop, pauses, left = asyncio.get_running_loop(), Pauses(PAUSE_S), asyncio.Event()
        began, took = loop.time(), list[float]()

        def end() -> None:
            took.append(loop.time() - began)
            if len(took) == 100:
                left.set()

        with patch.object(loop, "call_at", wraps=loop.call_at) as timers:
            for _ in range(100):
                pauses.begin(end)
            made, due = timers.call_count, timers.call_args.args[0] - began
        await asyncio.wait_for(left.wait(), 20)
        return took, made, due

    took, made, due = asyncio.run(main())
    assert made < 10
    assert min(took) > 0.7 * PAUSE_S
    assert due < 1.5 * PAUSE_S


def test_a_pause_may_begin_where_another_one_ends():
    async def main() -> None:
        pauses, left = Pauses(0.01), asyncio.Event()
        pauses.begin(lambda: pauses.begin(left.set))
        await asyncio.wait_for(left.wait(), 20)

    asyncio.run(main())
