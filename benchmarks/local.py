"""An engine in this process as a `Target`: it is stepped on the player's own thread.

Every run does the same work whatever the operating system schedules: send what is due, make a step,
hand out its tokens. Nothing else may use the engine meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from jlora.engine.engine import Engine
from jlora.errors import JloraError
from jlora.loadgen.player import Failed, Part
from jlora.sim.trace import Turn
from jlora.types import Request, SamplingParams, TokenEvent

IDLE_S = 0.0005


class EngineTarget:
    """Steps `engine` while the `async with` block runs."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._inboxes: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._ids = map(str, itertools.count())
        self._stepping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineTarget:
        self._stepping = asyncio.create_task(self._step())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stepping is not None
        self._stepping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._stepping

    async def ask(self, model: str, prompt: Sequence[int], turn: Turn) -> AsyncIterator[Part]:
        """See `Target.ask`."""
        name = next(self._ids)
        sampling = SamplingParams(temperature=0.0, max_tokens=turn.output, ignore_eos=True)
        request = Request(name, tuple(prompt), sampling, model or None, tenant=turn.tenant)
        inbox, handle = asyncio.Queue(), None
        self._inboxes[name] = inbox
        try:
            handle = self._engine.submit(request)
            while True:
                event = await inbox.get()
                yield Part([event.token_id] if event.token_id is not None else [], event.usage, event.timing)
                if event.finish_reason is not None:
                    return
        except JloraError as e:
            raise Failed(type(e).__name__, str(e)) from e
        finally:
            del self._inboxes[name]
            if handle is not None:
                self._engine.abort(handle)  # a request that timed out; the end of any other is known already

    async def settled(self) -> None:
        """Waits until nothing runs and no copy is under way."""
        while self._engine.busy or self._engine.copying:
            await asyncio.sleep(IDLE_S)

    async def _step(self) -> None:
        while True:
            if self._engine.busy:
                for event in self._engine.step():
                    if event.request_id in self._inboxes:
                        self._inboxes[event.request_id].put_nowait(event)
                await asyncio.sleep(0)
            else:
                self._engine.tend()
                await asyncio.sleep(IDLE_S)
