"""Models, adapters, health and version over HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from jlora import __version__
from jlora.errors import InvalidArgument, Unavailable
from jlora.replica import Load
from jlora.serve import pages
from jlora.serve.backend import Backend
from jlora.serve.http.call import Call
from jlora.serve.http.schema import LoadBody, UnloadBody, read
from jlora.serve.loading import load_adapter
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)


class Models:
    """The handlers about models, adapters and the server itself."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._created = int(time.time())

    async def list(self, call: Call) -> None:
        """`GET /v1/models`: the base, then every adapter in order of name."""
        entries = [self._base()]
        entries += [
            self._adapter(info) async for info in pages.adapters(self._backend.loaded) if call.caller.sees(info.name)
        ]
        await call.json({"object": "list", "data": entries})

    async def one(self, call: Call) -> None:
        """`GET /v1/models/NAME`; without a name, the list."""
        if not call.matched["name"]:
            return await self.list(call)
        adapter = self._backend.adapter_of(call.caller, call.matched["name"])
        if adapter is None:
            await call.json(self._base())
        else:
            await call.json(self._adapter(await asyncio.wrap_future(self._backend.loaded.adapter(adapter))))

    async def load(self, call: Call) -> None:
        """`POST /v1/load_lora_adapter`."""
        body = read(call.body, LoadBody)
        replica = self._backend.loaded
        named, base = body.base_model_name or "", replica.info.model
        if named not in ("", base):
            said = "adapter %r: base_model_name = %r is not the base %r, and is ignored"
            log.warning(said, body.lora_name[:60], named[:60], base)
        load = Load(body.lora_name, body.lora_path, body.pinned, body.load_inplace, body.lazy)
        info = await load_adapter(replica, load)
        await call.json({"success": True, "adapter": self._adapter(info)})

    async def unload(self, call: Call) -> None:
        """`POST /v1/unload_lora_adapter`; answers when all that the adapter held is free."""
        body = read(call.body, UnloadBody)
        info = await asyncio.wrap_future(self._backend.loaded.unload_adapter(body.lora_name))
        await call.json({"success": True, "adapter": self._adapter(info)})

    async def health(self, call: Call) -> None:
        """`GET /health`: 200 while gRPC's health says SERVING, and how many programs still compile beside the steps."""
        replica = self._backend.loaded  # loading has a message of its own
        if not self._backend.serving:
            why = "drains" if self._backend.draining else f"has not moved for {replica.heartbeat_age():.1f} s"
            raise Unavailable(f"the engine {why}")
        await call.json({"status": "ok", "programs_left": replica.programs_left})

    async def ready(self, call: Call) -> None:
        """`GET /ready`: 200 while a request would be taken now."""
        room = self._backend.room
        self._backend.gate.check_completions(room)
        await self.health(call)

    async def live(self, call: Call) -> None:
        """`GET /live`: 200 as long as the process need not be started again; it may load or drain."""
        if not self._backend.live:
            raise Unavailable("the engine has stopped, or stands still")
        await call.json({"status": "ok"})

    async def version(self, call: Call) -> None:
        """`GET /version`."""
        await call.json({"version": __version__})

    async def profile(self, call: Call) -> None:
        """`POST /debug/profile?steps=N&replica=NAME`: a trace of the next steps below `serve.profile_dir`."""
        steps = call.query.get("steps", "")
        if not steps.isdecimal() or len(steps) > 9:
            raise InvalidArgument(f"steps = {steps[:60]!r}: must be a whole number")
        made = await asyncio.wrap_future(self._backend.loaded.profile(int(steps), call.query.get("replica", "")))
        await call.json({"name": made.name, "steps": made.steps})

    def _base(self) -> dict[str, Any]:
        info = self._backend.loaded.info
        return self._entry(info.model, info.model, None)

    def _adapter(self, info: AdapterInfo) -> dict[str, Any]:
        facts = {"uid": info.uid, "digest": info.digest, "rank": info.rank, "tier": info.tier, "pinned": info.pinned}
        return {**self._entry(info.name, info.name, self._backend.loaded.info.model), "adapter": facts}

    def _entry(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        """OpenAI's fields and vLLM's. A root is no path here: clients do not see the server's directories."""
        facts = {"id": name, "object": "model", "created": self._created, "owned_by": "jlora"}
        return {**facts, "root": root, "parent": parent, "max_model_len": self._backend.loaded.info.limits.max_len}
