"""A whole replica around the cache manager, without a device: requests, steps, a link, a clock.

The two memories are dicts from block to *what it holds*: a KV block holds the adapter version,
the tenant and every token up to its end (KV depends on all that comes before it) with a mark where
an activated LoRA began to act; an adapter's block the version and its place. A block is written
when a step computes it or a copy lands, and read when a step runs: what is read must be what the
sequence is about. So a stale version, a wrong block, a read before the copy or a copy from a block
that has changed hands all show, whatever the
manager believes. After every operation the books are checked too.

Operations take plain numbers, so that a seeded driver and hypothesis run the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from jlora.cache import inspect
from jlora.cache.baselines import Slora, Vllm, VllmFair
from jlora.cache.fastlibra import Fastlibra, Knobs, Wol, Wom, Wos
from jlora.cache.manager import CacheManager, Lease, Sizes, Want
from jlora.cache.policies import Jlora, Policy
from jlora.cache.readiness import Readiness
from jlora.cache.transfer import Copy, Meter
from jlora.cache.tree import AdapterNode, Node, Origin, SuffixNode
from tests.cache._books import check_idle

BLOCK = 2  # tokens per block
FIXED_S, EACH_S, TOKEN_S = 4e-3, 1e-2, 4e-3  # the link and the compute: a prefix is sometimes computed again
NAMES = 6  # adapters by name; 0 is the base
ACTIVATED = (4, 5)  # names of activated LoRAs
SIZES = (0, 1, 2, 3, 1, 2)  # blocks of each
Content = tuple[object, ...]

POLICIES: dict[str, Callable[[Meter], Policy]] = {
    "jlora": Jlora,
    "fastlibra": lambda meter: Fastlibra(meter, Knobs(tau_s=1.0)),
    "fastlibra-wom": lambda meter: Wom(meter, Knobs()),
    "fastlibra-wos": lambda meter: Wos(meter, Knobs()),
    "fastlibra-wol": lambda meter: Wol(meter, Knobs()),
    "lru": Policy,
    "vllm": Vllm,
    "vllm-fair": lambda meter: VllmFair(meter, 0.2),
    "slora": Slora,
}
UNBOUND = {"fastlibra-wom", "vllm", "vllm-fair"}  # KV may lose what it depends on


@dataclass(eq=False)
class Job:
    """A request, queued or running."""

    origin: Origin
    tokens: list[int]
    goal: int  # tokens at its end
    reuse: bool
    want: Want | None = None
    lease: Lease | None = None
    computed: int = 0
    refused: int = -1  # the manager's epoch then

    @property
    def adapter(self) -> AdapterNode:
        return self.origin.adapter


@dataclass
class World:
    """One manager with everything around it; see the module's docstring."""

    policy: str
    device_blocks: int = 32
    host_blocks: int = 40
    streams: bool = False  # a step may start before its copies have landed
    now: float = 1.0
    uid: int = 0
    queue: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    flights: list[tuple[Copy, list[Content | None]]] = field(default_factory=list)
    device: dict[int, Content | None] = field(default_factory=dict)
    host: dict[int, Content | None] = field(default_factory=dict)
    operations: int = 0
    finished: int = 0
    invalid: int = 0  # the most invalid KV seen at once
    shared: int = 0  # times that leases of several adapters went through one block
    ahead: int = 0  # steps before the adapter had come
    memory: int = 90  # blocks that the host's memory can still give
    tight: int = 0  # times that the host tier had less than it was made for

    def __post_init__(self) -> None:
        policy = POLICIES[self.policy](Meter(EACH_S, TOKEN_S))
        sizes = Sizes(self.device_blocks, self.host_blocks, BLOCK, spare=lambda: self.memory)
        self.manager = CacheManager(sizes, policy, clock=lambda: self.now, streams=self.streams)
        self.names: list[AdapterNode | None] = [self.manager.base]
        self.names += [self._load(size) for size in SIZES[1:]]

    # -- operations: each takes any non-negative numbers ------------------------------------------

    def submit(self, which: int, seed: int, length: int) -> None:
        """A request: few adapters, tenants, letters and invocations, so that prefixes meet."""
        prompt = self._prompt(seed, length)
        origin = self._origin(which, seed, prompt)
        goal = len(prompt) + 1 + (length + seed) % 7
        if origin is None or goal > self.manager.capacity(origin.adapter):
            return
        self._enqueue(Job(origin, prompt, goal, reuse=seed % 11 > 0))

    def admit(self, which: int, headroom: int) -> None:
        """Any queued request that may have a chance asks for its lease."""
        hopeful = [job for job in self.queue if job.refused != self.manager.epoch]
        if not hopeful:
            return
        job = hopeful[which % len(hopeful)]
        spare = headroom % 3 if self.running else 0
        spare_s = (math.inf, 0.0, 2 * EACH_S)[headroom // 3 % 3] if self.running else math.inf
        job.lease = self.manager.leases.acquire(job.origin, job.tokens, job.reuse, spare, spare_s=spare_s)
        if job.lease is None:
            job.refused = self.manager.epoch
            return
        job.computed = job.lease.cached
        assert job.want is not None and job.computed < len(job.tokens)
        self.manager.unexpect(job.want)
        self.queue.remove(job)
        self.running.append(job)

    def step(self, count: int, late: int) -> None:
        """Every running request that is ready computes up to `count` tokens; publishing may lag a step.

        One whose activated LoRA has not come may compute what comes before its invocation.
        """
        for job in list(self.running):
            assert job.lease is not None
            tokens = min(1 + count % 8, len(job.tokens) - job.computed)
            before = max(0, (job.origin.activation or 0) - job.computed)
            match self.manager.leases.gate.readiness(job.lease, tokens, before):
                case Readiness.READY | Readiness.STREAM:
                    self._compute(job, tokens, late % 2)
                case Readiness.AHEAD:
                    self.ahead += not job.adapter.ready
                    self._compute(job, min(tokens, before), late % 2)

    def abort(self, which: int) -> None:
        """The client goes away, in the queue or in flight."""
        jobs = self.queue + self.running
        if not jobs:
            return
        job = jobs[which % len(jobs)]
        if job.lease is not None:
            self._leave(job)
        else:
            assert job.want is not None
            self.queue.remove(job)
            self.manager.unexpect(job.want)

    def start_copies(self) -> None:
        """Copies decided so far go out; those to the host see the device as it is now."""
        for copy in self.manager.take_copies():
            copy.started = self.now
            memory = self.host if copy.direction == "in" else self.device
            self.flights.append((copy, [memory.get(block) for block in copy.source]))

    def land(self, which: int, count: int) -> None:
        """Some copies arrive, in any order."""
        done = []
        for _ in range(min(1 + count % 3, len(self.flights))):
            copy, data = self.flights.pop(which % len(self.flights))
            if copy.direction == "in":
                assert [self.host.get(b) for b in copy.source] == data, "the host changed under a copy"
            (self.device if copy.direction == "in" else self.host).update(zip(copy.target, data, strict=True))
            copy.seconds = FIXED_S + EACH_S * len(copy.source)
            done.append(copy)
        self.manager.landed(done)

    def tend(self, tenths: int) -> None:
        """Time passes, other processes take memory and give it back, and the monitor looks."""
        self.now += 0.05 * (1 + tenths % 40)
        self.memory = tenths * 7 % 90
        self.manager.tend(self.now, len(self.running))
        self.tight += self.manager.host.total < self.host_blocks

    def hint(self, which: int, seed: int, length: int) -> None:
        """A client says what it will send."""
        prompt = self._prompt(seed, length)
        origin = self._origin(which, seed, prompt)
        if origin is not None:
            self.manager.hint(origin, prompt)

    def pin(self, which: int, on: int) -> None:
        """Pins or unpins, if everybody queued or running could still run."""
        adapter = self.names[which % NAMES]
        if adapter is None or not adapter.size:
            return
        jobs = self.queue + self.running
        if on % 3 or all(job.goal <= self.manager.capacity(job.adapter, adapter) for job in jobs):
            self.manager.pin(adapter, not on % 3)

    def load(self, which: int, bring: int) -> None:
        """Loads an adapter, or again under a name in use; the old version dies with its last user."""
        name = 1 + which % (NAMES - 1)
        fresh = self._load(SIZES[name])
        if fresh is None:
            return
        old, self.names[name] = self.names[name], fresh
        if old is not None:
            self.manager.kill(old)
        if bring % 2:
            self.manager.bring_in(fresh)
        if bring % 3 == 1:
            self.manager.hasten(fresh)  # somebody waits for it

    def unload(self, which: int) -> None:
        """Unloads an adapter while it is used."""
        name = 1 + which % (NAMES - 1)
        adapter, self.names[name] = self.names[name], None
        if adapter is not None:
            self.manager.kill(adapter)

    def flush(self) -> None:
        """Drops all history that nobody uses."""
        self.manager.flush()

    # -- running it ------------------------------------------------------------------------------

    def do(self, action: str, numbers: tuple[int, ...]) -> None:
        """One operation, and every check after it."""
        self.operations += 1
        getattr(self, action)(*numbers[: ACTIONS[action][0]])
        self.check()

    def check(self) -> None:
        """The books, what the tiers add up to, pins, and what every block in the tree holds."""
        manager = self.manager
        inspect.check_integrity(manager)
        state = inspect.state(manager, block_bytes=1)
        for tier in (state.hbm, state.host):
            assert min(tier.free, tier.adapters, tier.history_kv, tier.running_kv) >= 0
            assert tier.free + tier.adapters + tier.history_kv + tier.running_kv == tier.total
        invalid = inspect.invalid_kv(manager)
        assert state.invalid_kv == invalid and (not invalid or self.policy in UNBOUND), "invalid KV"
        self.invalid = max(self.invalid, invalid)
        for adapter in manager.adapters.values():
            assert not adapter.pinned or adapter.device, "a pinned adapter left"
            self._check_held(adapter, [("adapter", adapter.uid, i) for i in range(adapter.size)])
            for node, content in self._below(adapter):
                self._check_held(node, [content])
                self.shared += node.users > 1 and len({lease.adapter for lease in self._through(node)}) > 1

    def drain(self, seed: int = 0) -> None:
        """Runs everything to its end: nothing waits forever, and at rest nothing is held."""
        draw = random.Random(seed)
        for _ in range(40 * (len(self.queue) + len(self.running) + 10)):
            if not (self.queue or self.running or self.flights or self._decided):
                break
            before = self._progress()
            self.start_copies()
            while self.flights:
                self.land(draw.randrange(99), 0)
            leases = [job.lease for job in self.running if job.lease]
            ready = [self.manager.leases.gate.readiness(lease, 1, 0) is Readiness.READY for lease in leases]
            assert all(ready), "a landed copy is not seen"
            for _ in range(len(self.queue)):
                self.admit(0, 0)
            self.step(7, 0)
            self.check()
            assert self._progress() != before, "nothing moves and somebody waits"
        assert not self.queue and not self.running, "somebody waits forever"
        check_idle(self.manager)

    def close(self) -> None:
        """Unloads everything: every block of both tiers comes back."""
        self.drain()
        for name in range(1, NAMES):
            self.unload(name - 1)
        self.manager.flush()
        self.check()
        assert self.manager.device.free == self.device_blocks, "device blocks are left over"
        assert self.manager.host.free == self.manager.host.total, "host blocks are left over"

    # -- inside ------------------------------------------------------------------------------------

    def _progress(self) -> tuple[int, ...]:
        computed = sum(job.computed for job in self.running)
        return self.manager.epoch, self.finished, computed, len(self.queue), self._decided

    @property
    def _decided(self) -> int:
        """Copies that have not gone out."""
        return len(inspect.cells(self.manager).traffic.outbox)

    def _prompt(self, seed: int, length: int) -> list[int]:
        draw = random.Random(seed % 6)
        return [draw.randint(0, 1) for _ in range(1 + length % 17)]

    def _origin(self, which: int, seed: int, prompt: list[int]) -> Origin | None:
        """Whose KV a request's is; an activated LoRA acts from one of four places on."""
        name = which % NAMES
        adapter = self.names[name]
        activation = (0, 3, 4, 9)[seed // 6 % 4] % len(prompt) if name in ACTIVATED else None
        return None if adapter is None else Origin(adapter, "ab"[seed % 2], activation)

    def _through(self, node: Node) -> list[Lease]:
        return [lease for lease in self.manager.leases.live.values() if node in lease.path]

    def _load(self, size: int) -> AdapterNode | None:
        self.uid += 1
        blocks = self.manager.reserve(size)
        if blocks is None:
            return None
        self.host.update({block: ("adapter", self.uid, i) for i, block in enumerate(blocks)})
        return self.manager.add_adapter(self.uid, blocks)

    def _enqueue(self, job: Job) -> None:
        job.want = self.manager.expect(job.origin, job.tokens, job.reuse, place=self.operations)
        self.queue.append(job)

    def _leave(self, job: Job) -> None:
        assert job.lease is not None
        self.running.remove(job)
        self.manager.leases.release(job.lease)
        job.lease, job.computed, job.refused = None, 0, -1

    def _compute(self, job: Job, count: int, late: int) -> None:
        lease, known = job.lease, job.computed
        assert lease is not None
        end = min(known + count, len(job.tokens))
        if not self.manager.leases.grow(lease, end):
            self._enqueue(job)  # first: its adapter version may live for this request alone
            self._leave(job)
            return
        streams = self.manager.leases.streams([lease])
        if streams:
            self.start_copies()  # what is decided with a step goes out before it runs
        data = dict(self.flights)
        for copy in streams:
            assert copy.streams and copy in data, "a step reads what is not on its way"
            self.device.update(zip(copy.target, data[copy], strict=True))
        self._read(job)
        for index in range(known // BLOCK, -(-end // BLOCK)):
            assert index >= len(lease.path), "a step writes into what others read"
            self.device[lease.blocks[index]] = self._kv(job, min(end, (index + 1) * BLOCK))
        job.computed = end
        self.manager.leases.publish(lease, job.tokens, known if late else end)
        self._read(job)
        if end == len(job.tokens):  # it has drawn a token
            if len(job.tokens) == job.goal:
                self.finished += 1
                self._leave(job)
            else:
                job.tokens.append((len(job.tokens) + job.tokens[0]) % 2)

    def _read(self, job: Job) -> None:
        """What a step that runs this sequence now would read."""
        lease = job.lease
        assert lease is not None
        if not lease.ahead:
            found = [self.device.get(block) for block in lease.adapter.device]
            assert found == [("adapter", job.adapter.uid, i) for i in range(job.adapter.size)], "wrong adapter read"
        for index in range(-(-job.computed // BLOCK)):
            expected = self._kv(job, min(job.computed, (index + 1) * BLOCK))
            assert self.device.get(lease.blocks[index]) == expected, "wrong KV read"

    def _kv(self, job: Job, end: int) -> Content:
        uid, at = job.adapter.uid, job.origin.activation
        if at is None:
            return ("kv", uid, job.origin.salt, *job.tokens[:end])
        activated = (("acts", uid), *job.tokens[at:end]) if end > at else ()
        return ("kv", 0, job.origin.salt, *job.tokens[: min(at, end)], *activated)

    def _check_held(self, node: Node, expected: list[Content]) -> None:
        if node.on_device:
            assert [self.device.get(b) for b in node.device] == expected, "the device holds something else"
        if node.on_host:
            assert [self.host.get(b) for b in node.host] == expected, "the host holds something else"

    def _below(self, adapter: AdapterNode) -> list[tuple[Node, Content]]:
        """Every KV node of an adapter and what its block must hold."""
        found: list[tuple[Node, Content]] = []
        stack: list[tuple[Node, Content]] = [(adapter, ("kv", adapter.uid))]
        while stack:
            node, above = stack.pop()
            for child in node.branches():
                content = self._content(child, above)
                found.append((child, content))
                stack.append((child, content))
        return found

    def _content(self, node: Node, above: Content) -> Content:
        """What a node's block must hold by its key, under a block that holds `above`."""
        tenant, data = node.key if isinstance(node.key, tuple) else (None, node.key)
        tokens: list[object] = [*memoryview(data[: 4 * BLOCK]).cast("i")]
        if isinstance(node, SuffixNode):
            uid, at = memoryview(data[4 * BLOCK :]).cast("q")
            assert node.adapter.uid == uid, "a suffix is found under another adapter"
            tokens.insert(at, ("acts", uid))
        return (*above, *([] if tenant is None else [tenant]), *tokens)


# Operation -> (numbers it takes, how often the seeded driver draws it).
ACTIONS: dict[str, tuple[int, int]] = {
    "submit": (3, 14), "admit": (2, 22), "step": (2, 30), "abort": (1, 3), "start_copies": (0, 16),
    "land": (2, 20), "tend": (1, 10), "hint": (3, 3), "pin": (2, 2), "load": (2, 2), "unload": (1, 1), "flush": (0, 1),
}  # fmt: skip


def drive(policy: str, seed: int, operations: int) -> World:
    """Random operations from a seed, then the end of everything; the world they leave."""
    draw = random.Random(f"{policy} {seed}")
    world = World(
        policy, device_blocks=draw.choice((24, 32)), host_blocks=draw.choice((16, 28, 90)), streams=seed % 2 > 0
    )
    names = list(ACTIONS)
    weights = [ACTIONS[name][1] for name in names]
    for action in draw.choices(names, weights, k=operations):
        if action == "submit" and len(world.queue) > 6:
            action = "admit"
        world.do(action, (draw.randrange(1000), draw.randrange(1000), draw.randrange(1000)))
    world.close()
    return world
