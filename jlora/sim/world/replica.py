"""One replica under faults: the product's own engine, loaders, swapper, cache and threads on modelled hardware.

The seed draws the sizes, the policy, what clients ask, who runs next, and the faults.
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jlora.adapters.catalogue import Catalogue
from jlora.adapters.registry import AdapterRegistry, Record
from jlora.cache.catalog import make_policy
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Meter
from jlora.cache.tree import Node
from jlora.config import AdaptersConfig, CacheConfig, Config, EngineConfig
from jlora.engine.built import Built
from jlora.engine.engine import Engine, Shape
from jlora.engine.futures import Commands
from jlora.engine.local import LocalReplica
from jlora.engine.ports import Parts
from jlora.engine.scheduler import Scheduler
from jlora.engine.shelf import Reading
from jlora.engine.sources import Reader
from jlora.engine.switching import Switching
from jlora.errors import Unavailable
from jlora.layout import PoolLayout
from jlora.memory import unlimited
from jlora.ports import System, Threads
from jlora.replica import ReplicaInfo
from jlora.sim.clock import VirtualClock
from jlora.sim.world import again, asked, clients, device, disk, merging, peers, seams
from jlora.sim.world.books import Books
from jlora.sim.world.calls import Around
from jlora.sim.world.clients import Clients
from jlora.sim.world.device import Device, DeviceMemory, HostMemory
from jlora.sim.world.disk import BLOCK_TOKENS, SPEC, Disk, versions
from jlora.sim.world.excuses import Excuses
from jlora.sim.world.heard import heard
from jlora.sim.world.merging import Drawn, Weights
from jlora.sim.world.report import Journal
from jlora.sim.world.sites import Site, Sites
from jlora.sim.world.struck import Struck
from jlora.sim.world.tasks import Task, Tasks
from jlora.sim.world.witness import Witness
from jlora.types import Request, TokenEvent
from jlora.validation import Limits

SITES: Mapping[str, Site] = {
    **disk.SITES,
    **device.SITES,
    **merging.SITES,
    **peers.SITES,
    **seams.SITES,
    **clients.SITES,
    "clock.stalls": Site("nothing runs for five seconds", 0.006),
    "clock.jumps": Site("the wall clock jumps by an hour or ten years", 0.01),
    "thread.dies": Site("the engine's thread, a copies' lane or the watch of the files dies", 0.006, True, 0.5),
}

HOUR = 3600.0
THREADS = ("jlora-engine", "jlora-copies-in", "jlora-copies-out", "jlora-watch")  # whose end is the replica's
CHECKS = 16  # steps between two checks of everything
FLUSHES = 8  # in a row: an idle engine begins to back KV up, and a flush leaves what is on its way
MOST_TURNS = 6_000  # until everything must have ended
SUDDEN = 0.15  # of the seeds: the replica closes with live requests, or drains them for some time only
AGAIN, AFTER = 0.25, 10  # of the seeds whose replica has ended so: it starts again, and plays 1/AFTER of the steps


class _Watched(Engine):
    """An engine that calls `before` and `after` with every step, and whose `witness` hears of failed readings."""

    before: Callable[[], None]
    after: Callable[[], None]
    witness: Witness

    def step(self) -> list[TokenEvent]:
        self.before()
        events = super().step()
        self.after()
        return events

    def unread(self, reading: Reading, error: Exception) -> None:
        self.witness.unread(reading, error)
        super().unread(reading, error)


class _Registry(Catalogue):
    """The table of adapters, on a disk that may be full."""

    def __init__(self, threads: Threads, fits: str, sites: Sites, file: sqlite3.Connection):
        super().__init__("", threads, fits, lambda *_, **__: file)
        self._table: Any = _Table(file, sites)


class _Table:
    """A process's connection to the file, which outlives it."""

    def __init__(self, table: sqlite3.Connection, sites: Sites):
        self._table = table
        self._sites = sites

    def execute(self, statement: str) -> Any:
        if statement == "commit" and self._sites.fires("disk.full"):
            raise sqlite3.OperationalError("database or disk is full")
        return self._table.execute(statement)

    def close(self) -> None:
        if self._table.in_transaction:
            self._table.rollback()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


class World:
    """One seed."""

    def __init__(self, seed: int, journal: Journal, before: World | None = None):
        """`before`: the process that was here, whose disk and catalogue are kept."""
        draw = random.Random(f"{seed} sizes")
        self.journal = journal
        self.sites = Sites(SITES, random.Random(f"{seed} sites"))
        self.clock = VirtualClock()
        self.tasks = Tasks(random.Random(f"{seed} tasks"), self.clock, self._dies)
        self.struck = Struck(self.clock)
        self.disk = Disk(random.Random(f"{seed} disk"), self.sites, self.tasks.sleep, self.struck.path)
        self.file = sqlite3.connect(":memory:", isolation_level=None) if before is None else before.file
        self._wall = 1.7e9
        self._draw = random.Random(f"{seed} rounds")
        self.steps = 0
        self._closing = False
        self._begun = deque([-math.inf] * 3, maxlen=3)  # when the last steps have
        self._sizes = {version.digest: version.blocks for version in versions()}
        self._used: Mapping[Node, float] = {}
        engine, cache = _drawn_config(draw)
        config = Config(engine=engine, cache=cache, adapters=AdaptersConfig(readers=draw.choice((1, 2, 4))))
        layout = PoolLayout.of(SPEC, 1 + draw.choice((20, 28, 40)), BLOCK_TOKENS)
        seeds = random.Random(f"{seed} seeds")
        system = System(self.tasks.reading, self._now, self.disk, self.tasks, seeds, memory=unlimited())
        self.memory = DeviceMemory(layout, draw.choice((1, 2)), self.sites, self.tasks, self.struck)
        self.host = HostMemory(self.sites, self.tasks)
        self.weights = Weights(self.sites, self.tasks)
        self._merges = random.Random(f"{seed} merges")
        built = self._build(config, layout, system, draw.choice((16, 28, 60)))
        self._engine = built.engine
        self.manager: CacheManager = built.parts.scheduler.manager
        self.parts = built.parts
        kept = [] if before is None else self._begin_again(built, config, before)
        self.replica = LocalReplica(built, system)
        known = [name for name in asked.NAMES if draw.random() < 0.9]
        self.fetcher = peers.fetcher(self.replica, self.sites, self.tasks, known, draw.random() < 0.75)
        self.context = min(SPEC.max_len, (layout.blocks - 1) // 2 * BLOCK_TOKENS)  # pins leave half the pool
        around = Around(
            self.replica, self.disk, versions(),
            built.parts.registry.get, self._where, lambda: self._begun[0], self.clock, BLOCK_TOKENS, self.context,
            self.sites, journal, Excuses(self.struck, built.parts, self.disk), lambda: self.over,
        )  # fmt: skip
        self.clients = Clients(around, random.Random(f"{seed} clients"))
        self.clients.loaded |= {record.node.uid for record in kept}
        self._books = Books(built.parts.scheduler, self.clients.found)
        watched: Any = built.engine
        watched.witness = Witness(built.parts, self.disk, self.struck, self.clients.found)
        watched.witness.watch(watched.adapters.shelf)
        self._heed(self.replica._commands)

    def round(self) -> None:
        """Clients act, and some tasks go on."""
        draw = self._draw
        while draw.random() < 0.45:
            self.clients.act()
        if self.sites.fires("clock.stalls"):
            self.clock.advance(self.clock.now + 5.0)
        if self.sites.fires("clock.jumps"):
            self._wall += draw.choice((-10 * 365 * 24 * HOUR, -HOUR, HOUR, 10 * 365 * 24 * HOUR))
        for _ in range(draw.choice((1, 2, 4, 8))):
            self.turn()
        self.clients.check()

    def turn(self) -> None:
        """One task goes on. Raises what was found meanwhile."""
        assert self.tasks.turn() or self.over, "nobody can ever go on"
        if self.clients.found:
            raise self.clients.found[0]
        if self.replica.failure.done() and not self.sites.ended:
            raise self.replica.failure.result()

    @property
    def over(self) -> bool:
        """Whether the replica has failed, or closes."""
        return self._closing or self.replica.failure.done()

    def finish(self) -> None:
        """The faults cease: everything ends, and nothing is held. Or the replica closes with live requests."""
        if self._draw.random() < SUDDEN:
            self._leave()
            return
        self.sites.heal()
        self._until(self._all_answered, "a request or a command never ends")
        if self.over:
            refused = self.replica.check_integrity()
            self._until(refused.done, "a command to a replica that has failed is never answered")
            assert isinstance(refused.exception(), Unavailable)
        else:
            self._rest()
        self._close()

    # -- inside -----------------------------------------------------------------------------------

    def _build(self, config: Config, layout: PoolLayout, system: System, host_blocks: int) -> Built:
        engine, cache, clock = config.engine, config.cache, system.clock
        reader = Reader(SPEC, layout, 8, ("base",), self.disk, clock)
        registry = AdapterRegistry()
        streams = self.memory.groups > 1 and engine.cold_start != "wait"
        sizes = Sizes(layout.blocks - 1, host_blocks, BLOCK_TOKENS, layout.blocks_for(SPEC.max_len))
        policy = make_policy(cache, Meter(2e-3, block_tokens=BLOCK_TOKENS))
        manager = CacheManager(sizes, policy, clock, cache.prefix_reuse, streams, cache.monitor_s)
        if engine.cold_start == "cpu":
            manager.leases.gate.helps = lambda adapter, left_s, tokens: not (switching and switching.holds(adapter.uid))
        memory: Any = self.memory
        host: Any = self.host
        swapper = Swapper(memory, host, cache.link_gbps, system)
        runner: Any = Device(self.memory, self.host, self.weights, self.sites, self.struck)
        switching = None
        if engine.merge == "auto":
            switching = Switching(Drawn(engine.max_seqs, self._merges), self.weights, registry, swapper)
        scheduler = Scheduler(manager, engine, SPEC.eos_ids, system.random, switching)
        catalogue = _Registry(self.tasks, reader.fits, self.sites, self.file)
        parts = Parts(scheduler, registry, runner, swapper, clock, config.adapters.readers, catalogue, system.wall)
        seams.plant(parts, self.sites, self.struck)
        watched = _Watched(parts, Shape(SPEC.max_len, layout.block_bytes, engine.overlap), switching)
        watched.before, watched.after = self._before_step, self._after_step
        info = ReplicaInfo(
            "base", SPEC.dtype, Limits(SPEC.vocab, SPEC.max_len, sizes.device * BLOCK_TOKENS), SPEC.eos_ids,
            BLOCK_TOKENS, layout.block_bytes, "model", ("model 0",), config,
        )  # fmt: skip
        return Built(watched, parts, runner, info, reader, catalogue)

    def _begin_again(self, built: Built, config: Config, before: World) -> list[Record]:
        """Starts with what the process before has left; the adapters that are known then."""
        self.disk.keep(before.disk)
        rows, registry, since = built.catalogue.rows(), built.parts.registry, self.clock.now
        if not before.sites.fired["disk.full"]:
            again.check_kept(rows, before.parts.registry)
        start = self.tasks.start("start", lambda: again.begin(built, config))
        while not start.ended:
            self.tasks.turn()
        again.check_there(rows, registry, self.disk, self.struck, since)
        return registry.records()

    def _heed(self, commands: Commands) -> None:
        """Looks at the ends of the product's own commands, too: nobody waits for some of them."""
        put = commands.put

        def heeded(command: Callable[[], Any]) -> Future[Any]:
            future = put(command)
            future.add_done_callback(self.clients.heed)
            return future

        vars(commands)["put"] = heeded

    def _all_answered(self) -> bool:
        return not self.clients.calls and not self.clients.commands

    def _leave(self) -> None:
        """It closes under faults, perhaps behind a drain whose time is too short."""
        if self._draw.random() < 0.5:
            self.clients.drains = True
            drained = self.replica.drain(self._draw.choice((0.0, 0.05, 0.5, 3.0)))
            refused = self.replica.submit(Request("late", (asked.FIRST_WORD,)), lambda events: None)
            self._until(lambda: drained.done() and refused.done(), "a drain does not end with its time")
            assert isinstance(refused.exception(), Unavailable), "a replica that drains takes a request"
            assert not drained.result() or self.over or not self.clients.live, "a drain ends with live requests"
        self._closing = True
        self._close()
        late = [self.replica.flush_cache(), self.replica.state(), self.replica.owners(), self.replica.drain()]
        self._until(lambda: all(each.done() for each in late), "a replica that has closed never answers")
        self._until(self._all_answered, "a request or a command never ends, and the replica has closed")

    def _close(self) -> None:
        closing = self.tasks.start("close", self.replica.close)
        self._until(lambda: closing.ended, "the replica does not close")
        self._until(lambda: not self.tasks.live, "a thread never ends")

    def _now(self) -> float:
        return self._wall + self.clock.now

    def _dies(self, task: Task) -> bool:
        return task.name in THREADS and self.sites.fires("thread.dies")

    def _where(self, handle: int) -> str:
        scheduler: Any = self.parts.scheduler
        for sequence in scheduler.running:
            if sequence.handle == handle:
                return "running"
        return "copying" if any(sequence.handle == handle for sequence in scheduler.loading) else ""

    def _before_step(self) -> None:
        self.struck.step += 1
        self._begun.append(self.clock.now)

    def _after_step(self) -> None:
        """On the engine's thread, whose errors are the product's to catch: what is found is kept for the world."""
        try:
            self.steps += 1
            self._check_tiers()
            self._check_sizes()
            self._check_pins()
            self._books.check_slots()
            self._books.check_bypass()
            self.weights.audit()
            if self.steps % CHECKS == 0:
                self._check_all()
        except AssertionError as e:
            self.clients.found.append(e)

    def _check_tiers(self) -> None:
        for tier in (self.manager.device, self.manager.host):
            assert min(tier.free, tier.adapters, tier.history_kv, tier.running_kv) >= 0, f"less than nothing: {tier}"
            assert tier.free + tier.adapters + tier.history_kv + tier.running_kv == tier.total, f"lost: {tier}"
        scheduler: Any = self.parts.scheduler
        live = len(scheduler.queue) + len(scheduler.loading) + len(scheduler.running)
        assert live <= scheduler.config.max_queue + scheduler.config.max_seqs, "the queue has no bound"

    def _check_sizes(self) -> None:
        for record in self.parts.registry.records():
            known = self._sizes.get(record.digest)  # None: nobody has read it yet
            assert known in (None, record.node.size), (
                f"{record.node.size} blocks of {record.name}, whose ranks fill {known}"
            )

    def _check_pins(self) -> None:
        """Pins leave room for the longest context beside any other adapter, so every request can run."""
        nodes = [record.node for record in self.parts.registry.records()]
        pinned = sum(node.size for node in nodes if node.pinned)
        largest = max((node.size for node in nodes if not node.pinned), default=0)
        longest, total = -(-self.context // BLOCK_TOKENS), self.manager.device.total
        assert not pinned or pinned + largest + longest <= total, (
            f"{pinned} blocks are pinned of {total}: {largest} for an adapter and {longest} for a context do not fit"
        )

    def _check_uses(self) -> None:
        """Policies order nodes by their last use: it never runs back, and never ahead of the clock."""
        nodes = [
            node for adapter in self.manager.adapters.values() for node in (adapter, *self.manager.tree.below(adapter))
        ]
        for node in nodes:
            assert node.last_use <= self.clock.now, "a node is used after now"
            assert node.last_use >= self._used.get(node, 0.0), "a node's last use runs back"
        self._used = {node: node.last_use for node in nodes}

    def _check_all(self) -> None:
        manager = self.manager
        self._engine.check_integrity()
        self._check_uses()
        self._books.check_order()
        self._books.check_tree(manager)
        self._books.check_shares()
        for adapter in manager.adapters.values():
            assert not adapter.pinned or adapter.device, "a pinned adapter left the device"
            for node in (adapter, *manager.tree.below(adapter)):
                if node.on_device and node.on_host and node.size:
                    here = [self.memory.read(block) for block in node.device]
                    assert here == self.host.read(node.host), "the two copies of a node differ"

    def _rest(self) -> None:
        """A replica that nobody uses any more: its books add up, and everything can be given back."""
        drained = self.replica.drain()
        self._until(drained.done, "the drain never ends")
        manager = self.manager
        for record in self.parts.registry.records():
            assert record.node.uid in self.clients.loaded, f"nobody was told of this version of {record.name}"
            self.clients.command("unload", self.replica.unload_adapter(record.name), record.name)
        self._until(lambda: not self.clients.commands, "an adapter is never gone")
        for _ in range(FLUSHES):
            self._until(lambda: not (manager.flying or manager.reserved), "a copy or a read never ends")
            flushed = self.replica.flush_cache()
            self._until(flushed.done, "the flush never ends")
            if manager.device.free == manager.device.total:
                break
        self._check_tiers()
        self._check_all()
        self._books.check_slots()
        self._books.check_empty()
        assert not self.weights.done, "an adapter is merged that nobody knows"
        assert not manager.leases.live, "a lease is left"
        assert manager.device.free == manager.device.total, f"blocks of the device are left: {manager.device}"
        assert manager.host.free == manager.host.total, f"blocks of the host are left: {manager.host}"

    def _until(self, done: Callable[[], bool], otherwise: str) -> None:
        last = self.tasks.turns + MOST_TURNS
        while True:
            self.clients.check()
            if done():
                return
            assert self.tasks.turns < last, otherwise
            self.turn()


def _drawn_config(draw: random.Random) -> tuple[EngineConfig, CacheConfig]:
    engine = EngineConfig(
        max_seqs=draw.choice((2, 3, 6)),
        max_step_tokens=draw.choice((32, 64, 96)),
        max_queue=draw.choice((6, 20, 40)),
        overlap=draw.random() < 0.8,
        cold_start=draw.choice(("wait", "stream", "stream", "cpu")),
        merge=draw.choice(("off", "auto", "auto")),
    )
    policies = ("jlora",) * 5 + ("fastlibra", "lru", "vllm", "slora")
    cache = CacheConfig(policy=draw.choice(policies), monitor_s=0.1, link_gbps=draw.choice((1e-3, 1e-4, 3e-5)))
    return engine, cache


def _play(world: World, steps: int) -> None:
    for _ in range(2 * steps):
        if world.steps < steps and not world.over:
            world.round()
    world.finish()


def play(seed: int, steps: int, journal: Journal) -> Mapping[str, int]:
    """Plays a seed; how often each site struck. Raises what it finds."""
    with heard() as log:
        world = World(seed, journal)
        _play(world, steps)
        # It has failed, or was closed, with all that it served.
        if world.over and random.Random(f"{seed} again").random() < AGAIN:
            after = World(seed, journal, world)
            _play(after, steps // AFTER)
            world.sites.fired += after.sites.fired
    assert not log.found, log.found[0]
    world.sites.fired["peer.reads"] = world.fetcher.fetched
    journal.write(f"{world.tasks.turns} turns, {world.clock.now:.6f} s, {world.clients.answered} answers")
    return world.sites.fired
