"""The replica in this process: an engine on a thread of its own. See `jlora.replica.Replica`.

Commands reach the engine through a queue and run between two steps, so the engine has no lock.
Files are read, checked, packed and copied on other threads; only the short ends of a load run
between steps.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import TypeVar

import numpy as np

from jlora.adapters.invocation import last_occurrence
from jlora.adapters.registry import Record
from jlora.config import Config
from jlora.engine.built import Built
from jlora.engine.engine import Engine
from jlora.engine.futures import Commands, Wait, chained, done, failed, running, settle
from jlora.engine.loaders import Loaders, Read
from jlora.engine.profiling import Profiler
from jlora.engine.records import NewAdapter
from jlora.engine.remaining import Remaining
from jlora.engine.sources import Reader
from jlora.engine.watch import Watch
from jlora.errors import AlreadyExists, Unavailable
from jlora.gaps import Gaps
from jlora.ports import DiskFiles, System
from jlora.replica import Load, Replica, ReplicaInfo, ReplicaState, Sink
from jlora.types import AdapterInfo, Invocation, Owners, PrefetchResult, ProfileResult, Request, TokenEvent

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_S = 0.1  # pause between two rounds of an idle engine
COMMANDS_S = 0.01  # how long commands may run between two steps; the one that runs then ends, the others wait
COMPILE_S = 600.0  # a step that compiles for longer counts as stuck
DRAIN_S = 1e8  # the longest timeout of a drain: a thread cannot wait for longer
COUNTING_S = 1.0  # between two snapshots if a snapshot has to walk the whole tree


class LocalReplica(Replica):
    """One engine, ready to serve; see `start`."""

    def __init__(self, built: Built, system: System):
        self._built = built
        self._engine: Engine = built.engine
        self._system = system
        self._commands = Commands()
        self._waits: list[Wait] = []
        self._live: dict[int, _Live] = {}  # by handle; only the engine's thread
        self._names: dict[tuple[str, str], _Live] = {}  # by tenant and id, from the submission on; any thread
        self._work = system.threads.event()
        self._beat = system.clock()
        self._gaps = Gaps(system.clock)
        self._draining = self._stopping = self._stepping = False
        self._failure: Future[BaseException] = running()
        self._ended = False  # the thread takes no more commands
        self._asks: queue.SimpleQueue[Future[ReplicaState]] = queue.SimpleQueue()
        self._snapshot, self._counted = self._look(), system.clock()
        self._failing = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._profiler = Profiler(built.info.config.serve.profile_dir, system.clock)
        self._loaders = Loaders(built, system, self.between_steps)
        self._watch = Watch(built, system, self.between_steps)
        self._remaining = Remaining(built, system, self.between_steps)
        system.garbage.begin()
        system.threads.watch(lambda name, error: self._fail(error))
        self._thread = system.threads.start("jlora-engine", self._loop)
        system.threads.start("jlora-watch", self._watch.run)
        if not self._remaining.finished:
            self._remaining.begin()
            # What the programs leave behind is loaded for good, too.
            self.warm().add_done_callback(lambda done: done.exception() or system.garbage.begin())

    @classmethod
    def start(cls, config: Config, progress: bool = True, system: System | None = None) -> LocalReplica:
        """Loads the model and its adapters, and starts the engine. Raises JloraError with one clear line."""
        from jlora.engine.build import build  # it imports jax, and a simulation builds its engine without

        system = system or System(files=DiskFiles(config.adapters.roots))
        return cls(build(config, progress, system), system)

    @property
    def info(self) -> ReplicaInfo:
        return self._built.info

    def warm(self) -> Future[bool]:
        """Done when every program is compiled. Requests need not wait for it; measurements should."""
        return self._when(lambda: (self._remaining.finished and self._built.runner.programs_left == 0) or None)

    # -- requests ---------------------------------------------------------------------------

    def check(self, request: Request) -> Future[None]:
        request = self._searched(request)
        return self.between_steps(lambda: self._engine.check(request))

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        arrived, searched = self._system.clock(), self._searched(request)
        live = _Live((request.tenant, request.id), sink, set(request.open))
        if self._names.setdefault(live.name, live) is not live:  # it lives, or its last event is not out yet
            return failed(AlreadyExists(f"request_id {request.id!r} is in use by a live request"))

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

    def abort(self, handle: int, moved: bool = False) -> Future[bool]:
        return self.between_steps(lambda: self._engine.abort(handle, moved))

    def abort_named(self, request_id: str, tenant: str = "") -> Future[bool]:
        live = self._names.get((tenant, request_id))
        if live is not None and (live.abort is None or live.abort.done()):  # one at a time is enough
            # Its submission, if it has not run, runs first.
            live.abort = self.between_steps(lambda: live.handle is not None and self._engine.abort(live.handle))
        return done(live is not None)

    def stop(self, handle: int, index: int, outputs: int) -> Future[None]:
        return self.between_steps(lambda: self._engine.stop(handle, index, outputs))

    def prefetch(self, request: Request) -> Future[PrefetchResult]:
        request = self._searched(request)
        return self.between_steps(lambda: self._engine.prefetch(request))

    # -- adapters ---------------------------------------------------------------------------

    def load_adapter(
        self, name: str, path: str, pinned: bool = False, replace: bool = False, lazy: bool = False
    ) -> Future[AdapterInfo]:
        return self._loaders.load(Load(name, path, pinned, replace, lazy), self._settled)

    def unload_adapter(self, name: str) -> Future[AdapterInfo]:
        adapters = self._engine.adapters

        def gone(found: tuple[AdapterInfo, list[int]]) -> Future[AdapterInfo]:
            info, uids = found
            return self._when(lambda: info if adapters.are_gone(uids) else None)

        return chained(self.between_steps(lambda: (adapters.get(name), adapters.remove(name))), gone)

    def pin_adapter(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        asked = self.between_steps(lambda: self._engine.adapters.pin_when_read(name, pinned))
        answered = chained(asked, lambda answer: answer)
        return chained(answered, self._settled) if pinned else answered

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        return self.between_steps(lambda: self._engine.adapters.all(after, most))

    def adapter(self, name: str) -> Future[AdapterInfo]:
        return self.between_steps(lambda: self._engine.adapters.get(name))

    def check_adapter(self, name: str) -> None:
        self._engine.adapters.check(name)

    def records(self) -> list[Record]:
        """What is registered, in any order. Any thread may ask, and read what it says."""
        return self._engine.adapters.records()

    def register(self, new: NewAdapter) -> Future[AdapterInfo]:
        """Makes an adapter servable that is read when a request needs it. Fails as `Adapters.register`."""
        return self.between_steps(lambda: self._engine.adapters.register(new))

    def keep(self, name: str, lost: bool = False) -> Future[AdapterInfo]:
        """Reads an adapter that is on the disk only into memory, when there is room.

        `lost`: its files are gone, and a peer has it. Fails with NotFound, ResourceExhausted.
        """
        return self.between_steps(lambda: self._engine.adapters.keep(name, lost))

    def read_with(self, read: Read) -> None:
        """Has registered adapters read by `read` from now on."""
        self._loaders.read = read

    @property
    def reader(self) -> Reader:
        """What reads adapters' files here."""
        return self._built.reader

    def host_copy(self, record: Record, first: int, count: int) -> Future[np.ndarray | None]:
        """Some blocks of an adapter's host copy, as one array; None if there is no copy any more.

        The blocks are read on the caller's thread. They are its own if the copy is still there afterwards.
        """
        node, host = record.node, record.node.host
        if node.saving or not host:
            return done(None)
        data = self._built.parts.swapper.read(host[first : first + count])
        return self.between_steps(lambda: data if record.node is node and node.host == host else None)

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
        future: Future[ReplicaState] = running()
        self._asks.put(future)
        self._work.set()
        if self._stepping or self._ended:
            self._answer_asks()
        return future

    def owners(self) -> Future[Owners]:
        return self.between_steps(self._engine.owners)

    def flush_cache(self) -> Future[int]:
        return self.between_steps(self._engine.flush_cache)

    def check_integrity(self) -> Future[None]:
        """Fails with AssertionError if the pool or the tree is inconsistent."""
        return self.between_steps(self._engine.check_integrity)

    def profile(self, steps: int, replica: str = "") -> Future[ProfileResult]:
        loads, steps_done = self._loaders.loads, lambda: self._engine.stats().steps
        return self._profiler.trace(steps, replica, loads, steps_done, self._when)

    def heartbeat_age(self) -> float:
        now, runner = self._system.clock(), self._built.runner
        if self._ended or self._failure.done():
            return math.inf
        if runner.compiling and now - self._beat < COMPILE_S:
            return 0.0
        return now - max(self._beat, runner.compiled_at)

    @property
    def compiling(self) -> bool:
        return self._built.runner.compiling

    @property
    def programs_left(self) -> int:
        return self._built.runner.programs_left

    @property
    def failure(self) -> Future[BaseException]:
        return self._failure

    def drain(self, timeout_s: float | None = None) -> Future[bool]:
        self._draining = True
        drained, over = running(), threading.Lock()

        def answer(result: bool) -> None:
            if over.acquire(blocking=False):  # once, whoever comes first
                drained.set_result(result)

        ended = self._when(lambda: None if self._engine.busy else True)
        ended.add_done_callback(lambda _: answer(True))  # also if it fails: a dead engine has no live request
        if timeout_s is not None:  # on a thread of its own: a step may take longer

            def wait() -> None:
                try:
                    self._system.threads.wait(drained, min(DRAIN_S, timeout_s))
                except Exception:  # a failure of this thread would end the engine, and with it what is drained
                    log.exception("the drain's timeout is lost; the drain ends with the last request")
                else:
                    answer(not self._names)

            self._system.threads.start("jlora-drain", wait)
        return drained

    def close(self) -> None:
        self._draining = self._stopping = True
        self._work.set()
        self._thread.join()
        with self._closing:
            if self._closed:
                return
            with ExitStack() as steps:  # the last one first, and each whatever another raises
                steps.callback(self._built.catalogue.close)
                steps.callback(self._engine.close)
                steps.callback(self._remaining.close)
                steps.callback(self._watch.close)
                steps.callback(self._loaders.close)
            self._closed = True  # not before: a caller that was interrupted comes again, and a step may run twice

    # -- the thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()

    def _run(self) -> None:
        while not self._stopping and not self._failure.done():
            self._beat = self._system.clock()
            self._obey()
            self._loaders.begin()
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
            elif not self._commands and self._work.wait(IDLE_S):
                self._work.clear()

    def _step(self) -> float:
        """One step and its events; the seconds in which it waited for the device and for copies."""
        engine, clock = self._engine, self._system.clock
        if engine.countable or self._beat - self._counted >= COUNTING_S:
            self._snapshot, self._counted = self._look(), self._beat
        self._stepping = True  # `state` answers with the snapshot meanwhile: the step may compile, or hang
        try:
            self._answer_asks()
            began, before = clock(), engine.host_s
            events = engine.step()
            waited = clock() - began - (engine.host_s - before)
        finally:
            self._stepping = False
        self._send(events)
        self._system.garbage.after_step()
        return waited

    def _obey(self) -> None:
        """Runs the commands that have come, then answers the waits that they or the last step fulfilled."""
        until = self._system.clock() + COMMANDS_S
        for _ in range(len(self._commands)):  # those that come meanwhile wait for the next step
            if (taken := self._commands.take()) is None:  # the last ones have just been cancelled
                break
            if (error := settle(*taken)) is not None:
                self._engine.survive(error)  # the command's future may have no reader
            taken = error = None  # breaks a cycle: the command's future holds the error, and its traceback this frame
            if self._system.clock() >= until:
                break
        self._answer_waits()
        if not self._asks.empty():
            self._snapshot = self._look()
            self._answer_asks()

    def _look(self) -> ReplicaState:
        return ReplicaState(self._engine.cache_state(), self._engine.stats(), self._gaps.longest())

    def _answer_asks(self) -> None:
        """Any thread may call: each future gets one answer."""
        while True:
            try:
                future = self._asks.get_nowait()
            except queue.Empty:
                return
            if self._ended:
                future.set_exception(self._refusal())
            else:
                future.set_result(self._snapshot)

    def _answer_waits(self) -> None:
        self._waits = [wait for wait in self._waits if not wait.answered()]

    def _fail(self, error: BaseException) -> None:
        """One of the replica's threads has failed; it runs on that thread."""
        with self._failing:
            if not self._failure.done():
                self._failure.set_result(error)
        self._work.set()

    def _end(self) -> None:
        """Fails whatever waits for an engine that is gone."""
        self._ended = self._stopping = True
        self._refuse_commands()
        self._answer_asks()
        for wait in self._waits:
            if not wait.future.done():
                wait.future.set_exception(self._refusal())
        self._engine.adapters.shelf.abandon(self._refusal())
        ended, self._live = self._live, {}
        for live in ended.values():
            del self._names[live.name]
            last = TokenEvent(live.name[1], 0, None, finish_reason="abort", error=self._refusal())
            _deliver(live.sink, [replaced(last, index=index) for index in sorted(live.open)])

    def _send(self, events: Iterable[TokenEvent]) -> None:
        by_request: dict[int, list[TokenEvent]] = {}
        for event in events:
            by_request.setdefault(event.handle, []).append(event)
        for handle, batch in by_request.items():
            live = self._live.get(handle)
            if live is None:  # its submission has failed, so nobody waits for it
                self._engine.abort(handle)
                continue
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
        future = self._commands.put(command)
        self._work.set()
        if self._ended:  # the thread may have missed this one
            self._refuse_commands()
        return future

    def _when(self, look: Callable[[], T | None]) -> Future[T]:
        """Answers with the first value of `look` that is not None; it runs on the engine's thread."""
        future = running()

        def begin() -> Future[T]:
            self._waits.append(Wait(look, future))
            return future

        return chained(self.between_steps(begin), lambda waiting: waiting)

    def _refuse_commands(self) -> None:
        while (taken := self._commands.take()) is not None:
            future, _ = taken
            if future.set_running_or_notify_cancel():
                future.set_exception(self._refusal())

    def _refusal(self) -> Unavailable:
        why = "the engine has failed; the server's log says why"
        return Unavailable(why if self._failure.done() else "the server has stopped")


@dataclass(slots=True, eq=False)
class _Live:
    """A request from its submission to its last event."""

    name: tuple[str, str]  # tenant and id
    sink: Sink
    open: set[int]  # completions that have not ended
    handle: int | None = None  # None: the engine does not have it yet
    abort: Future[bool] | None = None  # the last one asked for by name


def _deliver(sink: Sink, events: list[TokenEvent]) -> bool:
    """Hands events over. A sink that fails loses its own request and no other."""
    try:
        sink(events)
    except BaseException:  # a receiver's SystemExit is no reason to end the engine's thread
        log.exception("the receiver of request %s failed; it is aborted", events[0].request_id)
        return False
    return True
