"""The dashboard: a page of our own, and what it shows as server-sent events.

One snapshot a second serves all viewers, and without a viewer none is taken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

from jlora import __version__
from jlora.errors import Busy
from jlora.serve import pages
from jlora.serve.backend import Backend
from jlora.serve.http.call import Call, event
from jlora.types import AdapterInfo, Owners

PERIOD_S = 1.0  # between two events: as often as a reader can follow
VIEWERS = 64  # at once: each holds a connection
SHOWN = 32  # adapters at the tree's top
FILES = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
# The page is of this server alone: no foreign script, no frame around it.
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


def file(name: str) -> Callable[[Call], Awaitable[None]]:
    """The handler of one of the page's files."""
    content = (resources.files("jlora.serve.http") / "page" / name).read_bytes()
    headers = {
        "content-type": f"{FILES[name]}; charset=utf-8",
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
    }

    async def answer(call: Call) -> None:
        await call.whole(content, 200, headers)

    return answer


class Dashboard:
    """The stream of snapshots. For the event loop's thread only."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._viewers = 0
        self._watching: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes]

    async def events(self, call: Call) -> None:
        """`GET /dashboard/events`: a snapshot now, and one each second. Raises Unavailable while the model loads."""
        if self._viewers >= VIEWERS:
            raise Busy(f"the dashboard has {self._viewers} viewers, limit {VIEWERS}")
        self._viewers += 1
        try:
            now = event(await snapshot(self._backend))
            if self._watching is None:
                self._next = asyncio.get_running_loop().create_future()
                self._watching = asyncio.create_task(self._watch(), name="dashboard")
            while True:
                await call.write(now)
                now = await asyncio.shield(self._next)
        finally:
            self._viewers -= 1
            if not self._viewers and self._watching is not None:
                self._watching.cancel()
                self._watching = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            told, self._next = self._next, asyncio.get_running_loop().create_future()
            try:
                told.set_result(event(await snapshot(self._backend)))
            except Exception as e:  # for example, the engine has ended: so do the streams
                told.set_exception(e)


async def snapshot(backend: Backend) -> dict[str, Any]:
    """What the page shows, as JSON. Raises Unavailable without a replica."""
    replica = backend.loaded
    state, owners = await asyncio.gather(asyncio.wrap_future(replica.state()), asyncio.wrap_future(replica.owners()))
    adapters = [info async for info in pages.adapters(replica)]
    recent = backend.recent.summary()
    return {
        "at": time.time(),
        "version": __version__,
        "model": replica.info.model,
        "device": f"{replica.info.platform}, {replica.info.dtype}",
        "uptime_s": time.monotonic() - backend.started,
        "draining": backend.draining,
        "cache": dataclasses.asdict(state.cache),
        "stats": dataclasses.asdict(state.stats),
        "loop_gap_s": backend.gaps.longest(),
        "engine_gap_s": state.longest_gap_s,
        "recent": {name: spread._asdict() for name, spread in recent._asdict().items()},
        "adapters": len(adapters),
        "tree": tree(adapters, owners, replica.info.model),
        "cells": owners.cells,
        "per_cell": owners.per_cell,
        "whole": owners.whole,
        "requests": [dataclasses.asdict(bar) for bar in backend.strip.bars()],
    }


def tree(adapters: Sequence[AdapterInfo], owners: Owners, model: str) -> list[dict[str, Any]]:
    """The base, and the adapters with the most blocks on the device, weights and KV below them."""

    def entry(info: AdapterInfo) -> dict[str, Any]:
        names = ("name", "uid", "tier", "rank", "hits", "blocks", "pinned", "running", "waiting")
        return {**{name: getattr(info, name) for name in names}, "kv": owners.kv.get(info.uid, 0)}

    base = {"name": model, "uid": 0, "tier": "HBM", "rank": 0, "hits": 0, "blocks": 0, "pinned": True,
            "running": 0, "waiting": 0, "kv": owners.kv.get(0, 0)}  # fmt: skip
    entries = sorted(map(entry, adapters), key=lambda e: (-(e["kv"] + e["blocks"] * (e["tier"] != "HOST")), e["name"]))
    return [base, *entries[:SHOWN]]
