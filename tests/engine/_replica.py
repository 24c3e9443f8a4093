"""A replica for tests: its calls wait for their answers, and its parts are there to look at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from jlora.cache.manager import CacheManager
from jlora.config import Config
from jlora.engine import build as assembly
from jlora.engine.build import Built, build
from jlora.engine.local import LocalReplica
from jlora.layout import PoolLayout
from jlora.ports import System
from jlora.replica import Replica, Sink
from jlora.types import AdapterInfo, CacheState, EngineStats, PrefetchResult, Request
from jlora.validation import validate


class Waiting:
    """Any replica, for callers that wait."""

    def __init__(self, replica: Replica):
        self.replica = replica
        self.info = replica.info

    def check(self, request: Request) -> Request:
        checked = validate(request, self.info.limits)
        self.replica.check(checked).result(60)
        return checked

    def submit(self, request: Request, sink: Sink) -> int:
        return self.replica.submit(request, sink).result(60)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        return self.replica.abort_named(request_id, tenant).result(60)

    def prefetch(self, request: Request) -> PrefetchResult:
        return self.replica.prefetch(request).result(60)

    def load_adapter(
        self, name: str, path: str, pinned: bool = False, replace: bool = False, lazy: bool = False
    ) -> AdapterInfo:
        return self.replica.load_adapter(name, path, pinned, replace, lazy).result(60)

    def unload_adapter(self, name: str) -> AdapterInfo:
        return self.replica.unload_adapter(name).result(60)

    def pin_adapter(self, name: str, pinned: bool) -> AdapterInfo:
        return self.replica.pin_adapter(name, pinned).result(60)

    def adapters(self) -> list[AdapterInfo]:
        return self.replica.adapters().result(60)

    def adapter(self, name: str) -> AdapterInfo:
        return self.replica.adapter(name).result(60)

    def cache_state(self) -> CacheState:
        return self.replica.state().result(60).cache

    def stats(self) -> EngineStats:
        return self.replica.state().result(60).stats

    def flush_cache(self) -> int:
        return self.replica.flush_cache().result(60)


class Running(Waiting):
    """A local replica and what it was built from.

    Args:
        warm: every program is compiled, and nothing runs beside it.
        blocks: so many of the pool's blocks are used, so that caches of every size run the same programs.
    """

    def __init__(self, config: Config, system: System | None = None, warm: bool = True, blocks: int | None = None):
        system = system or System()
        make = assembly.make_manager

        def of_a_part(config: Config, layout: PoolLayout, *rest: Any) -> CacheManager:
            return make(config, replace(layout, blocks=1 + (blocks or layout.blocks - 1)), *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembly, "make_manager", of_a_part)
            self.built: Built = build(config, progress=False, system=system)
        self.local = LocalReplica(self.built, system)
        self.layout = self.built.reader.layout
        self.parts: Any = self.built.parts
        super().__init__(self.local)
        if warm:
            self.local.warm().result(120)

    @property
    def manager(self) -> CacheManager:
        return self.parts.scheduler.manager

    def check_integrity(self) -> None:
        self.local.check_integrity().result(60)

    def stop(self) -> None:
        self.local.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine's thread stands still between two steps: the parts are the caller's meanwhile."""
        reached, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            reached.set()
            go_on.wait(60)

        done = self.local.between_steps(stand_still)
        assert reached.wait(60)
        try:
            yield
        finally:
            go_on.set()
            done.result(60)
