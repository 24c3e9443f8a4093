"""A scheduler with a fake device and a fake link, in plain Python."""

from __future__ import annotations

from collections.abc import Callable

from jlora.cache.catalog import make_policy
from jlora.cache.inspect import check_integrity
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.transfer import Copy, Meter
from jlora.cache.tree import AdapterNode
from jlora.config import CacheConfig, EngineConfig
from jlora.engine.plan import Drawn, Sequence, StepPlan
from jlora.engine.scheduler import Scheduler
from jlora.types import Request, SamplingParams, TokenEvent
from tests import port
from tests.cache._books import check_idle

EOS = 2
BLOCK = 4


class Bench:
    """A scheduler with a device that answers one step late, and a link that takes `delay` steps."""

    def __init__(
        self,
        blocks: int = 64,
        draw: Callable[[Sequence, int], int] = lambda s, p: 7,
        delay: int = 0,
        policy: str = "jlora",
        streams: bool = False,
        step_s: float = 1.0,
        **config: int,
    ):
        self.now = 0.0
        self.step_s = step_s
        made = make_policy(CacheConfig(policy=policy), Meter(1e-2, token_s=1.0))
        self.manager = CacheManager(Sizes(blocks, 256, BLOCK), made, lambda: self.now, streams=streams)
        self.scheduler = Scheduler(self.manager, EngineConfig(**config), [EOS])
        self.draw = draw
        self.delay = delay
        self.events: list[TokenEvent] = []
        self.plans: list[StepPlan] = []
        self.handles: dict[str, int] = {}
        self._in_flight: StepPlan | None = None
        self._link: list[tuple[int, Copy]] = []  # (step at which it lands, copy)

    def adapter(self, uid: int, size: int) -> AdapterNode:
        blocks = self.manager.reserve(size)
        assert blocks is not None
        return self.manager.add_adapter(uid, blocks)

    def submit(self, name: str, prompt: int | list[int], max_tokens: int = 4, **kwargs) -> None:
        tokens = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
        fields = {
            k: kwargs.pop(k)
            for k in ("priority", "bypass_prefix_cache", "deadline", "tenant", "done", "waited")
            if k in kwargs
        }
        adapter, activation = kwargs.pop("adapter", self.manager.base), kwargs.pop("activation", None)
        params = SamplingParams(max_tokens=max_tokens, **kwargs)
        request = Request(name, tuple(tokens), params, **fields)
        self.handles[name] = self.scheduler.submit(request, adapter, self.now, activation)

    def abort(self, name: str) -> list[TokenEvent]:
        return self.scheduler.abort(self.handles[name], self.now)

    @property
    def deadlines(self) -> int:
        """How many the scheduler keeps."""
        return port.deadlines(self.scheduler)

    def step(self) -> None:
        self.now += self.step_s
        steps = len(self.plans)
        self.manager.landed([copy for at, copy in self._link if at <= steps])
        self._link = [(at, copy) for at, copy in self._link if at > steps]
        plan = self.scheduler.plan(self.now)
        self._link += [(steps + 1 + self.delay, copy) for copy in plan.copies]
        self.plans.append(plan)
        done, self._in_flight = self._in_flight, plan if plan.work else None
        if done is not None:
            drawn = [Drawn(self.draw(w.sequence, w.start + w.count) if w.samples else None) for w in done.work]
            self.events += self.scheduler.commit(done, drawn, self.now)
        check_integrity(self.manager)

    def finish(self, limit: int = 500) -> None:
        while self.scheduler.live or self._in_flight or self._link or self.manager.flying:
            self.step()
            limit -= 1
            assert limit, "the scheduler does not get on"
        check_idle(self.manager)

    def tokens(self, name: str, index: int = 0) -> list[int]:
        mine = [e for e in self.events if e.request_id == name and e.index == index]
        return [e.token_id for e in mine if e.token_id is not None]

    def reason(self, name: str, index: int = 0) -> str | None:
        return next(e.finish_reason for e in self.events if (e.request_id, e.index) == (name, index) and e.usage)


def work(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {w.sequence.request.id: (w.start, w.count) for w in plan.work}


def counted(thing: object, name: str) -> list[tuple]:
    """The calls of a method from now on, by their arguments."""
    calls: list[tuple] = []
    real = getattr(thing, name)

    def call(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    setattr(thing, name, call)
    return calls
