"""The engine on its own thread. Every public method may be called from any thread.

One thread steps the engine and sends every event through its request's sink. Calls from other
threads take the engine's lock, which a step lets go while it waits for the device: a submit or
an abort waits for a little Python, not for a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from jlora.adapters.invocation import last_occurrence
from jlora.config import Config
from jlora.engine.build import build_engine, read_adapter
from jlora.engine.engine import Engine
from jlora.errors import AlreadyExists, Unavailable
from jlora.model.spec import ModelSpec
from jlora.types import AdapterInfo, CacheState, EngineStats, Invocation, PrefetchResult, Request, TokenEvent
from jlora.validation import Limits, validate

log = logging.getLogger(__name__)

T = TypeVar("T")
Sink = Callable[[list[TokenEvent]], None]

IDLE_S = 0.1  # how often an idle engine tends its cache and shows that it is alive


class Service:
    """One replica, ready to serve; see `start`."""

    def __init__(self, engine: Engine, config: Config, spec: ModelSpec):
        self.config = config
        self.spec = spec
        self.model_name = config.model.name or spec.name
        self.layout = engine.layout
        capacity = (engine.layout.blocks - 1) * engine.layout.block_tokens
        self.limits = Limits(spec.vocab, spec.max_len, capacity)
        self._engine = engine
        self._sinks: dict[str, tuple[Sink, set[int]]] = {}  # by request: sink, completions still open
        self._work = threading.Event()
        self._beat = time.monotonic()
        self._draining = False
        self._stopping = False
        self._failed = False
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="jlora-engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, config: Config, progress: bool = True) -> Service:
        """Loads everything and starts the engine's thread. Raises JloraError with one clear line."""
        engine, spec = build_engine(config, progress)
        return cls(engine, config, spec)

    # -- requests ---------------------------------------------------------------------------

    def check(self, request: Request) -> Request:
        """The request in canonical form, if the model and the pool beside its adapter can take it.

        Raises:
            InvalidArgument, OutOfRange, ResourceExhausted: see `validate`.
            NotFound: no such adapter.
            InvalidArgument: the prompt does not invoke its activated LoRA.
        """
        checked = self._searched(validate(request, self.limits))  # first: a name must be sound to be looked up
        capacity = self._call(lambda: self._engine.capacity(checked))
        if capacity == self.limits.capacity_tokens:
            return checked
        limited = validate(request, replace(self.limits, capacity_tokens=capacity))
        return replace(limited, invocation=checked.invocation)

    def submit(self, request: Request, sink: Sink) -> int:
        """Queues a validated request; `sink` gets its events on the engine's thread.

        Returns:
            A handle: `abort` and `stop_completion` with it never touch a later request of the same id.
        Raises:
            NotFound, AlreadyExists, ResourceExhausted: see `Scheduler.submit`.
            Unavailable: draining or stopped.
        """

        def admit() -> int:
            if self._draining:
                raise Unavailable("the server is draining and takes no new requests")
            if request.id in self._sinks:  # ended, but its last event is not out yet
                raise AlreadyExists(f"request_id {request.id!r} is in use by a live request")
            handle = self._engine.submit(request)
            self._sinks[request.id] = (sink, set(range(request.sampling.n)))
            return handle

        handle = self._call(admit)
        self._work.set()
        return handle

    def abort(self, request_id: str, handle: int | None = None) -> bool:
        """Ends a request and frees its blocks; False if it is not live."""
        found = self._call(lambda: self._engine.abort(request_id, handle))
        self._work.set()
        return found

    def stop_completion(self, request_id: str, index: int, completion_tokens: int, handle: int | None = None) -> None:
        """A front found a stop string in this completion: it ends after `completion_tokens` tokens."""
        self._call(lambda: self._engine.stop_completion(request_id, index, completion_tokens, handle))
        self._work.set()

    def prefetch(self, request: Request) -> PrefetchResult:
        """A hint that the request is coming. Raises NotFound."""
        result = self._call(lambda: self._engine.prefetch(request))
        self._work.set()
        return result

    # -- adapters ---------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str, pinned: bool = False, replace: bool = False) -> AdapterInfo:
        """Reads, checks and packs an adapter. Raises the errors of `read_adapter` and `Engine.add_adapter`."""
        if not replace:
            self._call(lambda: self._engine.check_free(name))  # fail before the files are read
        new = read_adapter(name, path, self.config, self.spec, self.layout)
        self._call(lambda: self._engine.add_adapter(new, pinned, replace))
        return self._settled(name)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Takes it out of service, waits for its running requests, frees all it held. Raises NotFound."""
        info, uids = self.start_unload(name)
        while not self.are_gone(uids):
            time.sleep(0.01)
        return info

    def start_unload(self, name: str) -> tuple[AdapterInfo, list[int]]:
        """Takes it out of service; what it was, and its versions, to be waited for by `are_gone`. Raises NotFound."""
        return self._call(lambda: (self._engine.adapter(name), self._engine.remove_adapter(name)))

    def are_gone(self, uids: Sequence[int]) -> bool:
        """Whether all that these adapter versions held is free."""
        return self._call(lambda: self._engine.are_gone(uids))

    def pin_adapter(self, name: str, pinned: bool) -> AdapterInfo:
        """Pins, and waits until it is on the device; or unpins. Raises NotFound, ResourceExhausted."""
        self._call(lambda: self._engine.pin_adapter(name, pinned))
        return self._settled(name)

    def adapters(self) -> list[AdapterInfo]:
        """In order of name."""
        return self._call(self._engine.adapters)

    def adapter(self, name: str) -> AdapterInfo:
        """Raises NotFound."""
        return self._call(lambda: self._engine.adapter(name))

    # -- the cache, counters, life ------------------------------------------------------------

    def cache_state(self) -> CacheState:
        """Blocks by class and counters."""
        return self._call(self._engine.cache_state)

    def flush_cache(self) -> int:
        """Drops KV that no request uses; blocks freed."""
        return self._call(self._engine.flush_cache)

    def check_integrity(self) -> None:
        """Raises AssertionError if the pool or the tree is inconsistent."""
        self._call(self._engine.check_integrity)

    def stats(self) -> EngineStats:
        """Counters since start."""
        return self._call(self._engine.stats)

    def heartbeat_age(self) -> float:
        """Seconds since the engine's thread last went round; grows if it hangs or died."""
        return time.monotonic() - self._beat

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and waits for the live ones; whether all ended in time."""
        self._draining = True
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._thread.is_alive() and self._call(lambda: self._engine.busy):
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        """Aborts what is live, ends the thread and frees the device. May be called twice."""
        self._draining = True
        self._stopping = True
        self._work.set()
        self._thread.join()
        with self._engine.lock:
            if not self._closed:
                self._engine.close()
            self._closed = True

    # -- the thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._beat = time.monotonic()
                if self._engine.busy:
                    self._send(self._engine.step())
                    continue
                self._engine.tend()
                if self._engine.copying:
                    self._engine.rest()
                elif self._work.wait(IDLE_S):
                    self._work.clear()
        except Exception:
            log.exception("the engine failed; every live request is aborted")
            self._failed = True
        self._close()

    def _close(self) -> None:
        """Nothing may wait for an engine that is gone."""
        with self._engine.lock:
            self._stopping = True
            sinks, self._sinks = self._sinks, {}
        for request_id, (sink, open_) in sinks.items():
            _deliver(sink, [TokenEvent(request_id, i, None, finish_reason="abort") for i in sorted(open_)])

    def _send(self, events: Iterable[TokenEvent]) -> None:
        by_request: dict[str, list[TokenEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, batch in by_request.items():
            sink, open_ = self._sinks[request_id]
            open_.difference_update(e.index for e in batch if e.finish_reason is not None)
            if not open_:
                del self._sinks[request_id]
            if not _deliver(sink, batch) and not self._stopping:
                self._call(lambda r=request_id: self._engine.abort(r))

    def _settled(self, name: str) -> AdapterInfo:
        """The adapter once its copy, if one is under way, has landed; no steady demand may hold it back."""
        self._work.set()
        while (info := self.adapter(name)).tier == "LOADING":
            self._call(lambda: self._engine.hasten(name))
            time.sleep(0.002)
        return info

    def _searched(self, request: Request) -> Request:
        """The same with what a search for its adapter's invocation finds, outside the engine's lock."""
        name = request.adapter
        tokens = () if name is None else self._call(lambda: self._engine.invocation(name))
        if not tokens:
            return request
        return replace(request, invocation=Invocation(tokens, last_occurrence(request.prompt, tokens)))

    def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` with the engine to itself."""
        with self._engine.lock:
            if self._stopping:
                why = "the engine has failed; see the server's log" if self._failed else "the server has stopped"
                raise Unavailable(why)
            return function()


def _deliver(sink: Sink, events: list[TokenEvent]) -> bool:
    """Hands events over; a sink that fails is its owner's loss and nobody else's."""
    try:
        sink(events)
    except Exception:
        log.exception("the receiver of request %s failed; it is aborted", events[0].request_id)
        return False
    return True
