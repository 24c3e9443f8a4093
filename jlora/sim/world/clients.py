"""What is asked of a replica, and what may come of it.

Every request that is accepted ends exactly once, with the tokens that its adapter's version draws, or
with an error that a front maps to a status. Every command is answered.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

from jlora.errors import Unavailable
from jlora.sim.world.asked import ACTIVATED, NAMES, Asked
from jlora.sim.world.calls import Answers, Around, Call, mapped
from jlora.sim.world.device import content
from jlora.sim.world.disk import Version
from jlora.sim.world.excuses import Command
from jlora.sim.world.peers import packed
from jlora.sim.world.sites import Planted, Site
from jlora.types import TokenEvent

SITES = {
    "sink.fails": Site("the receiver of a request's tokens fails", 0.01),
    "cancel.queued": Site("a client cancels before its request is admitted", 0.0),
    "cancel.copying": Site("a client cancels while copies for it are under way", 0.0),
    "cancel.running": Site("a client cancels while its request runs", 0.0),
}

ADAPTED = 0.7  # of the requests
LENT = 2  # blocks that another replica asks for at once


class Clients:
    """All clients of one replica."""

    def __init__(self, around: Around, draw: random.Random):
        self.calls: list[Call] = []  # that have not ended
        self.commands: list[Command] = []  # that are not answered
        self.found: list[AssertionError] = []  # on the product's threads, which must not take it for their own
        self.answered = 0
        self.drains = False  # the replica has been asked to take no more requests
        self.loaded: set[int] = set()  # the versions that a load's caller was told of
        self._around = around
        self._draw = draw
        self._answers = Answers(around)
        self._asked = Asked(draw, around.now)
        self._floors: dict[str, int] = {}  # name -> smallest uid that a new request may get
        self._names: set[tuple[str, str]] = set()  # of requests, by tenant and id
        self._last = NAMES[0]
        self._operations = list(OPERATIONS)
        self._weights = list(OPERATIONS.values())

    def act(self) -> None:
        """Does one thing."""
        (name,) = self._draw.choices(self._operations, self._weights)
        getattr(self, name)()

    # -- requests ---------------------------------------------------------------------------------

    def submit(self) -> None:
        """Sends a request."""
        draw, around = self._draw, self._around
        name = draw.choice(NAMES) if draw.random() < ADAPTED else None
        request = self._asked.request(name, [call.request.id for call in self.calls])
        call = Call(request, self._floors.get(name or "", 0), around.now())
        self.calls.append(call)
        had = f" behind {sum(call.had.values())}" if request.done else ""
        self._say(f"submit {request.id} {request.adapter} {len(request.prompt)}+{request.sampling.max_tokens}{had}")
        again = (request.tenant, request.id) in self._names
        self._names.add((request.tenant, request.id))
        call.submitted = around.replica.submit(request, lambda events: self._take(call, events))
        call.submitted.add_done_callback(lambda done: self._admitted(call, done, again))

    def cancel(self) -> None:
        """Ends a request whose client is gone, in one of the ways that fronts have."""
        call, replica = self._any(), self._around.replica
        if call is None or call.submitted is None:
            return
        call.cancelled = True
        where = "queued" if call.handle is None else self._around.at(call.handle)
        if where:
            self._around.sites.count(f"cancel.{where}")
        self._say(f"cancel {call.request.id} {where}")
        if call.handle is None and self._draw.random() < 0.5 and call.submitted.cancel():
            return
        if call.handle is None or self._draw.random() < 0.5:
            self.command("abort", replica.abort_named(call.request.id, call.request.tenant))
        else:
            self.command("abort", replica.abort(call.handle, moved=self._draw.random() < 0.5))
        # Commands go in order: when this one is answered, the abort has been carried out.
        self.command("after abort", replica.adapters("", 0), then=lambda _: self._ceases(call))

    def stop(self) -> None:
        """A front has found a stop string."""
        call = self._any()
        if call is None or call.handle is None:
            return
        for index, tokens in call.got.items():
            had = call.had[index]
            if len(tokens) > had and index in call.open and index not in call.stops:
                call.stops[index] = self._draw.randint(had + 1, len(tokens))
                self._say(f"stop {call.request.id}/{index} {call.stops[index]}")
                self.command("stop", self._around.replica.stop(call.handle, index, call.stops[index]))
                return

    def prefetch(self) -> None:
        """Says what will be asked."""
        request = self._asked.request(self._name())
        self.command("prefetch", self._around.replica.prefetch(request), request.adapter or "").hint = request

    # -- adapters -----------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads an adapter, often in the place of another of its name."""
        draw, name = self._draw, self._name()
        if draw.random() < 0.6:
            self.write(name)
        pinned, replace, lazy = draw.random() < 0.1, draw.random() < 0.7, draw.random() < 0.6
        self._say(f"load {name} {pinned} {replace} {lazy}")
        loading = self._around.replica.load_adapter(name, name, pinned, replace, lazy)
        command = self.command("load", loading, name, lambda info: self._serves(name, info.uid))
        command.replaces = replace
        if draw.random() < 0.1:
            command.cancelled = True
            command.cancelled = loading.cancel()

    def unload(self) -> None:
        """Unloads an adapter."""
        name = self._name()
        gone = self._around.replica.unload_adapter(name)
        self.command("unload", gone, name, lambda info: self._raise(name, info.uid + 1))

    def pin(self) -> None:
        """Pins an adapter or unpins it, or does so with all."""
        name, on = self._name(), self._draw.random() < 0.5
        for each in NAMES if self._draw.random() < 0.1 else (name,):
            self._say(f"pin {each} {on}")
            if not on:
                self._around.excuses.unpins(each)
            self.command("pin", self._around.replica.pin_adapter(each, on), each)

    def write(self, name: str = "") -> None:
        """Another version takes a directory's place."""
        name = name or self._name()
        version = self._version(name)
        self._around.disk.put(name, version)
        self._say(f"write {name} {version.digest[:8]}")

    def erase(self) -> None:
        """A directory goes."""
        name = self._name()
        self._around.disk.remove(name)
        self._say(f"erase {name}")

    def register(self) -> None:
        """Makes a version known that is read when a request needs it: most often the one on the disk."""
        name = self._name()
        known = self._draw.random() < 0.7 and self._around.disk.digest(name)
        new = packed()[known or self._version(name).digest]
        self._say(f"register {name} {new.digest[:8]}")
        registered = self._around.replica.register(
            replace(new, name=name, path=os.path.abspath(name), data=None, stamp=())
        )
        self.command("register", registered, name, lambda info: self._serves(name, info.uid))

    def keep(self) -> None:
        """Asks that an adapter be read into memory, perhaps because its files are gone."""
        name, lost = self._name(), self._draw.random() < 0.5
        self._say(f"keep {name} {lost}")
        self.command("keep", self._around.replica.keep(name, lost), name)

    def lend(self) -> None:
        """Another replica asks for blocks of an adapter that is in memory."""
        records = sorted(self._around.replica.records(), key=lambda record: record.name)
        if not records:
            return
        record = self._draw.choice(records)
        if record.digest not in packed():  # a mix of two, which its next request shows
            return
        right = packed()[record.digest].data
        first = self._draw.randrange(len(right))
        lent = self._around.replica.host_copy(record, first, LENT)

        def look(found: Any) -> None:
            if found is not None and list(found) != [content(block) for block in right[first : first + LENT]]:
                self.found.append(AssertionError(f"another replica gets other blocks of {record.name}"))

        self.command("lend", lent, record.name, look)

    # -- the rest -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Asks for what a page of the server shows."""
        replica = self._around.replica
        ask = self._draw.choice((replica.state, replica.adapters, replica.owners))
        self.command("look", ask())

    def flush(self) -> None:
        """Drops the cache."""
        self.command("flush", self._around.replica.flush_cache())

    def heed(self, done: Future[Any]) -> None:
        """A command has ended, which may be the product's own."""
        error = None if done.cancelled() else done.exception()
        try:
            if error is not None:
                mapped("a command", error)
        except AssertionError as e:
            self.found.append(e)

    def check(self) -> None:
        """What was answered since the last time, and what has ended."""
        left = []
        for command in self.commands:
            if not command.future.done():
                left.append(command)
            else:
                self._answered(str(command), command.future)
        self.commands = left
        self.calls = [call for call in self.calls if not call.over]

    @property
    def live(self) -> bool:
        """Whether a request that was accepted has not ended, as far as its front has heard."""
        return any(call.handle is not None and not call.over for call in self.calls)

    # -- inside -----------------------------------------------------------------------------------------

    def _any(self) -> Call | None:
        live = [call for call in self.calls if not call.over and not call.cancelled]
        return self._draw.choice(live) if live else None

    def _name(self) -> str:
        """Draws an adapter's name, often the previous one, so that operations on one adapter overlap."""
        if self._draw.random() < 0.6:
            self._last = self._draw.choice(NAMES)
        return self._last

    def _say(self, line: str) -> None:
        self._around.journal.write(f"{self._around.now():.6f} {line}")

    def _version(self, name: str) -> Version:
        activated = name in ACTIVATED
        return self._draw.choice([v for v in self._around.versions if v.activated == activated])

    def _admitted(self, call: Call, done: Future[int], again: bool) -> None:
        """The engine has taken the request in, or not; on its thread, unless the client cancelled."""
        try:
            self._bind(call, done, again)
        except AssertionError as e:
            self.found.append(e)

    def _bind(self, call: Call, done: Future[int], again: bool) -> None:
        if done.cancelled() or done.exception() is not None:
            call.refused = True
            assert call.untouched, "tokens before the refusal"
            error = self._answered(f"submit {call.request.id}", done)
            assert error is not None
            gone = done.cancelled() or self._dies(error) or (self.drains and isinstance(error, Unavailable))
            excused = gone or self._around.excuses.refusal(call.request, error, again)
            assert excused, f"{call.request.id} is refused, and nothing was wrong: {type(error).__name__}: {error}"
            return
        call.handle = done.result()
        self._answers.admitted(call)
        self._say(f"admitted {call.request.id}")

    def _take(self, call: Call, events: list[TokenEvent]) -> None:
        """Events reach the front."""
        try:
            for event in events:
                self._check(call, event)
        except AssertionError as e:
            self.found.append(e)
        if call.open and self._around.sites.fires("sink.fails"):
            call.deaf = True
            raise Planted("sink.fails")

    def _check(self, call: Call, event: TokenEvent) -> None:
        name = f"{call.request.id}/{event.index}"
        self._say(f"event {name} {event.token_id} {event.finish_reason} {type(event.error).__name__}")
        if call.deaf:
            return
        self._answers.check(call, event)
        if event.finish_reason is not None and event.error is None:
            prompt, tokens = call.request.prompt, call.got[event.index]
            if len(tokens) > 2 and len(prompt) + len(tokens) < 40:
                self._asked.answered((*prompt, *tokens))

    def _ceases(self, call: Call) -> None:
        call.aborted = True

    def command(
        self, kind: str, future: Future[Any], name: str = "", then: Callable[[Any], None] | None = None
    ) -> Command:
        """Waits for the answer of a command, and for `then` with it."""
        command = Command(kind, name, self._around.now(), future)
        self.commands.append(command)
        future.add_done_callback(lambda done: self._excuse(command))
        if then is not None:
            future.add_done_callback(lambda done: done.cancelled() or done.exception() or then(done.result()))
        return command

    def _excuse(self, command: Command) -> None:
        """It has been answered just now, on the engine's thread or on a loader's."""
        future = command.future
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None and not (self._dies(error) or self._around.excuses.command(command, error)):
            what = f"{command} has failed, and nothing was wrong with it: {type(error).__name__}: {error}"
            self.found.append(AssertionError(what))

    def _dies(self, error: BaseException) -> bool:
        """Whether the replica has failed, or its thread ends just now: the command under way hears of it first."""
        around = self._around
        ends = isinstance(error, Unavailable) and str(error).startswith("the engine ends: ")
        return around.over() or (around.sites.ended and ends)

    def _serves(self, name: str, uid: int) -> None:
        self.loaded.add(uid)
        self._raise(name, uid)

    def _raise(self, name: str, uid: int) -> None:
        self._floors[name] = max(self._floors.get(name, 0), uid)

    def _answered(self, name: str, done: Future[Any]) -> BaseException | None:
        """The error of a command that has ended."""
        self.answered += 1
        error = CancelledError() if done.cancelled() else done.exception()
        self._say(f"{name}: {type(error).__name__}")
        if error is not None:
            mapped(name, error)
        return error


# What clients do, and how often.
OPERATIONS: Mapping[str, int] = {
    "submit": 40, "cancel": 7, "stop": 3, "prefetch": 2, "load": 7, "unload": 2, "pin": 4, "write": 1, "erase": 1,
    "look": 2, "flush": 1, "register": 2, "keep": 2, "lend": 2,
}  # fmt: skip
