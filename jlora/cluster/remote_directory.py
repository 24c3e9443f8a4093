"""The directory of a router that has no controller of its own: it follows one in another process.

While the controller is away, requests go on with the last table; only loads, unloads and pins wait for it.

The controller sends a message each second. A stopped process, or a machine that is gone, closes no connection: when
nothing comes, this side closes it and makes a new one.
"""

from __future__ import annotations

import bisect
import logging
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, NoReturn

import grpc

from jlora.adapters.near import NearNames
from jlora.cluster.calls import LOAD_S, error_of, record
from jlora.cluster.directory import Directory, Members, Version, nearest_tier, peers
from jlora.cluster.proto import directory_pb2 as proto
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.engine.futures import done, running
from jlora.errors import JloraError, NotFound, Unavailable
from jlora.ports import Clock, Threads
from jlora.replica import Load
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

NO_CONTROLLER = (
    "it serves no adapters to further routers: cluster.controller must be the address of a `jlora cluster` that has "
    "cluster.token_file and no cluster.controller of its own"
)
# What gRPC itself says of a connection, often with addresses; all else is what the controller says.
TRANSPORT = re.compile(r"connect|ipv[46]:|dns|socket", re.IGNORECASE)
AGAIN_S = 0.5  # before the controller is called again
GOODBYE_S = 0.5  # that the controller may take to end the stream of a router that stops
SILENT_S = 5.0  # without a message: the controller, or the way to it, is gone
# A new connection for each channel, and soon after the controller has come back.
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 2000))


class _Outbox:
    """What a stream has to say; whoever iterates waits for more, until it is closed."""

    def __init__(self, threads: Threads):
        self._more = threads.condition()
        self._messages: deque[proto.Using] = deque()
        self._closed = False

    def put(self, message: proto.Using) -> None:
        with self._more:
            self._messages.append(message)
            self._more.notify()

    def close(self) -> None:
        with self._more:
            self._closed = True
            self._more.notify()

    def __iter__(self) -> Iterator[proto.Using]:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._messages or self._closed)
                if self._closed:
                    return
                message = self._messages.popleft()
            yield message


class RemoteDirectory(Directory):
    """Follows the controller at `address` from `start` to `close`."""

    def __init__(self, address: str, router: str, login: Login, threads: Threads, clock: Clock = time.monotonic):
        """`router` names this process among the routers; the token of the service is in `login`."""
        self._address = address
        self._router = router
        self._login = login
        self._threads, self._clock = threads, clock
        self._lock = threading.Lock()
        # Takes where requests go, version key -> address of a replica -> part.
        self.placed: Callable[[Mapping[str, Mapping[str, float]]], None] = lambda parts: None
        self.known: Future[None] = running()  # ends with the first table
        self._epoch = 0  # 0: no table has come yet
        self._stream_epoch = 0  # the same of the present stream: another controller counts from the beginning
        self._versions: dict[str, Version] = {}
        self._infos: dict[str, AdapterInfo] = {}
        self._names: list[str] = []  # in order
        self._near = NearNames()
        self._requests: Counter[str] = Counter()  # by key
        self._served: dict[str, proto.Served] = {}  # by name
        self._away = ""  # why the controller does not answer, as clients may read it
        self._using = _Outbox(threads)  # of the present stream
        self._ended = threads.event()
        self._quiet = threads.event()  # while no stream is open
        self._quiet.set()
        self._members: Members = lambda: ()
        self._heard = math.inf  # when the controller's last message came; inf while no stream is open
        self._connect()

    def start(self) -> None:
        self._threads.start("jlora-directory", self._follow)
        self._threads.start("jlora-directory-look", self._look)

    def close(self) -> None:
        """Where no request goes on, a controller that listens is told so, and waits for this router no more."""
        with self._lock:
            self._ended.set()
            leaves = not self._requests
            if leaves:
                self._say(self._taken(), leaves)
        if leaves:
            self._quiet.wait(GOODBYE_S)
        self._channel.close()

    def _connect(self) -> None:
        self._channel = self._login.channel(self._address, OPTIONS)
        self._stub = rpc.DirectoryStub(self._channel)

    def follow(self, members: Members) -> None:
        self._members = members

    # -- what requests ask ----------------------------------------------------------------------

    def current(self, name: str) -> Version:
        return self._versions.get(name) or self._unknown(name)

    def peers(self, version: Version, near: str) -> tuple[str, ...]:
        return peers(self._members(), version.key, near)

    def begin(self, version: Version) -> None:
        with self._lock:
            self._requests[version.key] += 1

    def asked(self, version: Version, prompt: int) -> None:
        with self._lock:
            one = self._news(version)
            one.requests, one.prompt = one.requests + 1, one.prompt + prompt

    def end(self, version: Version, output: int = 0) -> None:
        with self._lock:
            one = self._news(version)
            one.ended, one.output = one.ended + bool(output), one.output + output
            self._requests[version.key] -= 1
            if self._requests[version.key]:
                return
            del self._requests[version.key]
        if self._versions.get(version.name) != version:
            self._tell()

    def _news(self, version: Version) -> proto.Served:
        """What the controller has not been told of an adapter's requests."""
        return self._served.setdefault(version.name, proto.Served(name=version.name))

    def _unknown(self, name: str) -> NoReturn:
        if not self._epoch:
            why = f" ({self._away})" if self._away else ""
            raise Unavailable(f"the controller has not answered yet{why}; try again")
        with self._lock:
            raise NotFound(f"adapter {name!r} is not loaded", self._near.of(name))

    # -- what the controller answers --------------------------------------------------------------

    def load(self, load: Load) -> Future[AdapterInfo]:
        return self._ask(self._stub.Load, pb.LoadAdapterRequest(**asdict(load)))

    def unload(self, name: str) -> Future[AdapterInfo]:
        return self._ask(self._stub.Unload, pb.UnloadAdapterRequest(name=name))

    def pin(self, name: str, pinned: bool) -> Future[AdapterInfo]:
        return self._ask(self._stub.Pin, pb.PinAdapterRequest(name=name, pinned=pinned))

    def adapter(self, name: str) -> Future[AdapterInfo]:
        return self._ask(self._stub.Get, pb.GetAdapterRequest(name=name))

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[AdapterInfo]]:
        """From the last table; without the ranks of modules."""
        members = self._members()

        def told(info: AdapterInfo, key: str) -> AdapterInfo:
            return replace(info, tier=nearest_tier(members, key), running=self._requests[key])

        with self._lock:
            first = bisect.bisect_right(self._names, after)
            names = self._names[first : None if most is None else first + most]
            return done([told(self._infos[name], self._versions[name].key) for name in names])

    def _ask(self, call: Any, message: object) -> Future[AdapterInfo]:
        """The answer; Unavailable while no controller lives. Its caller can cancel the call."""
        answer: Future[AdapterInfo] = Future()
        asked = call.future(message, timeout=LOAD_S)

        def ended(asked: Any) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(record(asked.result()))
            except grpc.RpcError as e:
                answer.set_exception(self._refusal(e))
            except grpc.FutureCancelledError:
                answer.set_exception(Unavailable("the controller has not answered"))
            except Exception as e:
                answer.set_exception(e)

        asked.add_done_callback(ended)
        answer.add_done_callback(lambda answer: answer.cancelled() and asked.cancel())
        return answer

    def _refusal(self, error: grpc.RpcError) -> JloraError:
        """What a client is told; the controller's address is for the log."""
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(NO_CONTROLLER)
        if code != grpc.StatusCode.UNAVAILABLE or not TRANSPORT.search(details):
            return error_of(error, "the controller")
        log.info("the controller at %s: %s", self._address, details)
        return Unavailable(
            "no controller answers: adapters cannot be loaded, unloaded or pinned now; requests for those that are "
            "known go on"
        )

    # -- the table ------------------------------------------------------------------------------

    def _follow(self) -> None:
        said = -1  # the epoch at which the log says that it is away, once
        while not self._ended.wait(0):
            try:
                self._watch()
            except Exception as e:
                if self._ended.wait(0):
                    return
                if not isinstance(e, grpc.RpcError):
                    log.exception("following the controller at %s has failed; it goes on", self._address)
                else:
                    self._away = NO_CONTROLLER if e.code() == grpc.StatusCode.UNIMPLEMENTED else ""
                    if said != self._epoch:
                        reason = self._away or e.details() or e.code().name
                        log.warning("the controller at %s is away: %s", self._address, reason)
                said = self._epoch
            finally:
                self._heard = math.inf
            self._ended.wait(AGAIN_S)

    def _watch(self) -> None:
        """One stream of the controller, until it ends."""
        using = _Outbox(self._threads)
        using.put(proto.Using(router=self._router))
        with self._lock:
            if self._ended.wait(0):
                return
            self._using, self._stream_epoch = using, 0
            self._quiet.clear()
        try:
            parts: list[proto.Table] = []
            self._heard = self._clock()
            for table in self._stub.Watch(iter(using)):
                self._heard = self._clock()
                parts.append(table)
                if not table.more:  # the whole of an epoch at once: no name is unknown meanwhile
                    self._apply(parts)
                    self._epoch = self._stream_epoch = table.epoch
                    parts = []
                    self._report()
                    if not self.known.done():
                        self.known.set_result(None)
        finally:
            using.close()
            self._quiet.set()

    def _look(self) -> None:
        """Gives up a connection that is silent."""
        while not self._ended.wait(min(1.0, SILENT_S / 2)):
            if self._clock() - self._heard <= SILENT_S:
                continue
            log.warning("the controller at %s has said nothing for %g s", self._address, SILENT_S)
            self._heard = math.inf
            with self._lock:
                if not self._ended.wait(0):
                    silent = self._channel
                    self._connect()
                    silent.close()  # ends the stream

    def _apply(self, parts: Sequence[proto.Table]) -> None:
        infos = {entry.info.name: (record(entry.info), entry.path) for part in parts for entry in part.entries}
        gone = {name for part in parts for name in part.gone}
        with self._lock:
            if parts[0].whole:
                gone |= self._versions.keys() - infos.keys()
            for name in gone & self._versions.keys():
                del self._versions[name], self._infos[name], self._names[bisect.bisect_left(self._names, name)]
                self._near.remove(name)
            for name, (info, path) in infos.items():
                if name not in self._versions:
                    bisect.insort(self._names, name)
                    self._near.add(name)
                self._infos[name], self._versions[name] = info, Version.of(info, path)
        if any(part.placed for part in parts):
            self.placed({one.key: dict(one.parts) for part in parts for one in part.places})

    def _report(self) -> None:
        """What requests have taken, and what `_tell` says.

        It answers a message of the controller, which listens then. What was said into a stream that has ended would be
        lost: it waits for the next stream.
        """
        with self._lock:
            self._say(self._taken())

    def _tell(self) -> None:
        """Which versions the requests here use that are not current any more; each stream begins with it."""
        with self._lock:
            self._say()

    def _taken(self) -> Iterable[proto.Served]:
        served, self._served = self._served, {}
        return served.values()

    def _say(self, served: Iterable[proto.Served] = (), leaves: bool = False) -> None:
        current = {version.key for version in self._versions.values()}
        using = proto.Using(router=self._router, epoch=self._stream_epoch, served=served, leaves=leaves)
        using.keys.extend(key for key in self._requests if key not in current)
        self._using.put(using)
