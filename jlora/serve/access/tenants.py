"""What each tenant uses now, within its limits. For the event loop's thread only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from jlora.errors import LimitReached, ResourceExhausted
from jlora.ports import Clock
from jlora.serve.access.keys import Limits

FREE = nullcontext()  # of a tenant without limits: one for all, because each would take memory while its call waits
RETRY_S = 1.0  # a client's wait when nobody knows when room will be


class _Tenant:
    def __init__(self, name: str, limits: Limits, clock: Clock):
        self.limits = limits
        self._name = name
        self._clock = clock
        # "completions"; "arriving": calls for some, before that; "calls": others.
        self._under_way: Counter[str] = Counter()
        self._tokens = 0
        self._queued: dict[object, tuple[int, Callable[[], bool]]] = {}
        self._credit, self._at = _burst(limits), clock()

    def arrive(self) -> None:
        rate = self.limits.requests_per_s
        if rate is None:
            return
        now = self._clock()
        self._credit = min(_burst(self.limits), self._credit + (now - self._at) * rate)
        self._at = now
        if self._credit < 1:
            raise self._reached("asks too often", "requests_per_s", rate, (1 - self._credit) / rate)
        self._credit -= 1

    @contextmanager
    def call(self, completes: bool) -> Iterator[None]:
        kind = "arriving" if completes else "calls"
        self._check_under_way(1, ("completions", "arriving") if completes else ("calls",))
        self._under_way[kind] += 1
        try:
            yield
        finally:
            self._under_way[kind] -= 1

    @contextmanager
    def completions(self, count: int) -> Iterator[None]:
        most = self.limits.concurrent
        if most is not None and count > most:
            raise ResourceExhausted(f"n: asks for {count} completions, limit concurrent = {most} of the tenant")
        # Not those of calls that arrive: two that want several each would refuse each other.
        self._check_under_way(count, ("completions",))
        self._under_way.update(arriving=-1, completions=count)
        try:
            yield
        finally:
            self._under_way.update(arriving=1, completions=-count)

    def _check_under_way(self, count: int, kinds: Sequence[str]) -> None:
        most, now = self.limits.concurrent, sum(self._under_way[kind] for kind in kinds)
        if most is not None and now + count > most:
            calls = "calls beside its requests" if kinds == ("calls",) else "requests"
            raise self._reached(f"has {now} {calls} under way", "concurrent", most, RETRY_S)

    def check_tokens(self, tokens: int) -> None:
        most = self.limits.queued_tokens
        if most is not None and tokens > most:
            raise ResourceExhausted(f"prompt: has {tokens} tokens, limit queued_tokens = {most} of the tenant")

    @contextmanager
    def queued(self, tokens: int, begun: Callable[[], bool]) -> Iterator[None]:
        self.check_tokens(tokens)
        most = self.limits.queued_tokens
        if most is not None and self._tokens + tokens > most:
            for name in [name for name, (_, running) in self._queued.items() if running()]:
                self._forget(name)
            if self._tokens + tokens > most:
                raise self._reached(f"has {self._tokens} prompt tokens queued", "queued_tokens", most, RETRY_S)
        name = object()
        self._queued[name] = tokens, begun
        self._tokens += tokens
        try:
            yield
        finally:
            self._forget(name)

    def _forget(self, name: object) -> None:
        self._tokens -= self._queued.pop(name, (0, None))[0]

    def _reached(self, said: str, field: str, limit: float, retry_s: float) -> LimitReached:
        return LimitReached(f"tenant {self._name!r} {said}, limit {field} = {limit:g}", retry_s)


class Tenants:
    """The tenants that have limits; others are not counted.

    Each method raises LimitReached if the call may be accepted later, ResourceExhausted if it never can.
    """

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def limit(self, limits: Mapping[str, Limits]) -> None:
        """New limits for all. What is under way goes on counting."""
        for name, tenant in self._tenants.items():
            tenant.limits = limits.get(name, Limits())
        for name in limits.keys() - self._tenants.keys():
            self._tenants[name] = _Tenant(name, limits[name], self._clock)

    def arrive(self, name: str | None) -> None:
        """Counts a call of the tenant for its rate."""
        if (tenant := self._of(name)) is not None:
            tenant.arrive()

    def call(self, name: str | None, completes: bool) -> AbstractContextManager[None]:
        """Counts a call, from before its message to its end. Calls that want no completion count by themselves."""
        tenant = self._of(name)
        return FREE if tenant is None else tenant.call(completes)

    def completions(self, name: str | None, count: int) -> AbstractContextManager[None]:
        """Counts all completions of a call, in place of the call, or none."""
        tenant = self._of(name)
        return FREE if tenant is None else tenant.completions(count)

    def check_tokens(self, name: str | None, tokens: int) -> None:
        """Raises ResourceExhausted for more prompt tokens than the tenant may ever have queued."""
        if (tenant := self._of(name)) is not None:
            tenant.check_tokens(tokens)

    def queued(self, name: str | None, tokens: int, begun: Callable[[], bool]) -> AbstractContextManager[None]:
        """Counts a prompt's tokens until `begun()` or the end."""
        tenant = self._of(name)
        return FREE if tenant is None else tenant.queued(tokens, begun)

    def _of(self, name: str | None) -> _Tenant | None:
        return self._tenants.get(name) if name else None


def _burst(limits: Limits) -> float:
    return max(1.0, limits.requests_per_s or 1.0)
