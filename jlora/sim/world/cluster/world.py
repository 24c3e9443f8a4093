"""A whole service under faults: routers and replicas, each a process with the product's own router and link.

A seed draws processes, clients, adapters and faults. Time is virtual, the network carries the product's messages as
bytes, and a replica's tokens are exact (`model`). After the last step everything heals; then every request has ended
as its client was promised, and nothing of it is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from jlora.cluster.directory import Directory
from jlora.cluster.routing.costs import RankCosts
from jlora.cluster.routing.routes import ROUTES, Known
from jlora.errors import JloraError
from jlora.sim.world.cluster import checks
from jlora.sim.world.cluster.adapters import HOLD_S, NAMES, Adapters
from jlora.sim.world.cluster.asks import Ask, Violation
from jlora.sim.world.cluster.blame import Blame
from jlora.sim.world.cluster.faults import Faults
from jlora.sim.world.cluster.fibers import Fibers
from jlora.sim.world.cluster.follower import Follower
from jlora.sim.world.cluster.heard import Heard
from jlora.sim.world.cluster.loop import Loop, Time
from jlora.sim.world.cluster.members import Grounds, ReplicaProcess, RouterProcess
from jlora.sim.world.cluster.model import VOCAB, Disk, info
from jlora.sim.world.cluster.net import Net
from jlora.sim.world.cluster.sites import SITES
from jlora.sim.world.report import Journal
from jlora.sim.world.sites import Sites
from jlora.types import Request, SamplingParams

STEP_S = 0.02  # of virtual time
SETTLE_S = 90.0  # in which every request must end once nothing is wrong any more
PROBE_S = 20.0  # in which a healed service answers
PATH_S = 1.5  # in which a message arrives that was sent while a path was slow
TIDY_S = 30.0  # in which old versions leave the replicas: what has failed is tried again after a while
ATTACHED_S = 9.0  # in which a router attaches again: what waits for a hello, and then the longest pause
FOLLOWED_S = 9.0  # in which a router follows again: what waits for a silent controller, and then the longest pause
LONG = 4000  # tokens: more than a world has time for
SESSIONS = ("", "", "s", "t")
ASKS = 0.12  # requests that come with a step
CALL_S = 10.0  # in which what was lost of a command is asked of two other replicas
STEPS = RankCosts(0.01, 0.0, 0.001, 0.0, 1e-5, padded=False)  # what policies take a step's time for


class World:
    """One seed."""

    def __init__(self, seed: int, journal: Journal):
        self.draw = draw = random.Random(seed)
        self.journal = journal
        self.sites = Sites(SITES, random.Random(draw.getrandbits(64)))
        self.time = Time(random.Random(draw.getrandbits(64)))
        self.net = Net(self.time, random.Random(draw.getrandbits(64)))
        self.blame = Blame(self)
        self.net.heard = self.blame.heard
        self.disk = Disk()
        self.grounds = Grounds(
            self.net,
            self.disk,
            self.sites,
            draw,
            info(draw.randint(2, 6), draw.choice((2, 8, 64)), draw.choice((2.0, 60.0))),
            self.blame,
        )
        self.adapters = Adapters(self.net, self.disk, self.sites, draw, self.blame)
        self.replicas = [ReplicaProcess(f"r{i}", self.grounds) for i in range(draw.randint(2, 3))]
        known = Known(STEPS, batch=self.grounds.info.config.engine.max_seqs)
        policy = partial(ROUTES[draw.choice(sorted(ROUTES))], known)
        balance_s = draw.choice((0.0, 0.15, 0.4))
        routers = range(draw.choice((1, 1, 2)))
        self.routers = [RouterProcess(f"router{i}", self.grounds, policy, balance_s) for i in routers]
        self.asks: list[Ask] = []
        self.going: list[Ask] = []  # those that are not over
        self.followers: list[Follower] = []
        self.fibers: list[Fibers] = []  # of all followers
        self.gone: dict[str, float] = {}  # lives of routers, and when they ended
        self.heard = Heard(self)
        self.faults = Faults(self)

    # -- the service ----------------------------------------------------------------------------

    def begin(self) -> None:
        for replica in self.replicas:
            replica.start()
        for router in self.routers:
            self.start_router(router)
        self._run(0.2)
        for name in NAMES:
            self.faults.load(name)
        self.time.run(self.time.now + 1.0, lambda: all(one.answer.done() for one in self.faults.loads))
        self._run(0.25)  # until all routers know

    def start_router(self, router: RouterProcess) -> None:
        def directory(loop: Loop) -> Any:
            told = partial(self.current, router)
            if router is self.routers[0]:
                controller = self.adapters.begin(loop, told, self.faults.controller_dies)
                self.faults.restore()
                return controller
            self.followers = [one for one in self.followers if not one.over]
            follower = Follower(self.adapters, self.net, loop, router.id, told)
            self.followers.append(follower)
            self.fibers.append(follower.fibers)
            follower.start()
            return follower

        router.start(directory, self.addresses())

    def current(self, router: RouterProcess, name: str, digest: str) -> None:
        """A router's next requests for an adapter get these weights; so do those that it has not taken yet."""
        for ask in self.asks:
            if ask.router is router and ask.request.adapter == name and not (ask.over or ask.held):
                ask.digests.append(digest)

    def addresses(self) -> dict[str, str]:
        """Where the fleet says that replicas are."""
        return {replica.name: replica.address for replica in self.replicas if replica.alive}

    def place(self) -> None:
        """Tells every router where replicas are now."""
        for router in self.routers:
            if router.alive:
                router.router.place(self.addresses())

    # -- clients ----------------------------------------------------------------------------------

    def ask(self, router: RouterProcess, plain: bool = False, hasty: bool = False, long: bool = False) -> Ask:
        """A client sends a request; a plain one is never left or stopped, a hasty one soon."""
        draw, now = self.draw, self.time.now
        name = draw.choice((None, *NAMES))
        digest = "base" if name is None else _digest(router.directory, name)
        if plain and not digest:
            name, digest = None, "base"
        sampling = SamplingParams(
            max_tokens=LONG if long else draw.randint(1, 24),
            n=1 if plain else draw.choice((1, 1, 1, 2)),
            seed=draw.getrandbits(63),
            stop_token_ids=draw.choice(((), (1, 2))),  # which the model does not heed
        )
        request = Request(
            id=f"q{len(self.asks)}",
            prompt=tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))),
            sampling=sampling,
            adapter=name,
            priority=draw.choice((0, 0, 1)),
            tenant=draw.choice(("", "t")),
            session=draw.choice(SESSIONS),
            cache_salt=draw.choice(("", "s")),
            bypass_prefix_cache=draw.random() < 0.2,
            deadline=None if plain or draw.random() < 0.8 else now + draw.uniform(0.02, 3.0),
        )
        ask = Ask(request, [digest] if digest else [], self.time, router, self.blame.judge)
        self.asks.append(ask)
        self.going.append(ask)
        self.journal.write(f"{now:.6f} {router.name} is asked {request.id} for {name}")
        ask.submitted = router.router.submit(request, ask.hear)
        ask.submitted.add_done_callback(ask.answered)
        if hasty:
            self.time.after(draw.uniform(0.0, 0.2), lambda: self._abort(ask, "name"))
        elif not plain:
            self._leave(ask)
        return ask

    def _leave(self, ask: Ask) -> None:
        """Some clients go away, at any moment, or stop a completion."""
        draw = self.draw
        chance = draw.random()
        if chance < 0.15:
            self.time.after(draw.uniform(0.0, 1.0), lambda: self._abort(ask, draw.choice(("handle", "name", "future"))))
        elif chance < 0.25:
            self.time.after(draw.uniform(0.05, 0.8), lambda: self._stop(ask))

    def _abort(self, ask: Ask, how: str) -> None:
        if ask.over:
            return
        router = ask.router.router
        self.journal.write(f"{self.time.now:.6f} the client of {ask.request.id} leaves by {how}")
        ask.left = True
        if how == "name":
            router.abort_named(ask.request.id, ask.request.tenant)
        elif ask.accepted is not None:
            router.abort(ask.accepted)
        elif ask.submitted is not None:
            ask.submitted.cancel()

    def _stop(self, ask: Ask) -> None:
        if ask.over or ask.accepted is None:
            return
        index = self.draw.randrange(ask.request.sampling.n)
        ask.stops[index] = len(ask.tokens[index])
        ask.router.router.stop(ask.accepted, index, ask.stops[index])

    # -- play -------------------------------------------------------------------------------------

    def play(self, steps: int) -> None:
        self.begin()
        for _ in range(steps):
            up = [router for router in self.routers if router.alive]
            while up and self.draw.random() < ASKS:
                self.ask(self.draw.choice(up))
            self.faults.step()
            self._run(STEP_S)
            checks.often(self)
        self.settle()

    def settle(self) -> None:
        """Heals everything, waits until all has ended, and looks whether anything is left."""
        self.sites.heal()
        self.faults.heal()
        self._run(max(0.0, self.faults.asking_until - self.time.now))
        limit = self.time.now + SETTLE_S
        while not all(ask.over for ask in self.asks) and self.time.now < limit:
            self._run(0.25)
            checks.often(self)
        self._await(self.asks, "has not ended")
        if not self.time.run(self.time.now + FOLLOWED_S, lambda: checks.followed(self)):
            raise Violation("a router does not have the controller's table again")
        probes = [self.ask(router, plain=True) for router in self.routers for _ in self.replicas]
        limit = self.time.now + PROBE_S
        self.time.run(limit, lambda: all(ask.over for ask in probes))
        self._await(probes, "is not served by a healed service")
        for ask in probes:
            ask.check_served()
        self._run(1.0)
        if not self.time.run(self.time.now + ATTACHED_S, lambda: checks.attached(self)):
            raise Violation("a router has not found a replica again")
        if not self.time.run(self.time.now + TIDY_S, lambda: checks.tidy(self)):
            raise Violation(
                f"replicas have versions that nobody wants: {[r.replica.adapters_here for r in self.replicas]}"
            )
        if not self.time.run(self.time.now + TIDY_S, lambda: checks.pins_hold(self)):
            raise Violation(f"pins differ from the registry's: {[r.replica.adapters_here for r in self.replicas]}")
        self.heard.check()
        # What a router that is gone may still use is unloaded a while later.
        limit = self.time.now + HOLD_S + CALL_S
        self.time.run(limit, lambda: not any(one.goes_on for one in self.faults.commands))
        self._commands()
        self.time.run(self.time.now + PATH_S, lambda: not checks.running(self))  # a cancel may be on its way
        checks.at_end(self)
        self._run_out()

    def _run_out(self) -> None:
        """Requests of routers that are gone end in time."""
        if self.gone:
            limit = max(self.gone.values()) + checks.LOST_S
            self.time.run(limit, lambda: not any(checks.orphans(one, self.gone) for one in self.replicas))
            checks.often(self)
            self.heard.check()

    def _commands(self) -> None:
        """Commands about adapters are answered, or gone with the router that had them."""
        for one in self.faults.commands:
            if one.goes_on:
                raise Violation(f"the {one.kind} of {one.name} that came at {one.begun:.3f} is not answered")
            if one.answer.done() and (error := one.answer.exception()) is not None and not self.blame.command(one):
                raise Violation(f"the {one.kind} of {one.name} has failed: {type(error).__name__}: {error}")

    def _await(self, asks: list[Ask], what: str) -> None:
        for ask in asks:
            if not ask.over:
                raise Violation(f"{ask.name} {what}: {ask.tokens} {ask.reasons}")

    def _run(self, seconds: float) -> None:
        self.time.run(self.time.now + seconds)
        self.heard.check()

    def close(self) -> None:
        """Ends what is left, unseen."""
        for process in (*self.replicas, *self.routers):
            for loop in process.buried:
                loop.bury()
        for fibers in self.fibers:
            fibers.bury()
        self.adapters.bury()


def _digest(directory: Directory, name: str) -> str:
    """Of the version that a request gets now; "" if there is none."""
    try:
        return directory.current(name).digest
    except JloraError:
        return ""


def play(seed: int, steps: int, journal: Journal) -> Mapping[str, int]:
    """Plays a seed; what fired, by site. Raises what it finds."""
    world = World(seed, journal)
    with world.heard:
        try:
            world.play(steps)
        finally:
            world.close()
    for ask in world.asks:
        journal.write(f"{ask.name}: {ask.tokens} {ask.reasons} {ask.refused}")
    journal.write(f"{world.time.now:.6f} {world.time.events} events")
    world.sites.fired["router.moves"] = sum(made.balancing.moved for one in world.routers for made in one.routers)
    return Counter(world.sites.fired)
