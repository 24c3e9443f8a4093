"""What is asked of a replica, and what may come of it.

Every request that is accepted ends exactly once, with the tokens that its adapter's version draws, or
with an error that a front maps to a status. Every command is answered.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from jlora.adapters.invocation import last_occurrence
from jlora.adapters.registry import Record
from jlora.errors import JloraError, Unavailable
from jlora.replica import Replica
from jlora.sim.world.device import VOCAB, Key, expected
from jlora.sim.world.disk import INVOCATION, SPEC, Disk, Version
from jlora.sim.world.excuses import Command, Excuses
from jlora.sim.world.report import Journal
from jlora.sim.world.sites import Planted, Shortage, Site, Sites
from jlora.types import Request, SamplingParams, TokenEvent

SITES = {
    "sink.fails": Site("the receiver of a request's tokens fails", 0.01),
    "cancel.queued": Site("a client cancels before its request is admitted", 0.0),
    "cancel.copying": Site("a client cancels while copies for it are under way", 0.0),
    "cancel.running": Site("a client cancels while its request runs", 0.0),
}

TENANTS = ("", "a", "b")
NAMES = tuple(f"lora{i}" for i in range(6))
ADAPTED = 0.7  # of the requests
KEPT = 12  # answers that later prompts go on from


@dataclass(frozen=True, slots=True)
class Around:
    """What clients deal with.

    Attributes:
        at: where a request is, for counting: "", or "queued", "copying", "running".
        began: when the engine began the second step before this one.
        context: tokens of the longest context that any adapter has room for, whatever is pinned.
        excuses: which errors may come while the replica is not `over`.
    """

    replica: Replica
    disk: Disk
    versions: tuple[Version, ...]
    record: Callable[[str], Record]  # by name, on the engine's thread
    at: Callable[[int], str]
    began: Callable[[], float]
    now: Callable[[], float]
    block_tokens: int
    context: int
    sites: Sites
    journal: Journal
    excuses: Excuses
    over: Callable[[], bool]


@dataclass(slots=True, eq=False)
class Call:
    """One request, from its submission to its last event."""

    request: Request
    floor: int  # the smallest uid that may answer it
    key: Key | None = None  # from its admission on
    due: float = math.inf  # two steps later nothing of it may come: its deadline, or its admission if that is later
    handle: int | None = None
    got: dict[int, list[int]] = field(default_factory=dict)  # by completion
    open: set[int] = field(default_factory=set)
    stops: dict[int, int] = field(default_factory=dict)  # completion -> the tokens that its front kept
    cancelled: bool = False
    aborted: bool = False  # its end has been carried out
    deaf: bool = False  # its receiver has failed
    refused: bool = False
    submitted: Future[int] | None = None

    @property
    def over(self) -> bool:
        return self.refused or not self.open or (self.deaf and self.handle is not None)


class Clients:
    """All clients of one replica."""

    def __init__(self, around: Around, draw: random.Random):
        self.calls: list[Call] = []  # that have not ended
        self.commands: list[Command] = []  # that are not answered
        self.found: list[AssertionError] = []  # on the product's threads, which must not take it for their own
        self.answered = 0
        self.loaded: set[int] = set()  # the versions that a load's caller was told of
        self._around = around
        self._draw = draw
        self._marks = {version.digest: version for version in around.versions}
        self._floors: dict[str, int] = {}  # name -> smallest uid that a new request may get
        self._names: set[tuple[str, str]] = set()  # of requests, by tenant and id
        self._texts = [self._words(40) for _ in range(3)]  # what prompts begin with
        self._count = 0
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
        request = self._request(name)
        call = Call(request, self._floors.get(name or "", 0), open=set(request.open))
        call.got = {index: [] for index in call.open}
        self.calls.append(call)
        self._say(f"submit {request.id} {request.adapter} {len(request.prompt)}+{request.sampling.max_tokens}")
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
            self.command("abort", replica.abort(call.handle))
        # Commands go in order: when this one is answered, the abort has been carried out.
        self.command("after abort", replica.adapters("", 0), then=lambda _: self._ceases(call))

    def stop(self) -> None:
        """A front has found a stop string."""
        call = self._any()
        if call is None or call.handle is None:
            return
        for index, tokens in call.got.items():
            if tokens and index in call.open and index not in call.stops:
                call.stops[index] = self._draw.randint(1, len(tokens))
                self._say(f"stop {call.request.id}/{index} {call.stops[index]}")
                self.command("stop", self._around.replica.stop(call.handle, index, call.stops[index]))
                return

    def prefetch(self) -> None:
        """Says what will be asked."""
        request = self._request(self._name())
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
        activated = name in NAMES[-2:]
        version = self._draw.choice([v for v in self._around.versions if v.activated == activated])
        self._around.disk.put(name, version)
        self._say(f"write {name} {version.digest[:8]}")

    def erase(self) -> None:
        """A directory goes."""
        name = self._name()
        self._around.disk.remove(name)
        self._say(f"erase {name}")

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
                self._mapped("a command", error)
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

    def _words(self, count: int) -> list[int]:
        return [self._draw.randrange(7, VOCAB) for _ in range(count)]

    def _request(self, name: str | None) -> Request:
        draw = self._draw
        self._count += 1
        text = draw.choice(self._texts)
        prompt = text[: draw.randint(1, len(text))] + self._words(draw.choice((0, 0, 1, 4)))
        if name in NAMES[-2:] and draw.random() < 0.95:  # few places, so that activated prompts meet, too
            prompt = self._texts[0][:24]
            at = draw.choice((0, 3, 5, 6))
            prompt[at:at] = INVOCATION
        sampling = SamplingParams(
            seed=draw.randrange(1 << 32),
            n=draw.choice((1, 1, 1, 1, 2, 3)),
            max_tokens=None if draw.random() < 0.03 else draw.randint(1, 14),
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=tuple(self._words(2)) if draw.random() < 0.2 else (),
        )
        same = self.calls and draw.random() < 0.03  # a name that is in use
        return Request(
            id=draw.choice(self.calls).request.id if same else f"r{self._count}",
            prompt=tuple(prompt[-34:]),
            sampling=sampling,
            adapter=name,
            priority=draw.choice((0, 0, 0, 1, -1)),
            bypass_prefix_cache=draw.random() < 0.05,
            tenant=draw.choice(TENANTS),
            deadline=self._around.now() + 2 * draw.random() if draw.random() < 0.1 else None,
            cache_salt=draw.choice(("", "", "s")),
        )

    def _admitted(self, call: Call, done: Future[int], again: bool) -> None:
        """The engine has taken the request in, or not; on its thread, unless the client cancelled."""
        try:
            self._bind(call, done, again)
        except AssertionError as e:
            self.found.append(e)

    def _bind(self, call: Call, done: Future[int], again: bool) -> None:
        if done.cancelled() or done.exception() is not None:
            call.refused = True
            assert not any(call.got.values()), "tokens before the refusal"
            error = self._answered(f"submit {call.request.id}", done)
            assert error is not None
            gone = done.cancelled() or self._dies(error)
            excused = gone or self._around.excuses.refusal(call.request, error, again)
            assert excused, f"{call.request.id} is refused, and nothing was wrong: {type(error).__name__}: {error}"
            return
        call.handle, request, mark, activation = done.result(), call.request, 0, None
        if request.adapter is not None:
            record = self._around.record(request.adapter)
            assert record.node.uid >= call.floor, "a request is bound to a version that had been replaced or unloaded"
            version = self._marks.get(record.digest)
            assert version is not None, "an adapter is served that is a mix of two"
            mark, activation = version.mark, None
            if version.activated:
                activation = last_occurrence(request.prompt, INVOCATION)
        if request.deadline is not None:
            call.due = max(request.deadline, self._around.now())
        assert request.sampling.seed is not None
        call.key = Key(mark, request.salt, request.sampling.seed, 0, activation)
        self._say(f"admitted {request.id}")

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
        assert event.index in call.open, f"{name} goes on after its end"
        assert call.due >= self._around.began(), f"{name} outlives its deadline by more than two steps"
        tokens = call.got[event.index]
        if event.token_id is not None:
            assert not call.aborted, f"{name} goes on after it was cancelled"
            assert call.key is not None, f"{name} has tokens before its admission"
            key = Key(call.key.mark, call.key.salt, call.key.seed, event.index, call.key.activation)
            right = expected(key, (*call.request.prompt, *tokens), self._around.block_tokens)
            assert event.token_id == right, f"{name}: token {len(tokens)} is {event.token_id}, and must be {right}"
            tokens.append(event.token_id)
        if event.finish_reason is None:
            complete = self._complete(call, tokens, SPEC.max_len)
            assert event.token_id is not None and not complete, f"{name} goes on behind its end"
            return
        call.open.discard(event.index)
        if event.finish_reason == "abort":
            self._aborted(call, event, name)
        elif event.index in call.stops and event.token_id is None:
            assert event.finish_reason == "stop", f"{name} was stopped"
            assert event.usage is not None and event.usage.completion_tokens == call.stops[event.index]
        else:
            assert self._complete(call, tokens, self._around.context), f"{name} ends early"
        if event.error is None and len(tokens) > 2 and len(call.request.prompt) + len(tokens) < 40:
            self._texts.append([*call.request.prompt, *tokens])
            del self._texts[3:-KEPT]

    def _ceases(self, call: Call) -> None:
        call.aborted = True

    def _complete(self, call: Call, tokens: list[int], context: int) -> bool:
        """Whether the answer has come to its end; one without a limit, to so many tokens with its prompt."""
        sampling = call.request.sampling
        ends = tokens[-1] in sampling.stop_token_ids or (tokens[-1] in SPEC.eos_ids and not sampling.ignore_eos)
        if sampling.max_tokens is None:  # as many as fit
            return ends or len(tokens) + len(call.request.prompt) >= context
        return ends or len(tokens) == sampling.max_tokens

    def _aborted(self, call: Call, event: TokenEvent, name: str) -> None:
        if event.error is not None:
            self._mapped(name, event.error)
            excused = self._around.over() or self._around.excuses.request(call.handle)
            assert excused, f"{name} has failed, and nothing has struck it: {type(event.error).__name__}: {event.error}"
            return
        late = call.request.deadline is not None and self._around.now() >= call.request.deadline
        assert call.cancelled or late, f"{name} is aborted, and nobody asked for it"

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
            self._mapped(name, error)
        return error

    def _mapped(self, name: str, error: BaseException) -> None:
        """Whether a front has a status for the error."""
        known = isinstance(error, JloraError | Planted | Shortage | CancelledError)
        assert known, f"{name}: {type(error).__name__}: {error}"


# What clients do, and how often.
OPERATIONS: Mapping[str, int] = {
    "submit": 40, "cancel": 7, "stop": 3, "prefetch": 2, "load": 7, "unload": 2, "pin": 4, "write": 1, "erase": 1,
    "look": 2, "flush": 1,
}  # fmt: skip
