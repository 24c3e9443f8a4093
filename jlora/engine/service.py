"""`LocalReplica` for callers that wait. It goes when the last of them awaits futures."""

from __future__ import annotations

from collections.abc import Sequence

from jlora.config import Config
from jlora.engine.local import LocalReplica
from jlora.replica import Sink
from jlora.types import AdapterInfo, CacheState, EngineStats, PrefetchResult, Request
from jlora.validation import validate


class Service:
    """One replica, ready to serve; see `start`."""

    def __init__(self, replica: LocalReplica):
        self.replica = replica
        self.config = replica.info.config
        self.spec = replica._built.reader.spec
        self.layout = replica._built.reader.layout
        self.model_name = replica.info.model
        self.limits = replica.info.limits

    @classmethod
    def start(cls, config: Config, progress: bool = True) -> Service:
        """Loads everything and starts the engine's thread."""
        return cls(LocalReplica.start(config, progress))

    def check(self, request: Request) -> Request:
        """The request in canonical form, if the replica would take it."""
        checked = validate(request, self.limits)
        self.replica.check(checked).result()
        return checked

    def submit(self, request: Request, sink: Sink) -> int:
        """Queues a validated request."""
        return self.replica.submit(request, sink).result()

    def abort(self, request_id: str, handle: int | None = None) -> bool:
        """Ends a request."""
        return self.replica.abort(request_id, handle).result()

    def stop_completion(self, request_id: str, index: int, completion_tokens: int, handle: int | None = None) -> None:
        """A stop string was found."""
        self.replica.stop(request_id, index, completion_tokens, handle)

    def prefetch(self, request: Request) -> PrefetchResult:
        """A hint."""
        return self.replica.prefetch(request).result()

    def load_adapter(self, name: str, path: str, pinned: bool = False, replace: bool = False) -> AdapterInfo:
        """Loads an adapter."""
        return self.replica.load_adapter(name, path, pinned, replace).result()

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Unloads an adapter and waits until it is gone."""
        return self.replica.unload_adapter(name).result()

    def start_unload(self, name: str) -> tuple[AdapterInfo, list[int]]:
        """Unloads an adapter."""
        return self.replica.unload_adapter(name).result(), []

    def are_gone(self, uids: Sequence[int]) -> bool:
        """True: `start_unload` has waited."""
        return True

    def pin_adapter(self, name: str, pinned: bool) -> AdapterInfo:
        """Pins or unpins."""
        return self.replica.pin_adapter(name, pinned).result()

    def adapters(self) -> list[AdapterInfo]:
        """In order of name."""
        return self.replica.adapters().result()

    def adapter(self, name: str) -> AdapterInfo:
        """One adapter."""
        return self.replica.adapter(name).result()

    def cache_state(self) -> CacheState:
        """Blocks by class and counters."""
        return self.replica.state().result().cache

    def stats(self) -> EngineStats:
        """Counters since start."""
        return self.replica.state().result().stats

    def flush_cache(self) -> int:
        """Drops KV that no request uses."""
        return self.replica.flush_cache().result()

    def check_integrity(self) -> None:
        """Raises AssertionError if the pool or the tree is inconsistent."""
        self.replica.check_integrity().result()

    def heartbeat_age(self) -> float:
        """Seconds since the engine last made progress."""
        return self.replica.heartbeat_age()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and waits for the live ones."""
        return self.replica.drain(timeout_s).result()

    def stop(self) -> None:
        """Ends the engine."""
        self.replica.close()
