"""The one place where tests know what the product keeps to itself.

A test asks the public names first: state, counters, metrics, messages. What only the inside can say or do is here, one
function each, so that a change of the inside changes this file and no test. `tests/test_architecture.py` enforces it.
The cluster has a part of its own, `tests/cluster/_port.py`.

A `Seam` is where a test puts something of its own: `monkeypatch.setattr(*seam, mine)`, with `getattr(*seam)` before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import jax
import pytest
from jax.sharding import Sharding

from jlora import LLM
from jlora.adapters import peft_config
from jlora.cache.fastlibra import Fastlibra
from jlora.cache.manager import CacheManager
from jlora.cache.transfer import Meter
from jlora.cache.tree import AdapterNode
from jlora.cluster.view import View
from jlora.doctor import profile
from jlora.engine import build
from jlora.engine.admission import Admission
from jlora.engine.engine import Engine
from jlora.engine.host_lora import HostLora
from jlora.engine.local import LocalReplica
from jlora.engine.merger import Merger
from jlora.engine.plan import Sequence
from jlora.engine.ports import Parts
from jlora.engine.runner import Runner
from jlora.engine.scheduler import Scheduler
from jlora.engine.shelf import Shelf
from jlora.engine.switching import Switching
from jlora.gaps import Gaps
from jlora.model import checkpoint, place, sampling, traced
from jlora.model.sampling import SlotState
from jlora.model.spec import ModelSpec
from jlora.ports import System
from jlora.serve import launcher, status
from jlora.serve.access.tenants import Tenants
from jlora.serve.backend import Backend
from jlora.serve.gate import Gate
from jlora.sim.fleet import Fleet
from jlora.types import AdapterInfo

T = TypeVar("T")
Seam = tuple[Any, str]

# -- cache and model --------------------------------------------------------------------------------


def price(meter: Meter, kind: int, fixed_s: float) -> None:
    """Loads of this kind of node have this fixed part from now on, as if measured."""
    meter._fits[kind].fixed = fixed_s


def batch(policy: Fastlibra) -> float:
    """What the policy takes for the number of running sequences."""
    return policy._batch


def present(queue: Admission) -> Iterator[Sequence]:
    """The queued sequences that a step looks at."""
    return queue._present()


def not_yet() -> Seam:
    """Whether a step passes over a queued sequence."""
    return Admission, "_not_yet"


def streams(manager: CacheManager) -> bool:
    """Whether long copies come in groups of layers."""
    return manager._cells.streams


def tensor_read() -> Seam:
    """Reads one tensor of a checkpoint."""
    return checkpoint._Tensor, "read"


def open_weights(model: Path, spec: ModelSpec, files: ExitStack) -> object:
    """Opens a checkpoint's files, and checks their headers."""
    return checkpoint._open(model, spec, files)


def mover(where: Sharding, dtype: str, transposed: bool) -> Any:
    """Turns a tensor as it is stored into a weight."""
    return place._mover(where, dtype, transposed)


def filler(where: Sharding, transposed: bool) -> Any:
    """The same, into a layer of a stack."""
    return place._filler(where, transposed)


def with_tables(logits: jax.Array, state: SlotState, batch: Any) -> jax.Array:
    """Logits with penalties and biases."""
    return sampling._with_tables(logits, state, batch)


def truncated(logits: jax.Array, batch: sampling.SampleBatch) -> jax.Array:
    """What top-k, top-p and min-p leave of logits."""
    return sampling._truncate(logits, batch)


def gap_records(gaps: Gaps) -> int:
    """How many seconds of the past it keeps."""
    return len(gaps._seconds)


def peft_options() -> list[str]:
    """All options of PEFT that are known, in order."""
    return sorted(peft_config._HONOURED | peft_config._HARMLESS | peft_config._FIXED.keys())


# -- engine -----------------------------------------------------------------------------------------


def parts(replica: LocalReplica) -> Parts:
    """What the replica's engine is put together from."""
    return replica._built.parts


def engine(replica: LocalReplica) -> Engine:
    return replica._engine


def system(replica: LocalReplica) -> System:
    return replica._system


def look(replica: LocalReplica) -> None:
    """Has the replica look at its adapters' files now."""
    replica._watch.look()


def loads(replica: LocalReplica) -> Seam:
    """Loads an adapter, on a loader's thread."""
    return replica._loaders, "_load"


def commands(replica: LocalReplica) -> int:
    """Commands that wait for the end of a step."""
    return len(replica._commands)


def when(replica: LocalReplica, ask: Callable[[], T | None]) -> Future[T]:
    """Has the engine's thread ask until there is an answer."""
    return replica._when(ask)


def settled(replica: LocalReplica, info: AdapterInfo) -> Future[AdapterInfo]:
    """The end of a load that has published this version."""
    return replica._settled(info)


def compile_beside(replica: LocalReplica, form: Any) -> Future[None]:
    """Compiles a form on the compiler's thread."""
    return replica._remaining._thread.submit(replica._remaining._compile, form)


def end_threads(replica: LocalReplica) -> None:
    """Those of a replica whose engine cannot be closed any more."""
    replica._loaders.close()
    replica._watch.close()


def profiling(replica: LocalReplica) -> bool:
    return replica._profiler._running.locked()


def reading(shelf: Shelf) -> int:
    """Adapters on their way from the disk."""
    return len(shelf._under_way)


def to_device(swapper: Any) -> Any:
    """The lane of copies to the device."""
    return swapper._lanes["in"]


def programs(runner: Runner) -> Seam:
    return runner, "_programs"


def sets_up(runner: Runner) -> Seam:
    """Writes a sequence's slot before its first launch."""
    return runner, "_set_up"


def makes_room(scheduler: Scheduler) -> Seam:
    """Gives a decoding sequence room for one more token."""
    return scheduler, "_make_room"


def advance(switching: Switching, usual_s: float) -> bool:
    """Goes on with a switch, where a usual step takes so long."""
    switching._usual_s = usual_s
    return switching.advance()


def deadlines(scheduler: Scheduler) -> int:
    """How many the scheduler keeps."""
    return len(scheduler._deadlines)


def counters(scheduler: Scheduler) -> dict[int, Any]:
    """The tenants' counters, by priority."""
    return scheduler.queue._shares


def helper(runner: Runner) -> HostLora:
    """The host's part in cold starts."""
    assert runner._assist is not None
    return runner._assist._host


def share_out(host: HostLora, threads: int) -> None:
    """An adapter's tokens are cut for so many threads."""
    host._size = threads


# -- merging ----------------------------------------------------------------------------------------


def switching(engine: Engine) -> Switching:
    assert engine._switching is not None
    return engine._switching


def merger(switching: Switching) -> Any:
    return switching._merger


def save(switching: Switching) -> None:
    """As after hours without a merge: its budget is as large as it may be."""
    switching.policy._budget_s = math.inf


def want(switching: Switching, node: AdapterNode | None) -> None:
    """Merges this adapter next, or takes the merged one out."""
    switching._target = node


def forget_merged(switching: Switching) -> None:
    """As before an adapter was chosen. Nothing may be merged."""
    switching._losses.clear()
    switching._node = None


def take_for_measured(switching: Switching, node: AdapterNode, patch: pytest.MonkeyPatch) -> None:
    """Makes an adapter the one to merge, as if its data was read and its loss measured."""
    switching._node = switching._target = node
    patch.setattr(switching, "_read", lambda node: None)
    patch.setattr(switching, "_measured", lambda node: True)


def merges(merger: Merger) -> Seam:
    """Adds the factors to one projection of one layer."""
    return merger, "_merged"


def unmerges(merger: Merger) -> Seam:
    """Takes them out again."""
    return merger, "_unmerged"


def merge_base(merger: Merger) -> Seam:
    """The base's own weights."""
    return merger, "_base"


def collect(merger: Merger) -> None:
    """Waits for what rounding has lost, which comes to the host beside the steps."""
    merger._lost.collect()
    merger._lost.collect()


def lost(merger: Merger) -> dict[tuple[int, str], Any]:
    """What rounding has lost, as far as it has come to the host."""
    return merger._lost._kept


# -- fronts -----------------------------------------------------------------------------------------


def tenants(gate: Gate, limits: Tenants) -> int:
    """Tenants by name in the tables of both, with that of no name."""
    return len(gate._completions._by) + len(gate._bytes._by) + len(limits._tenants)


async def abort_call(context: Any, error: Exception, method: str) -> None:
    """Ends a call with an error."""
    await status._abort(context, error, method)


def tracing(endpoint: str) -> object:
    """What a server traces with."""
    return launcher._tracing(endpoint)


def limited(backend: Backend, tenant: str) -> int:
    """The tenant's calls that count."""
    return backend.access.tenants._tenants[tenant]._under_way.total()


# -- simulator --------------------------------------------------------------------------------------


def live(fleet: Fleet) -> int:
    """Requests that have not ended."""
    return len(fleet._lives)


def seen(fleet: Fleet) -> View:
    """What the fleet's books say of its replicas."""
    return fleet._books.view


def at_rest(fleet: Fleet) -> bool:
    """Whether the fleet remembers no request, at any replica or in its books."""
    left = fleet._lives or any(side.names or side.handles for side in fleet._sides.values())
    return not left and all(view.sent == 0 and not view.held.context for view in fleet._books.view.values())


def adapters_read_at_start() -> Seam:
    """The last part of a start that may fail."""
    return build, "_read_in"


def timed_waits() -> Seam:
    """The device profile's wait for a step."""
    return profile._Watched, "wait"


def sources_of_programs() -> bytes:
    """A digest of the source files that decide the programs, as they are now."""
    return traced._sources()


def between_steps(llm: LLM, command: Callable[[], T]) -> Future[T]:
    """Runs on the thread of the model's engine."""
    return llm._replica.between_steps(command)  # type: ignore[attr-defined]


def part_of(llm: LLM, name: str) -> Any:
    """Of the model's replica: `_thread`, which runs the engine, or `_engine`."""
    return getattr(llm._started, name)


def weights(llm: LLM) -> jax.Array:
    """One of the weights that the model began with."""
    replica: Any = llm._started
    return replica._built.runner.weights.params["norm"]
