"""Sends requests to replicas, and delivers their tokens.

A new request waits until the policy finds a replica for it. If that replica is lost, the request waits again, and
continues after the tokens that it has delivered. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace

from jlora.cluster import merged, versions, wire
from jlora.cluster.alike import Alike
from jlora.cluster.attach import Attached, Terms
from jlora.cluster.balance import Move, Pace
from jlora.cluster.books import Books
from jlora.cluster.choice import Choice
from jlora.cluster.directory import Directory, Member, Version
from jlora.cluster.entry import Entry
from jlora.cluster.prompts import Prompts, ask_of
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.requests import MOST_LOSSES, PATIENCE_S, Broken, Routed, Table
from jlora.cluster.routing.policy import Policy
from jlora.cluster.view import View
from jlora.errors import Busy, DataLoss, NotFound, QueueFull, ResourceExhausted, Unavailable, WeightsGone
from jlora.replica import ReplicaInfo, Sink
from jlora.types import Request, TokenEvent

log = logging.getLogger(__name__)

GRACE_S = 0.25  # behind a deadline: the replica that runs the request ends it first, and knows its times
SENDS = 512  # of requests that wait, at once: the event loop has more to do


@dataclass(slots=True)
class Dispatcher:
    """See the module. A `Receiver` of its links.

    Attributes:
        names: submissions that have not ended, by tenant and id. Any thread may add one.
        up_at: when a replica last reported that it takes requests.
        pace: measured times of answers.
        resumed: attempts that continue a lost one. Moves by a plan do not count.
        entries: what the dispatcher notes of each live request, by handle.
        choice: chooses a replica for an attempt.
        prompts: which prompts were sent to which replica.
    """

    directory: Directory
    policy: InitVar[Policy]
    terms: Terms
    seeds: random.Random
    table: Table = field(default_factory=Table)
    books: Books = field(default_factory=Books)
    links: dict[str, Attached] = field(default_factory=dict)
    names: dict[tuple[str, str], Future[int]] = field(default_factory=dict)
    up_at: float = field(init=False)
    pace: Pace = field(default_factory=Pace)
    resumed: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    choice: Choice = field(init=False)
    prompts: Prompts = field(default_factory=Prompts)
    _handles: dict[tuple[str, str], int] = field(default_factory=dict)  # of the names, once they are admitted
    _info: ReplicaInfo | None = None
    _alike: Alike = field(init=False)

    def __post_init__(self, policy: Policy) -> None:
        self.up_at = self.terms.clock()
        self.choice = Choice(policy, self.books, self.links)
        self._alike = Alike(self.terms.clock)

    # -- the service ------------------------------------------------------------------------

    @property
    def info(self) -> ReplicaInfo | None:
        """Of the service as one replica; None before one has been attached."""
        return self._info

    @property
    def attached(self) -> list[Attached]:
        """The replicas with a stream now."""
        return [one for one in self.links.values() if one.channel is not None]

    def members(self) -> list[Member]:
        """The replicas that are up, and those that drain. Any thread may call."""
        view = self.books.view
        links = list(self.links.values())
        seen = [(one, view.get(one.name)) for one in links]  # the loop's thread may take it away just now
        there = [(one, it) for one, it in seen if it is not None and it.health in ("up", "draining")]
        return [Member.of(one.address, it) for one, it in there]

    def place(self, addresses: Mapping[str, str]) -> None:
        """The service's replicas from now on, by name."""
        for one in list(self.links.values()):
            if addresses.get(one.name) != one.address:
                del self.links[one.name]
                one.stop()
                self.books.gone(one.name)
        for name, address in addresses.items():
            if name not in self.links:
                self.links[name] = Attached(name, address, self.terms, self)
                self.books.heard(self.links[name].view())
                self.links[name].start()

    # -- commands -----------------------------------------------------------------------------

    def version(self, request: Request) -> Version | None:
        """The version that answers it. Raises NotFound, InvalidArgument as `Replica.submit`."""
        return versions.version_of(self.directory, request, self._info)

    def admit(self, request: Request, sink: Sink, submitted: Future[int]) -> None:
        """Takes a request and sends it as soon as a replica is there. Raises what `Replica.submit` fails with."""
        self._check_room(request.sampling.n)
        version = versions.held(self.directory, request, self._info)
        if request.sampling.seed is None:
            sampling = replace(request.sampling, seed=self.seeds.getrandbits(63))
            request = replace(request, sampling=sampling)
        if version is not None:
            self.directory.asked(version, len(request.prompt))
        routed = self.table.add(request, version, sink, self.terms.clock())
        self.entries[routed.handle] = Entry(submitted, self.prompts.chain(request, version))
        self._handles[routed.name] = routed.handle
        self._dispatch(routed)

    def _check_room(self, count: int) -> None:
        if self._info is not None:
            engine, live = self._info.config.engine, self.table.completions
            room = engine.max_queue + engine.max_seqs
            if live + count > room >= count:
                raise QueueFull(f"queue is full: {live} completions run or wait, limit {room}")

    def abort_named(self, name: tuple[str, str], submitted: Future[int]) -> None:
        """Ends the request of this submission, if it lives."""
        if self.names.get(name) is submitted and name in self._handles:
            self.abort(self._handles[name])

    def abort(self, handle: int) -> bool:
        """Ends a request; whether it was live."""
        routed = self.table.get(handle)
        if routed is None:
            return False
        self._cancel(routed)
        self._give(routed, routed.end("abort"))
        return True

    def stop(self, handle: int, index: int, outputs: int) -> None:
        """A front has found a stop string."""
        routed = self.table.get(handle)
        if routed is None or not routed.stop(index, outputs):
            return
        if not routed.rid:
            self._give(routed, routed.stopped())
        else:
            message = link.Stop(rid=routed.rid, index=index, outputs=outputs)
            self.links[routed.replica].send(link.ToReplica(stop=message))

    def end_all(self, error: Exception) -> None:
        """Ends every request: the router closes."""
        for routed in self.table.all():
            self._cancel(routed)
            self._fail(routed, error)

    # -- replicas (`Receiver`) ----------------------------------------------------------------

    def check(self, attached: Attached) -> None:
        """Raises Broken if a replica serves another model than the others, unless these make room for it."""
        for name, why in self._alike.check(attached, self.attached, idle=not len(self.table)).items():
            self.links[name].give_up(why)

    def begun(self, attached: Attached) -> None:
        """A replica is attached. Answers that began with another model do not go on there."""
        assert attached.info is not None
        for routed in self.table.all():
            if routed.base is not None and merged.difference(routed.base, attached.info):
                routed.strange.add(attached.name)
            else:
                routed.strange.discard(attached.name)
        self._info = merged.info([one.info for one in self.attached if one.info is not None])
        self.prompts.begin(self._info.block_tokens)
        self._hear(attached, self.terms.clock())
        self._pump()

    def received(self, attached: Attached, message: link.FromReplica) -> None:
        """Delivers what a step brought, one batch for each request."""
        now = self.terms.clock()
        self._hear(attached, now)
        batches: dict[int, tuple[Routed, list[TokenEvent]]] = {}  # by attempt
        other: dict[int, Routed] = {}  # attempts with other weights than those before
        for rid in message.begun:
            if (routed := self.table.attempt(rid)) is not None:
                self._answer(routed)
        vocab = attached.info.limits.vocab if attached.info is not None else 0
        try:
            for token in message.tokens:
                rid = token.rid
                routed = self.table.attempt(rid)
                if routed is None or not routed.wants(token.index, token.position if token.HasField("id") else None):
                    continue
                if rid in other or (token.digest and not routed.made_of(token.digest)):
                    other[rid] = routed
                    continue
                if not 0 <= token.id < vocab:
                    raise Broken(f"token {token.id} of a vocabulary of {vocab}")
                event = routed.deliver(wire.event(token, routed.request.id, routed.handle), now)
                if event.usage is not None:
                    timing = event.timing if routed.measured(event.index) else None
                    self.pace.served(None if routed.version is None else routed.version.key, event.usage, timing)
                if rid in batches:
                    batches[rid][1].append(event)
                else:
                    batches[rid] = routed, [event]
        finally:  # also before a token that breaks the protocol: what is taken is never sent again
            for routed, events in batches.values():
                self._begin(routed, len([event for event in events if event.token_id is not None]))
                routed.made_by(attached.info)
                self._give(routed, events)
        for routed in other.values():
            self._cancel(routed)
            routed.others.add(attached.name)
            end = self._lose if self.choice.among(routed) else self._fail
            end(routed, _changed(routed))
        for failure in message.failures:
            self._failed(failure)
        if other or message.failures:
            self._pump()

    def _hear(self, attached: Attached, now: float) -> None:
        seen = attached.view()
        self.books.heard(seen)
        if seen.health == "up":  # one that drains is there, and of no use to what waits
            self.up_at = now

    def lost(self, attached: Attached, why: str) -> None:
        """Its requests go on elsewhere: each where there is least to do by then, and not all at once (`_pump`)."""
        self.books.heard(attached.view())
        self._alike.lost(attached)
        if infos := [one.info for one in self.attached if one.info is not None]:
            self._info = merged.info(infos)
        self.prompts.left(attached.name)
        for routed in self.table.at(attached.name):
            with self._alone(routed):
                self._lose(routed, Unavailable(f"replica {attached.name}: {why}"))
        if self.links.get(attached.name) is not attached:
            self.books.gone(attached.name)
        self._pump()

    # -- time -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Looks at the clock: silent replicas, deadlines, requests that wait, replicas that drain."""
        now = self.terms.clock()
        for one in list(self.links.values()):
            one.look(now)
            if one.channel is None:  # no message says so
                self.books.heard(one.view())
        for routed in self.table.all():
            with self._alone(routed):
                self._expire(routed, now)
        for name, seen in list(self.books.view.items()):
            if seen.health == "draining":
                self._move(name)
        self._pump()

    def _expire(self, routed: Routed, now: float) -> None:
        deadline = routed.request.deadline
        if routed.rid:
            if deadline is not None and now > deadline + GRACE_S:
                self.abort(routed.handle)
        elif now > (max(routed.since, self.up_at) + PATIENCE_S if deadline is None else deadline):
            if deadline is not None and self.books.is_up():  # all are full: it ends as in an engine's queue
                self.abort(routed.handle)
            else:
                self._fail(routed, Unavailable("no replica of the service can take the request"))

    def _pump(self) -> None:
        """Sends waiting requests while a replica has room, at most `SENDS` at once; the next tick sends the rest.

        A request that only some replicas may take does not block those behind it.
        """
        if not self.books.is_up():
            return
        now, sends, full = self.terms.clock(), 0, set[tuple[Version | None, frozenset[str], frozenset[str]]]()
        for routed in self.table.waiting():
            # If a replica is lost meanwhile, because it takes nothing any more, `lost` has sent some of them.
            if routed.due > now or routed.rid or routed.handle not in self.entries:
                continue
            among = None
            if routed.others or routed.strange:
                among = routed.version, frozenset(routed.others), frozenset(routed.strange)
            if among in full:
                continue
            if not self._dispatch(routed):
                if among is None:  # no replica has room
                    return
                full.add(among)
            elif (sends := sends + 1) == SENDS:
                return

    def _move(self, name: str) -> None:
        """Takes the requests of a replica that drains to others, if there are some."""
        for routed in self.table.at(name):
            with self._alone(routed):
                if self.choice.peek(ask_of(routed.request, routed.version)) is None:
                    return
                self._cancel(routed, moved=True)
                self._lose(routed, Unavailable(f"replica {name} drains"))

    # -- balance --------------------------------------------------------------------------------

    def migrate(self, move: Move) -> bool:
        """Moves a request, if it is where the plan saw it, may move, and the target takes it; whether it has gone."""
        routed, seen = self.table.get(move.key), self.books.view.get(move.target)
        if routed is None or routed.replica != move.source or seen is None or seen.health != "up":
            return False
        if not (routed.movable and self.choice.has_room(seen)):
            return False
        with self._alone(routed):
            self._cancel(routed, moved=True)
            self._settle(routed)
            if events := self.table.lose(routed, self.terms.clock(), moved=True):
                self._give(routed, events)
            return bool(routed.open) and self._send(routed, {move.target: seen})
        return False

    # -- attempts -------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, routed: Routed) -> Iterator[None]:
        """An error inside, even one of the policy or the directory, ends this request and no other."""
        try:
            yield
        except Exception as e:
            log.exception("the router has failed at request %s", routed.request.id)
            if self.table.get(routed.handle) is routed:
                self._cancel(routed)
                self._fail(routed, e)

    def _dispatch(self, routed: Routed) -> bool:
        """Sends a request that waits to a replica, or ends it; False if none is up that has room."""
        with self._alone(routed):
            return self._send(routed)
        return True  # `_alone` has ended the request

    def _send(self, routed: Routed, among: View | None = None) -> bool:
        moved, now = among is not None, self.terms.clock()
        if not moved and (among := self.choice.among(routed)) is not None and not among:
            self._fail(routed, _changed(routed))
            return True
        request, version, entry = routed.again(now), routed.version, self.entries[routed.handle]
        ask = ask_of(request, version, self.prompts.cached(entry.chain), self.pace.outputs)
        # Also if there is one replica: the policy keeps books of its choices.
        to = self.choice.choose(ask, routed.avoid, among)
        if to is None:
            return False
        self.resumed += bool(routed.avoid) and not moved
        self.prompts.sent(to.name, entry.chain)
        self.table.begin(routed, to.name, now)
        self.books.sent(to.name, ask)
        entry.ask, entry.outputs = ask, None
        peers = () if version is None else self.directory.peers(version, to.name)
        to.send(link.ToReplica(start=wire.start(routed.rid, request, version, peers, now)))
        return True

    def _begin(self, routed: Routed, outputs: int) -> None:
        """Its attempt has delivered so many tokens more."""
        self._answer(routed)
        entry = self.entries[routed.handle]
        if entry.ask is None:
            return
        if entry.outputs is None:
            entry.outputs = 0
            self.books.began(routed.replica, entry.ask)
        entry.outputs += outputs
        self.books.told(routed.replica, outputs)

    def _settle(self, routed: Routed) -> None:
        """The attempt is over, for the books."""
        entry = self.entries[routed.handle]
        ask, entry.ask = entry.ask, None
        if ask is not None:
            self.books.ended(routed.replica, ask, entry.outputs)

    def _cancel(self, routed: Routed, moved: bool = False) -> None:
        if routed.rid and (to := self.links.get(routed.replica)) is not None:
            to.send(link.ToReplica(cancel=link.Cancel(rid=routed.rid, moved=moved)))

    def _failed(self, failure: link.Failure) -> None:
        routed = self.table.attempt(failure.rid)
        if routed is None:
            return
        error = wire.error(failure, routed.version)
        if failure.elsewhere or isinstance(error, Busy) or self._lacks(routed, error):
            self._lose(routed, error)
        else:
            self._fail(routed, error)

    def _lacks(self, routed: Routed, error: Exception) -> bool:
        """Whether another replica may have what this one lacks: the adapter's files, or memory. One other is asked."""
        entry = self.entries[routed.handle]
        if entry.lacking or not isinstance(error, NotFound | DataLoss | ResourceExhausted):
            return False
        entry.lacking = True
        return any(seen.health == "up" for name, seen in self.books.view.items() if name != routed.replica)

    def _lose(self, routed: Routed, why: Exception) -> None:
        """Ends the attempt. The request waits to continue elsewhere (`_pump`).

        Once a replica has accepted a request, a full replica no longer fails it.
        """
        self._settle(routed)
        full = isinstance(why, Busy)
        seen = self.books.view.get(routed.replica)
        drained = seen is not None and seen.health == "draining"  # which says nothing of the request
        if events := self.table.lose(routed, self.terms.clock(), full, drained=drained):
            self._give(routed, events)
        if not routed.open:
            return
        if full:  # it waits until it is due
            if routed.refusals >= MOST_LOSSES and self.entries[routed.handle].submitted is not None:
                self._fail(routed, why)
        elif routed.given_up:
            log.warning("request %s has been given up: %s", routed.request.id, why)
            self._fail(routed, Unavailable("the request has failed often: it may be what ends replicas"))

    def _fail(self, routed: Routed, error: Exception) -> None:
        """Fails a request: its submission while that is unanswered, otherwise its stream."""
        entry = self.entries[routed.handle]
        events = routed.end("abort", error)
        if entry.submitted is None:
            self._give(routed, events)
            return
        self._forget(routed)
        if entry.submitted.set_running_or_notify_cancel():
            entry.submitted.set_exception(error)

    def _answer(self, routed: Routed) -> None:
        """A replica has the request: tells who submitted it."""
        entry = self.entries[routed.handle]
        submitted, entry.submitted = entry.submitted, None
        if submitted is not None and submitted.set_running_or_notify_cancel():
            submitted.set_result(routed.handle)

    def _give(self, routed: Routed, events: list[TokenEvent]) -> None:
        """Hands events over. A sink that fails loses its own request and no other."""
        self._answer(routed)
        if not routed.open:
            self._forget(routed)
        try:
            routed.sink(events)
        except Exception:
            log.exception("the receiver of request %s failed; it is aborted", routed.request.id)
            if routed.open:
                self._cancel(routed)
                routed.end("abort")
                self._forget(routed)

    def _forget(self, routed: Routed) -> None:
        for tell in (self._settle, self._remember, self._release):
            try:
                tell(routed)
            except Exception:
                log.exception("the router has failed at the end of request %s", routed.request.id)
        self.table.end(routed)
        del self.entries[routed.handle], self._handles[routed.name], self.names[routed.name]

    def _remember(self, routed: Routed) -> None:
        if routed.rid:
            self.prompts.answered(routed)

    def _release(self, routed: Routed) -> None:
        if routed.version is not None:
            self.directory.end(routed.version, routed.delivered)


def _changed(routed: Routed) -> WeightsGone:
    """No replica goes on with the weights of its first token."""
    if not routed.others:
        return WeightsGone("the model has changed: no replica has the one with which the answer began; send it again")
    return WeightsGone(f"the files of adapter {routed.request.adapter!r} have changed; send it again")
