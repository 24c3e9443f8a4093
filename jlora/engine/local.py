"""The replica in this process: an engine on a thread of its own. See `jlora.replica.Replica`.

Commands reach the engine through a queue and run between two steps, so the engine has no lock.
Files are read, checked, packed and copied on other threads; only the short ends of a load run
between steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any, TypeVar

from jlora.adapters.invocation import last_occurrence
from jlora.config import Config
from jlora.engine.build import Built, build, read_adapter
from jlora.engine.engine import Engine
from jlora.errors import AlreadyExists, Unavailable
from jlora.gaps import Gaps
from jlora.ports import System
from jlora.replica import Replica, ReplicaInfo, ReplicaState, Sink
from jlora.types import AdapterInfo, Invocation, PrefetchResult, Request, TokenEvent

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

IDLE_S = 0.1  # pause between two rounds of an idle engine
LOADERS = 4  # adapters read and packed at once
COMPILE_S = 600.0  # a step that compiles for longer counts as stuck


class LocalReplica(Replica):
    """One engine, ready to serve; see `start`."""

    def __init__(self, built: Built, system: System):
        self._info = built.info
        self._built = built
        self._engine: Engine = built.engine
        self._system = system
        self._commands: queue.SimpleQueue[tuple[Callable[[], object], Future]] = queue.SimpleQueue()
        self._waits: list[_Wait] = []
        self._live: dict[int, _Live] = {}  # by handle; only the engine's thread
        self._names: dict[tuple[str, str], _Live] = {}  # by tenant and id, from the submission on; any thread
        self._work = threading.Event()
        self._beat = system.clock()
        self._gaps = Gaps(system.clock)
        self._draining = False
        self._stopping = False
        self._failed = False
        self._ended = False  # the thread takes no more commands
        self._closed = threading.Lock()
        self._loaders = system.threads.pool("jlora-load", LOADERS)
        system.garbage.begin()
        self._thread = system.threads.start("jlora-engine", self._loop)

    @classmethod
    def start(cls, config: Config, progress: bool = True, system: System | None = None) -> LocalReplica:
        """Loads the model and its adapters, and starts the engine. Raises JloraError with one clear line."""
        system = system or System()
        return cls(build(config, progress, system), system)

    @property
    def info(self) -> ReplicaInfo:
        return self._info

    # -- requests ---------------------------------------------------------------------------

    def check(self, request: Request) -> Future[None]:
        request = self._searched(request)
        return self.between_steps(lambda: self._engine.check(request))

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        arrived, searched = self._system.clock(), self._searched(request)
        live = _Live((request.tenant, request.id), sink, set(range(request.sampling.n)))
        if self._names.setdefault(live.name, live) is not live:  # it lives, or its last event is not out yet
            return _failed(AlreadyExists(f"request_id {request.id!r} is in use by a live request"))

        def admit() -> int:
            if self._draining:
                raise Unavailable("the server is draining and takes no new requests")
            live.handle = self._engine.submit(searched, arrived)
            self._live[live.handle] = live
            return live.handle

        def refused(submitted: Future[int]) -> None:
            if submitted.cancelled() or submitted.exception() is not None:
                del self._names[live.name]

        submitted = self.between_steps(admit)
        submitted.add_done_callback(refused)
        return submitted

    def abort(self, handle: int) -> Future[bool]:
        return self.between_steps(lambda: self._engine.abort(handle))

    def abort_named(self, request_id: str, tenant: str = "") -> Future[bool]:
        live = self._names.get((tenant, request_id))
        if live is not None:  # its submission, if it has not run, runs first
            self.between_steps(lambda: live.handle is not None and self._engine.abort(live.handle))
        return _done(live is not None)

    def stop(self, handle: int, index: int, outputs: int) -> Future[None]:
        return self.between_steps(lambda: self._engine.stop(handle, index, outputs))

    def prefetch(self, request: Request) -> Future[PrefetchResult]:
        request = self._searched(request)
        return self.between_steps(lambda: self._engine.prefetch(request))

    # -- adapters ---------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str, pinned: bool = False, replace: bool = False) -> Future[AdapterInfo]:
        answer: Future[AdapterInfo] = Future()
        try:
            loading = self._loaders.submit(self._load, answer, name, path, pinned, replace)
        except RuntimeError:  # the pool is shut down
            return self.between_steps(lambda: self._engine.adapters.get(name))  # fails: the replica is closed

        def over(done: Future[AdapterInfo]) -> None:
            error = _error_of(done)
            if error is None:
                _follow(self._settled(done.result()), answer)
            elif answer.running() or not answer.cancelled() and answer.set_running_or_notify_cancel():
                answer.set_exception(error)

        loading.add_done_callback(over)
        return answer

    def _load(self, answer: Future[AdapterInfo], name: str, path: str, pinned: bool, replace: bool) -> AdapterInfo:
        """Publishes an adapter, unless the caller cancels `answer` before.

        It runs on a loader's thread and waits for the engine's thread, never the other way round.
        """
        adapters = self._engine.adapters

        def begin() -> None:
            _go_on(answer)
            if not replace:
                adapters.check_free(name)  # fail before the files are read

        def reserve() -> tuple[int, ...]:
            _go_on(answer)
            return adapters.reserve(new, replace)

        def publish() -> AdapterInfo:
            if not answer.set_running_or_notify_cancel():  # from here on it is too late to cancel
                adapters.cancel(blocks)
                raise CancelledError
            return adapters.publish(new, blocks, pinned, replace)

        self.between_steps(begin).result()
        new = read_adapter(name, path, self._built.reader)
        blocks = self.between_steps(reserve).result()
        try:
            adapters.fill(blocks, new)
        except BaseException:
            self.between_steps(lambda: adapters.cancel(blocks))
            raise
        return self.between_steps(publish).result()

    def unload_adapter(self, name: str) -> Future[AdapterInfo]:
        adapters = self._engine.adapters

        def gone(found: tuple[AdapterInfo, list[int]]) -> Future[AdapterInfo]:
            info, uids = found
            return self._when(lambda: info if adapters.are_gone(uids) else None)

        return _chained(self.between_steps(lambda: (adapters.get(name), adapters.remove(name))), gone)

    def pin_adapter(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        return _chained(self.between_steps(lambda: self._engine.adapters.pin(name, pinned)), self._settled)

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        return self.between_steps(lambda: self._engine.adapters.all(after, most))

    def adapter(self, name: str) -> Future[AdapterInfo]:
        return self.between_steps(lambda: self._engine.adapters.get(name))

    def _settled(self, info: AdapterInfo) -> Future[AdapterInfo]:
        """The version when its copy to the device, if one is under way, has landed; `info` if it has been unloaded."""
        adapters = self._engine.adapters

        def look() -> AdapterInfo | None:
            now = adapters.version(info.uid) or info
            if now is info or now.tier != "LOADING":
                return now
            adapters.hasten(info.uid)  # or a steady demand would hold its copy back
            return None

        return self._when(look)

    # -- the cache, counters, life ------------------------------------------------------------

    def state(self) -> Future[ReplicaState]:
        engine, gaps = self._engine, self._gaps
        return self.between_steps(lambda: ReplicaState(engine.cache_state(), engine.stats(), gaps.longest()))

    def flush_cache(self) -> Future[int]:
        return self.between_steps(self._engine.flush_cache)

    def check_integrity(self) -> Future[None]:
        """Fails with AssertionError if the pool or the tree is inconsistent."""
        return self.between_steps(self._engine.check_integrity)

    def heartbeat_age(self) -> float:
        now, engine = self._system.clock(), self._engine
        if engine.compiling and not self._failed and now - self._beat < COMPILE_S:
            return 0.0
        return now - max(self._beat, engine.compiled_at)

    def drain(self, timeout_s: float | None = None) -> Future[bool]:
        self._draining = True
        end = None if timeout_s is None else self._system.clock() + timeout_s

        def look() -> bool | None:
            if not self._engine.busy:
                return True
            return False if end is not None and self._system.clock() >= end else None

        drained = _running()

        def answer(done: Future[bool]) -> None:
            if not drained.done():
                drained.set_result(done.exception() is not None or done.result())  # a dead engine has no live request

        self._when(look).add_done_callback(answer)
        return drained

    def close(self) -> None:
        self._draining = self._stopping = True
        self._work.set()
        self._thread.join()
        if self._closed.acquire(blocking=False):  # once, whoever comes first
            self._loaders.shutdown(wait=False, cancel_futures=True)
            self._engine.close()

    # -- the thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._beat = self._system.clock()
                self._obey()
                if self._engine.busy:
                    waited = self._step()
                    self._gaps.note(self._system.clock() - self._beat - waited)
                    continue
                self._system.garbage.idle()
                self._engine.tend()
                self._answer_waits()
                self._gaps.note(self._system.clock() - self._beat)
                if self._engine.copying:
                    self._engine.rest()
                elif self._work.wait(IDLE_S):
                    self._work.clear()
        except Exception:
            log.exception("the engine failed; every live request is aborted")
            self._failed = True
        self._end()

    def _step(self) -> float:
        """One step and its events; the seconds in which it waited for the device and for copies."""
        engine, clock = self._engine, self._system.clock
        began, before = clock(), engine.host_s
        events = engine.step()
        waited = clock() - began - (engine.host_s - before)
        self._send(events)
        self._system.garbage.after_step()
        return waited

    def _obey(self) -> None:
        """Runs the commands that have come, then answers the waits that they or the last step fulfilled."""
        for _ in range(self._commands.qsize()):  # those that come meanwhile wait for the next step
            command, future = self._commands.get()
            _settle(future, command)
        self._answer_waits()

    def _answer_waits(self) -> None:
        self._waits = [wait for wait in self._waits if not wait.answered()]

    def _end(self) -> None:
        """Fails whatever waits for an engine that is gone."""
        self._ended = self._stopping = True
        self._refuse_commands()
        for wait in self._waits:
            wait.future.set_exception(self._refusal())
        ended, self._live = self._live, {}
        for live in ended.values():
            del self._names[live.name]
            _deliver(live.sink, [TokenEvent(live.name[1], i, None, finish_reason="abort") for i in sorted(live.open)])

    def _send(self, events: Iterable[TokenEvent]) -> None:
        by_request: dict[int, list[TokenEvent]] = {}
        for event in events:
            by_request.setdefault(event.handle, []).append(event)
        for handle, batch in by_request.items():
            live = self._live[handle]
            live.open.difference_update(e.index for e in batch if e.finish_reason is not None)
            if not live.open:
                del self._live[handle], self._names[live.name]
            if not _deliver(live.sink, batch):
                self._engine.abort(handle)

    def _searched(self, request: Request) -> Request:
        """The request with its activation, found on the caller's thread: a long prompt takes milliseconds."""
        tokens = self._engine.adapters.invocation(request.adapter) if request.adapter else ()
        if not tokens:
            return request
        return replaced(request, invocation=Invocation(tokens, last_occurrence(request.prompt, tokens)))

    # -- commands -----------------------------------------------------------------------------

    def between_steps(self, command: Callable[[], T]) -> Future[T]:
        """Runs `command` on the engine's thread, between two steps."""
        future: Future[T] = Future()
        self._commands.put((command, future))
        self._work.set()
        if self._ended:  # the thread may have missed this one
            self._refuse_commands()
        return future

    def _when(self, look: Callable[[], T | None]) -> Future[T]:
        """Answers with the first value of `look` that is not None; it runs on the engine's thread."""
        future = _running()

        def begin() -> Future[T]:
            self._waits.append(_Wait(look, future))
            return future

        return _chained(self.between_steps(begin), lambda waiting: waiting)

    def _refuse_commands(self) -> None:
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(self._refusal())

    def _refusal(self) -> Unavailable:
        why = "the engine has failed; see the server's log" if self._failed else "the server has stopped"
        return Unavailable(why)


@dataclass(slots=True, eq=False)
class _Live:
    """A request from its submission to its last event."""

    name: tuple[str, str]  # tenant and id
    sink: Sink
    open: set[int]  # completions that have not ended
    handle: int | None = None  # None: the engine does not have it yet


@dataclass(slots=True)
class _Wait:
    """A future that a look on the engine's thread answers once it finds something."""

    look: Callable[[], object | None]
    future: Future

    def answered(self) -> bool:
        try:
            found = self.look()
        except Exception as e:
            self.future.set_exception(e)
            return True
        if found is not None:
            self.future.set_result(found)
        return found is not None


def _settle(future: Future, command: Callable[[], object]) -> None:
    """Runs a command into its future, unless its caller has cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = command()
    except Exception as e:
        future.set_exception(e)
    else:
        future.set_result(result)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _go_on(answer: Future) -> None:
    """Ends the caller's work if nobody waits for its answer any more."""
    if answer.cancelled():
        raise CancelledError


def _running() -> Future[Any]:
    """A future that its caller can no longer cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _error_of(done: Future) -> BaseException | None:
    return Unavailable("the server has stopped") if done.cancelled() else done.exception()


def _follow(source: Future, target: Future) -> None:
    """Gives `target` the result of `source` when it is there."""

    def copy(done: Future) -> None:
        error = _error_of(done)
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(copy)


def _chained(first: Future[S], then: Callable[[S], Future[T]]) -> Future[T]:
    """The result of `then`, which starts when `first` has its own."""
    whole = _running()

    def go_on(done: Future[S]) -> None:
        error = _error_of(done)
        if error is not None:
            whole.set_exception(error)
        else:
            _follow(then(done.result()), whole)

    first.add_done_callback(go_on)
    return whole


def _deliver(sink: Sink, events: list[TokenEvent]) -> bool:
    """Hands events over. A sink that fails loses its own request and no other."""
    try:
        sink(events)
    except Exception:
        log.exception("the receiver of request %s failed; it is aborted", events[0].request_id)
        return False
    return True
