"""One replica under a virtual clock: the product's engine over a modelled device and a modelled link.

Only the source of time differs from a real replica. Reading a step moves the clock to the step's
end, and a pause moves it to the next copy that lands. So the engine plans step N+1 after step N-1,
while step N runs, and the cache's meter measures virtual seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jlora.adapters.registry import AdapterRegistry, Record
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.policies import Policy
from jlora.config import CacheConfig, EngineConfig
from jlora.engine.cold_start import Chooser, Costs
from jlora.engine.engine import Engine, Shape
from jlora.engine.merging import Merging
from jlora.engine.ports import Parts
from jlora.engine.records import NewAdapter
from jlora.engine.scheduler import Scheduler
from jlora.engine.switching import Switching
from jlora.errors import ConfigError
from jlora.sim.clock import VirtualClock
from jlora.sim.device import HelpingHost, ModelledDevice
from jlora.sim.link import Link, LinkSpec
from jlora.sim.merger import ModelledMerger, policy_of
from jlora.step_model import FittedSteps, StepModel
from jlora.types import Invocation, Request, TokenEvent

IDLE_ROUNDS = 50  # monitor rounds that an idle replica skips after a round without a decision


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Parts and sizes of a replica. `kind` is the link's.

    Attributes:
        adapters: blocks of each adapter, by its index; places: of a layer at which they act.
        costs: of cold starts on the host, for `engine.cold_start` cpu and auto.
        block_bytes: 0: a replica of many does not measure how fast adapters come.
    """

    model: StepModel | FittedSteps
    link: LinkSpec
    sizes: Sizes
    adapters: tuple[int, ...]
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    costs: Costs | None = None
    kind: type[Link] = Link
    places: int = 1
    block_bytes: int = 0


class Replica:
    """The engine of one replica, on modelled hardware. Raises ConfigError if the host tier cannot hold the adapters."""

    def __init__(self, spec: ReplicaSpec, policy: Policy, merging: Merging | None = None):
        self.spec = spec
        self.clock = VirtualClock()
        helper = None
        if spec.costs is not None:
            helper = HelpingHost(spec.costs, spec.places, lambda copy, group: self.link.arrival(copy, group))
        self.device = ModelledDevice(spec.model, spec.link.groups, self.clock, helper)
        self.link = spec.kind(spec.link, self.clock, lambda: self.device.free_at)
        cache, start = spec.cache, spec.engine.cold_start
        streams = spec.link.groups > 1 and start != "wait"
        self.manager = CacheManager(spec.sizes, policy, self.clock, cache.prefix_reuse, streams, cache.monitor_s)
        if spec.costs is not None:
            auto = Chooser(spec.costs, policy.meter, spec.link.groups, lambda uid: spec.places)
            helps = auto if start == "auto" else lambda adapter, left_s, tokens: start == "cpu"
            self.manager.leases.gate.decide_by(helps, auto.predict if start == "auto" else None)
        registry = _Registry()
        switching = self._switching(merging, registry)
        self.scheduler = Scheduler(self.manager, spec.engine, eos_ids=(), turns=switching)
        parts = Parts(self.scheduler, registry, self.device, self.link, self.clock)
        longest = spec.sizes.device * spec.sizes.block_tokens
        self.engine = Engine(parts, Shape(longest, block_bytes=1, overlap=spec.engine.overlap), switching)
        self._settled = False  # idle, and the monitor's last round decided nothing
        for index, size in enumerate(spec.adapters):
            blocks = self.manager.reserve(size)  # of the host; the requests of one that exceeds the device are refused
            if blocks is None:
                raise ConfigError(
                    f"the adapters need {sum(spec.adapters)} blocks of host memory, and the host tier has "
                    f"{spec.sizes.host}; raise --host-gb"
                )
            new = NewAdapter(str(index), "", {}, (), (), ("q",) * size, data=None, bytes=size, read_s=0.0)
            self.engine.adapters.publish(new, blocks)

    def _switching(self, merging: Merging | None, registry: AdapterRegistry) -> Switching | None:
        """Switches as `merging` decides, or as `engine.merge` says."""
        spec, engine = self.spec, self.spec.engine
        if merging is None and engine.merge == "off":
            return None
        made = merging or policy_of(engine.merge, engine.max_seqs, engine.merge_starve_s, spec.model, spec.adapters)
        return Switching(made, ModelledMerger(spec.model, self.device), registry, self.link, engine.merge)

    @property
    def busy(self) -> bool:
        return self.engine.busy

    @property
    def pause_s(self) -> float:
        """Until the monitor's next round that an idle engine needs."""
        return self.spec.cache.monitor_s * (IDLE_ROUNDS if self._settled else 1)

    def submit(self, request: Request, at: float) -> int:
        """Queues a request that came at `at`; its handle."""
        return self.engine.submit(request, at)

    def hint(self, request: Request) -> None:
        self._settled = False
        self.engine.prefetch(request)

    def step(self, until: float) -> list[TokenEvent]:
        """One engine step, which pauses at most until `until` if nothing can run."""
        self._settled = False
        self.clock.horizon = until
        return self.engine.step()

    def idle(self, until: float) -> None:
        """Tends an idle engine at `until` or at its monitor's next round, whichever comes first.

        While nothing is used and nothing lands, every round decides the same. So after a round without
        a decision only every `IDLE_ROUNDS`th runs.
        """
        self.clock.advance(min(until, self.clock.now + self.pause_s, self.link.next_landing()))
        started = self.engine.tend()
        self._settled = not started and not self.engine.copying


class _Registry(AdapterRegistry):
    """Adapters whose activation comes with each request, from the trace."""

    def resolve(self, name: str, prompt: object, known: Invocation | None = None) -> tuple[Record, int | None]:
        return self.get(name), None if known is None else known.at


def request_for(
    name: str, prompt: tuple[int, ...], adapter: int | None, activation: int | None, **fields: Any
) -> Request:
    """A request for the adapter of this index, which acts from position `activation` on."""
    invocation = None if activation is None else Invocation((), activation)
    return Request(name, prompt, adapter=None if adapter is None else str(adapter), invocation=invocation, **fields)
