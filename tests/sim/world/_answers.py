"""Bugs in what a request is answered, told and charged, for `test_planted`: each with what the world must say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from jlora.adapters import registry
from jlora.adapters.catalogue import Catalogue
from jlora.cache.lease import Lease
from jlora.cache.leases import Leases
from jlora.engine import admission, loading, local, scheduler, shares
from jlora.engine.admission import Admission
from jlora.engine.futures import done
from jlora.engine.local import LocalReplica
from jlora.engine.plan import Sequence
from jlora.engine.records import of_row
from jlora.engine.scheduler import Scheduler
from jlora.engine.watch import Watch
from jlora.types import Request, Timing, Usage

Plant = Callable[[pytest.MonkeyPatch], None]
TOKEN = r"token \d+ is \d+, and must be \d+"


def salt_ignored(patch: pytest.MonkeyPatch) -> None:
    """Two salts of one tenant share KV."""
    patch.setattr(Request, "salt", property(lambda request: request.tenant))


def first_invocation(patch: pytest.MonkeyPatch) -> None:
    """An activated LoRA acts from the prompt's first invocation on, not from its last."""

    def first(prompt: Any, tokens: Any) -> int | None:
        places = range(len(prompt) - len(tokens) + 1)
        return next((at for at in places if tuple(prompt[at : at + len(tokens)]) == tuple(tokens)), None)

    for module in (local, registry):
        patch.setattr(module, "last_occurrence", first)


def drawn_again(patch: pytest.MonkeyPatch) -> None:
    """A request that has begun at another replica begins anew."""
    real = Sequence.__post_init__

    def post_init(sequence: Sequence) -> None:
        real(sequence)
        sequence.tokens, sequence.resumed = [*sequence.request.prompt], 0

    patch.setattr(Sequence, "__post_init__", post_init)


def min_tokens_ignored(patch: pytest.MonkeyPatch) -> None:
    """An answer may stop before its `min_tokens`."""
    real = Sequence.ends
    patch.setattr(Sequence, "ends", lambda s, token, ends: real(s, token, ends) or ("stop" if token in ends else None))


def set_up_for_another(patch: pytest.MonkeyPatch) -> None:
    """A sequence that comes back to a slot finds the tables of the one before it."""
    real = Scheduler._run_if_ready

    def run_if_ready(self: Scheduler, sequence: Sequence, now: float) -> bool:
        ran = real(self, sequence, now)
        sequence.set_up |= ran and bool(sequence.first_token)
        return ran

    patch.setattr(Scheduler, "_run_if_ready", run_if_ready)


def moved_tokens_uncounted(patch: pytest.MonkeyPatch) -> None:
    """The usage lacks the tokens that another replica has drawn."""

    def usage(sequence: Sequence, outputs: int | None = None) -> Usage:
        drawn = sequence.drawn if outputs is None else outputs
        return Usage(sequence.prompt_len, sequence.cached, drawn, sequence.copied)

    patch.setattr(Sequence, "usage", usage)


def bypass_ignored(patch: pytest.MonkeyPatch) -> None:
    """A request that bypasses the prefix cache reads it."""
    patch.setattr(Sequence, "reuses", property(lambda s: not s.uncached and s.prompt_logprobs is None))


def bypass_published(patch: pytest.MonkeyPatch) -> None:
    """A request that bypasses the prefix cache leaves its KV there."""
    real = Leases.publish

    def publish(leases: Leases, lease: Lease, tokens: Any, computed: int) -> None:
        lease.reuse, before = True, lease.reuse
        real(leases, lease, tokens, computed)
        lease.reuse = before

    patch.setattr(Leases, "publish", publish)


def passed_over(patch: pytest.MonkeyPatch) -> None:
    """One request of eight is served only when no other one waits."""
    real = Admission._not_yet
    patch.setattr(Admission, "_not_yet", lambda a, s: real(a, s) or (s.order % 8 == 3 and len(a) > 1))


def first_token_of_admission(patch: pytest.MonkeyPatch) -> None:
    """The time to the first token counts from the admission on."""
    real = Sequence.timing

    def timing(sequence: Sequence, now: float) -> Timing:
        told = real(sequence, now)
        return replace(told, ttft=max(0.0, told.ttft - told.queue))

    patch.setattr(Sequence, "timing", timing)


def _turns(patch: pytest.MonkeyPatch, turn: Callable[[Sequence], tuple[int, float, Any]]) -> None:
    for module in (shares, scheduler, admission):
        patch.setattr(module, "turn", turn)


def priority_ignored(patch: pytest.MonkeyPatch) -> None:
    """Priorities do not count for what runs."""
    _turns(patch, lambda s: (0, shares.account_of(s).served, s.line))


def tenants_ignored(patch: pytest.MonkeyPatch) -> None:
    """What a tenant has received does not count for what runs."""
    _turns(patch, lambda s: (-s.request.priority, 0.0, s.line))


def output_is_free(patch: pytest.MonkeyPatch) -> None:
    """Output tokens are not charged."""
    patch.setattr(scheduler, "charge_output", lambda sequence: None)


def withheld_for_good(patch: pytest.MonkeyPatch) -> None:
    """The slot of a sequence that memory was too short for is never used again."""
    real = Scheduler.commit

    def commit(self: Scheduler, *args: Any) -> Any:
        self._calm = 0
        return real(self, *args)

    patch.setattr(Scheduler, "commit", commit)


def lost_slot(patch: pytest.MonkeyPatch) -> None:
    """One of a hundred slots is not given back."""
    real = Scheduler._free_slot

    def free_slot(self: Scheduler, sequence: Sequence) -> None:
        calls = vars(self).setdefault("freed", itertools.count(1))
        real(self, sequence)
        if next(calls) % 100 == 0:
            self._slots.pop()

    patch.setattr(Scheduler, "_free_slot", free_slot)


def drain_takes_requests(patch: pytest.MonkeyPatch) -> None:
    """A replica that drains takes new requests."""
    real = LocalReplica.drain

    def drain(replica: LocalReplica, timeout_s: float | None = None) -> Future[bool]:
        drained = real(replica, timeout_s)
        replica._draining = False
        return drained

    patch.setattr(LocalReplica, "drain", drain)


def start_forgets_digests(patch: pytest.MonkeyPatch) -> None:
    """A replica that starts again takes whatever the paths of its catalogue have."""
    patch.setattr(loading, "of_row", lambda *args: replace(of_row(*args), digest=""))


def unloaded_comes_back(patch: pytest.MonkeyPatch) -> None:
    """The catalogue keeps what is unloaded."""
    patch.setattr(Catalogue, "remove", lambda catalogue, names: done(None))


def error_in_the_log_only(patch: pytest.MonkeyPatch) -> None:
    """A look at the adapters' files fails, and nobody but the log hears of it."""
    real = Watch.look

    def look(watch: Watch) -> None:
        real(watch)
        raise KeyError("planted")

    patch.setattr(Watch, "look", look)


PLANTS: Mapping[Plant, str] = {
    salt_ignored: TOKEN,
    first_invocation: TOKEN,
    drawn_again: TOKEN,
    min_tokens_ignored: "ends early",
    set_up_for_another: TOKEN,
    moved_tokens_uncounted: r"counts Usage.*, of \d+ \+ \d+ tokens",
    bypass_ignored: "at most 0|the tree has KV of a request that bypasses it",
    bypass_published: "the tree has KV of a request that bypasses it",
    passed_over: "is within its share, and .* behind it were served",
    first_token_of_admission: "the first token of|queue and prefill are not ttft",
    priority_ignored: "priorities run in the order",
    tenants_ignored: "another sequence gave way",
    output_is_free: "a tenant was charged",
    withheld_for_good: "calm steps",
    lost_slot: "slots are lost or doubled",
    drain_takes_requests: "a replica that drains takes a request",
    start_forgets_digests: "is another after a start",
    unloaded_comes_back: "the catalogue has .*, and the replica served",
    error_in_the_log_only: "the log has an error: .*planted",
}
