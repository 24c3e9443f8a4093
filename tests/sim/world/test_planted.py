"""The world can fail: each planted bug is found within the seeds that CI plays, by the one in docs/simulated-faults.md.

Each has what the failure must say. Those of the cache that are planted in its own world are planted here, too. Then
the ones that only a whole replica can have, and faults that were mended once, taken back one by one.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jlora.adapters.packing import NUMPY_DTYPES, Packed
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.manager import CacheManager
from jlora.cache.residency import Residency
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Copy
from jlora.cache.tree import Node, Origin
from jlora.cluster import peer
from jlora.cluster.peer import Head, _Transfer
from jlora.engine import faults as faults_module
from jlora.engine import loaders, sources
from jlora.engine.faults import Faults
from jlora.engine.futures import follow
from jlora.engine.loaders import Loaders
from jlora.engine.loading import Adapters
from jlora.engine.local import LocalReplica
from jlora.engine.plan import NOTHING, Sequence, StepPlan
from jlora.engine.scheduler import Scheduler
from jlora.engine.switching import Switching
from jlora.errors import InvalidArgument
from jlora.sim.world import disk, report
from jlora.sim.world.merging import Weights
from jlora.types import TokenEvent
from tests.cache import test_planted_bugs as cache
from tests.sim.world import _answers, table
from tests.sim.world._answers import TOKEN, Plant
from tests.sim.world.test_seeds import SEEDS, STEPS

OF_THE_PATCH = r"\b(AttributeError|NameError|TypeError)\b"


def wrong_salt(patch: pytest.MonkeyPatch) -> None:
    """Two tenants share KV."""
    patch.setattr(Sequence, "origin", property(lambda s: Origin(s.adapter, "", s.activation)))


def ignored_cancel(patch: pytest.MonkeyPatch) -> None:
    """A request that runs is not aborted."""
    real = Scheduler.abort

    def abort(scheduler: Scheduler, handle: int, now: float, moved: bool = False) -> list[TokenEvent]:
        return [] if any(s.handle == handle for s in scheduler.running) else real(scheduler, handle, now, moved)

    patch.setattr(Scheduler, "abort", abort)


def ignored_deadline(patch: pytest.MonkeyPatch) -> None:
    """A request runs on behind its deadline."""
    patch.setattr(Scheduler, "expire", lambda scheduler, now: [])


def replayed_token(patch: pytest.MonkeyPatch) -> None:
    """A sequence's last token goes out again after a preemption."""
    real = Scheduler.commit

    def commit(scheduler: Scheduler, plan: StepPlan, drawn: Any, now: float) -> list[TokenEvent]:
        events = real(scheduler, plan, drawn, now)
        again = [e for e in events if e.token_id is not None and e.finish_reason is None and scheduler.preemptions > 2]
        return events + again[:1]

    patch.setattr(Scheduler, "commit", commit)


def clock_use(patch: pytest.MonkeyPatch) -> None:
    """Deadlines are compared with the machine's clock."""
    real = Scheduler.expire
    patch.setattr(Scheduler, "expire", lambda scheduler, now: real(scheduler, time.time()))


def wall_clock(patch: pytest.MonkeyPatch) -> None:
    """A reading of the machine's clock decides whether anybody runs: two runs of a seed differ."""
    real = Scheduler.plan

    def plan(scheduler: Scheduler, now: float) -> StepPlan:
        return StepPlan((), (), ()) if time.perf_counter_ns() % 7 == 0 else real(scheduler, now)

    patch.setattr(Scheduler, "plan", plan)


def unbounded_queue(patch: pytest.MonkeyPatch) -> None:
    """The queue takes any number."""
    patch.setattr(Scheduler, "pending", property(lambda scheduler: 0))


def stale_version(patch: pytest.MonkeyPatch) -> None:
    """A replacement under the same name is not filled: its blocks hold what was there before."""
    real = Adapters.fill

    def fill(adapters: Adapters, blocks: tuple[int, ...], new: Any) -> None:
        if not adapters.has(new.name):
            real(adapters, blocks, new)

    patch.setattr(Adapters, "fill", fill)


def stale_name(patch: pytest.MonkeyPatch) -> None:
    """A replaced adapter's name still stands for the old version, now and then."""
    real = Adapters.publish

    def publish(adapters: Adapters, new: Any, blocks: Any, pinned: bool = False, replaces: bool = False) -> Any:
        old = adapters._registry.get(new.name) if adapters.has(new.name) else None
        info = real(adapters, new, blocks, pinned, replaces)
        if old is not None and old.node.users:
            adapters._registry._by_name[new.name] = old
        return info

    patch.setattr(Adapters, "publish", publish)


def lost_command(patch: pytest.MonkeyPatch) -> None:
    """One of a hundred commands is forgotten."""
    real = LocalReplica.between_steps

    def between_steps(replica: LocalReplica, command: Callable[[], Any]) -> Future:
        calls = vars(replica).setdefault("calls", itertools.count(1))  # of this run: a second one goes the same way
        return Future() if next(calls) % 100 == 0 else real(replica, command)

    patch.setattr(LocalReplica, "between_steps", between_steps)


def failure_ends_all(patch: pytest.MonkeyPatch) -> None:
    """A request that fails takes every other one with it."""
    real = Scheduler.fail

    def fail(scheduler: Scheduler, handle: int, error: Exception, now: float) -> list[TokenEvent]:
        return [event for each in list(scheduler._requests) for event in real(scheduler, each, error, now)]

    patch.setattr(Scheduler, "fail", fail)


def failed_copy_ends_another(patch: pytest.MonkeyPatch) -> None:
    """A copy that fails ends a request of an adapter that it did not bring."""
    real = Scheduler.fail_copy

    def fail_copy(scheduler: Scheduler, copy: Copy, error: Exception, now: float) -> list[TokenEvent]:
        others = [s.handle for s in scheduler.running if s.adapter not in copy.nodes and s.adapter.size]
        return real(scheduler, copy, error, now) + (scheduler.fail(others[0], error, now) if others else [])

    patch.setattr(Scheduler, "fail_copy", fail_copy)


def failure_that_lasts(patch: pytest.MonkeyPatch) -> None:
    """A copy to a block fails because an earlier one to it has."""
    real = Swapper._finish

    def finish(swapper: Swapper, job: Any, error: BaseException | None) -> None:
        failed: dict[int, BaseException] = vars(swapper).setdefault("planted", {})
        if job is not None and job.copy.direction == "in":
            error = error or next((failed[block] for block in job.copy.target if block in failed), None)
            failed.update(dict.fromkeys(job.copy.target, error) if error else {})
        real(swapper, job, error)

    patch.setattr(Swapper, "_finish", finish)


def pins_count_twice(patch: pytest.MonkeyPatch) -> None:
    """A request is refused for room that the pool has."""
    real = CacheManager.capacity

    def capacity(manager: CacheManager, adapter: Any, pinned: Any = None) -> int:
        again = sum(node.size for node in manager._pinned) * manager.block_tokens
        return max(0, real(manager, adapter, pinned) - again)

    patch.setattr(CacheManager, "capacity", capacity)


def first_position_is_none(patch: pytest.MonkeyPatch) -> None:
    """An invocation that a prompt begins with is not seen."""
    real = AdapterRegistry.resolve

    def resolve(registry: AdapterRegistry, name: str, prompt: Any, known: Any = None) -> Any:
        record, at = real(registry, name, prompt, known)
        if at == 0:
            raise InvalidArgument("prompt: does not invoke the adapter")
        return record, at

    patch.setattr(AdapterRegistry, "resolve", resolve)


def unread_ends_others(patch: pytest.MonkeyPatch) -> None:
    """An adapter that cannot be read ends all requests that wait."""

    def fail_adapter(scheduler: Scheduler, adapter: Any, error: Exception, now: float) -> list[TokenEvent]:
        handles = dict.fromkeys(sequence.handle for sequence in scheduler.queue)
        return [replace(event, error=error) for handle in handles for event in scheduler.abort(handle, now)]

    patch.setattr(Scheduler, "fail_adapter", fail_adapter)


def everybody_runs_on_merged_weights(patch: pytest.MonkeyPatch) -> None:
    """Requests of others run while an adapter is merged."""
    patch.setattr(Switching, "may_run", lambda switching, sequence: True)


def merged_and_beside(patch: pytest.MonkeyPatch) -> None:
    """A merged adapter's blocks act beside the weights, too."""
    patch.setattr(Switching, "merged", property(lambda switching: NOTHING))


def left_in_the_weights(patch: pytest.MonkeyPatch) -> None:
    """The first piece of a merged adapter stays in the weights."""
    real = Weights.back

    def back(weights: Weights) -> None:
        held = weights._held[0]
        real(weights)
        weights._held[0] = held

    patch.setattr(Weights, "back", back)


def unchecked_bytes(patch: pytest.MonkeyPatch) -> None:
    """What comes from another replica is taken without a look at its checksum."""

    def whole(transfer: _Transfer) -> tuple[np.ndarray, Head]:
        assert transfer._head is not None
        layout = transfer._reader.layout
        return transfer._data.view(NUMPY_DTYPES[layout.dtype]).reshape(-1, *layout.block_shape), transfer._head

    patch.setattr(_Transfer, "whole", whole)


def _unlock_at(patch: pytest.MonkeyPatch, by: float) -> None:
    """The end of a use counts as so many seconds later than it is."""
    real = Residency.unlock

    def unlock(cells: Residency, node: Node, used: bool = True) -> None:
        clock = cells.clock
        with pytest.MonkeyPatch.context() as shifted:
            shifted.setattr(cells, "clock", lambda: clock() + by)
            real(cells, node, used)

    patch.setattr(Residency, "unlock", unlock)


def used_after_now(patch: pytest.MonkeyPatch) -> None:
    """The end of a use is read from a clock that is ahead."""
    _unlock_at(patch, 1.0)


def used_before_it_was(patch: pytest.MonkeyPatch) -> None:
    """The end of a use is read from a clock that is behind."""
    _unlock_at(patch, -1.0)


def block_too_many(patch: pytest.MonkeyPatch) -> None:
    """An adapter takes a block more than its ranks fill."""
    disk.versions()  # what the device must find is of the real packing
    real = sources.pack

    def packed(*args: Any) -> Packed:
        made = real(*args)
        return Packed(np.concatenate([made.data, made.data[:1]]), (*made.projections, made.projections[0]))

    patch.setattr(sources, "pack", packed)


def cancelled_load_fails_another(patch: pytest.MonkeyPatch) -> None:
    """The end of a load that its caller has cancelled reaches another one's caller."""
    real, loads = Loaders.load, list[Future]()

    def load(self: Loaders, what: Any, settled: Any) -> Future:
        answer = real(self, what, settled)
        loads.append(answer)
        answer.add_done_callback(lambda ended: ended.cancelled() and [other.cancel() for other in loads])
        return answer

    patch.setattr(Loaders, "load", load)


# -- mended once, and taken back ------------------------------------------------------------------


def shortage_ends_the_engine(patch: pytest.MonkeyPatch) -> None:
    """A MemoryError in planning ends the engine."""
    patch.setattr(Faults, "plan", lambda faults, now: faults._scheduler.plan(now))


def failed_copy_ends_the_engine(patch: pytest.MonkeyPatch) -> None:
    """A copy that fails ends the engine."""

    def copies(faults: Faults) -> None:
        for _, error in faults._swapper.failed():
            raise error

    patch.setattr(Faults, "copies", copies)


def dead_thread_unseen(patch: pytest.MonkeyPatch) -> None:
    """The death of a thread is not reported."""
    patch.setattr(LocalReplica, "_fail", lambda replica, error: None)


def ids_of_all_tenants(patch: pytest.MonkeyPatch) -> None:
    """A request's name is the same for all tenants, and anybody may abort it."""
    real = LocalReplica.abort_named

    def abort_named(replica: LocalReplica, request_id: str, tenant: str = "") -> Future[bool]:
        first = next((name for name in replica._names if name[1] == request_id), (tenant, request_id))
        return real(replica, request_id, first[0])

    patch.setattr(LocalReplica, "abort_named", abort_named)


def mixed_versions(patch: pytest.MonkeyPatch) -> None:
    """Nobody sees that files changed while they were read."""
    patch.setattr(disk._OpenFolder, "unchanged", lambda folder: True)


def changed_on_the_disk(patch: pytest.MonkeyPatch) -> None:
    """An adapter that is read again may be another than was registered."""
    for module in (loaders, peer):
        patch.setattr(module, "check_version", lambda *_: None)


def unchecked(patch: pytest.MonkeyPatch) -> None:
    """After an error the engine continues without a check of what is half done."""
    patch.setattr(Scheduler, "undo", lambda scheduler, works: None)
    patch.setattr(faults_module.inspect, "check_integrity", lambda manager: None)


def pins_fill_the_pool(patch: pytest.MonkeyPatch) -> None:
    """Pinned adapters may leave no room for a long context."""
    patch.setattr(Adapters, "_check_pins", lambda *_: None)


def cancelled_load_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A load whose caller has gone puts its adapter in service."""

    def load(loaders: Loaders, what: Any, settled: Any) -> Future:
        answer: Future = Future()

        def over(loaded: Future) -> None:
            if not answer.cancelled():
                follow(loaded if loaded.exception() else settled(loaded.result()), answer)

        loaders.loads.submit(loaders._load, Future(), what).add_done_callback(over)
        return answer

    patch.setattr(Loaders, "load", load)


NEVER, UNSTRUCK = "never ends", "has failed, and nothing has struck it"
MENDED: Mapping[Plant, str] = {
    shortage_ends_the_engine: "^Shortage: ",
    failed_copy_ends_the_engine: r"^(Shortage|Planted): copy\.",
    dead_thread_unseen: "the server has stopped",
    ids_of_all_tenants: "is aborted, and nobody asked for it",
    mixed_versions: "a mix of two",
    changed_on_the_disk: TOKEN,
    unchecked: TOKEN,
    pins_fill_the_pool: "blocks are pinned of",
    cancelled_load_goes_on: "nobody was told of this version",
}
PLANTS: Mapping[Plant, str] = {
    **MENDED,
    cache.leaked_reference: "leases go through it",
    cache.leaked_block: "leaked or lost blocks",
    cache.child_without_parent: "on the device without what it depends on",
    cache.double_free: "less than nothing|two owners",
    cache.stale_content: f"{TOKEN}|the two copies of a node differ",
    cache.read_before_copy: TOKEN,
    cache.host_before_copy: "what is in flight",
    cache.lost_wakeup: NEVER,
    cache.lost_landing: NEVER,
    cache.suffix_without_adapter: "dependents on the device are miscounted",
    cache.suffix_of_any_adapter: TOKEN,
    cache.suffix_outlives_adapter: "a suffix outlives its adapter",
    cache.invocation_block_as_base: TOKEN,
    cache.copy_of_two_owners: "a lease reads another adapter's KV",
    wrong_salt: TOKEN,
    ignored_cancel: "goes on after it was cancelled",
    ignored_deadline: "outlives its deadline",
    replayed_token: TOKEN,
    clock_use: "is aborted, and nobody asked for it",
    wall_clock: "a second run of the seed went another way",
    unbounded_queue: "the queue has no bound",
    stale_version: f"{TOKEN}|gets other blocks",
    stale_name: "a version that had been replaced",
    lost_command: NEVER,
    failure_ends_all: UNSTRUCK,
    failed_copy_ends_another: UNSTRUCK,
    failure_that_lasts: "a copy has failed, and nothing was wrong with it",
    pins_count_twice: "is refused, and nothing was wrong: ResourceExhausted",
    first_position_is_none: "nothing was wrong.*: does not invoke",
    unread_ends_others: UNSTRUCK,
    cancelled_load_fails_another: "nothing was wrong with it: CancelledError",
    used_after_now: "used after now",
    used_before_it_was: "last use runs back",
    block_too_many: "whose ranks fill",
    everybody_runs_on_merged_weights: TOKEN,
    merged_and_beside: TOKEN,
    left_in_the_weights: "the weights hold",
    unchecked_bytes: f"{TOKEN}|gets other blocks",
    **_answers.PLANTS,
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_its_seed(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    # Every change of the engine shifts what a seed plays: the table says which one found the bug last.
    seeds = [table.seeds()[plant.__name__], *range(SEEDS)]
    with monkeypatch.context() as patch:
        plant(patch)
        played = report.run("engine", seeds, STEPS)
        found = next((one for one in played if re.search(PLANTS[plant], one.failure)), None)
    assert found is not None, "no seed of CI finds it any more"
    assert not re.search(OF_THE_PATCH, found.failure), "the patch itself fails: what it replaces has changed"
    (whole,) = report.run("engine", [found.seed], STEPS)
    assert not whole.failure, "the seed fails without it"
