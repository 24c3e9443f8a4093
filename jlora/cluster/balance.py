"""Balance between replicas, as in dLoRA (Wu et al., OSDI 2024, section 5).

`preload` plans which adapters to bring to which replicas before requests come. `Balancer` moves requests, with their
adapters, away from replicas that are behind. A moved request is sent as its tokens. The new replica computes those that
its prefix cache lacks, and the plan weighs that time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jlora.cluster.migration import Candidate, Problem, Side, greedy, solve
from jlora.cluster.placement import LEAST, Wanted
from jlora.cluster.routing.others import others
from jlora.cluster.routing.policy import Ask
from jlora.cluster.routing.ways import Ways, held
from jlora.cluster.view import ReplicaView, View
from jlora.types import Timing, Usage

NEW = 0.2  # weight of the newest answer in a mean
NEW_LENGTH = 0.01  # the same for lengths, which vary much; before, all answers weigh the same
FIRST_S = 5.0  # of an answer, before one has ended
KNOWN = 4096  # versions whose answers' times are remembered
MOVE_S = 1e-3  # of any move
ARRIVE_S = 10.0  # that a move waits for its adapter


@dataclass(frozen=True, slots=True)
class Job:
    """A request at a replica.

    Attributes:
        key: the router's name for it.
        adapter: the key of its version; None is the base.
        tokens: prompt and answer so far.
        waited_s: since it was sent, without a token; 0 once it has one, and its replica has its KV.
        cached: replica -> tokens that the router believed to be in its prefix cache when it sent the request.
        movable: False: it counts where it is, and stays there.
        blocks: of its adapter in the pool; rank: the adapter's largest; 0 while nobody has read the adapter.
    """

    key: int
    replica: str
    adapter: str | None
    tokens: int
    waited_s: float = 0.0
    cached: Mapping[str, int] = field(default_factory=dict)
    movable: bool = True
    blocks: int = 0
    rank: int = 0

    def bound(self, target: str) -> Job:
        """The same while its move waits for its adapter: it counts at the target, and no plan moves it again."""
        return replace(self, replica=target, waited_s=0.0, movable=False)


@dataclass(frozen=True, slots=True)
class Move:
    """A request leaves a replica for another one, which has its adapter first."""

    key: int
    source: str
    target: str
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Terms:
    """When to move, and how much.

    Attributes:
        queue_s: a replica is behind when a request has waited there for longer,
        memory: or when its requests fill more than this share of the blocks that their adapters leave.
        replicas: of each side in a plan: dLoRA's K.
        jobs: of one replica that may move; the cheapest.
        gain: share of the time until all are done that a plan must save.
        affinity_s: of bringing an adapter to one more replica, beside its load: dLoRA's η.
        limit_s, nodes: bounds of the solver; if it finds nothing, the plan is the greedy one.
    """

    queue_s: float = 0.5
    memory: float = 0.9
    replicas: int = 4
    jobs: int = 128
    gain: float = 0.02
    affinity_s: float = 0.0
    limit_s: float = 0.2
    nodes: int = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        before_s, after_s: until its busiest replica is done.
        solved: the plan is the solver's; else it had no answer within its limits, or none better than the greedy plan.
        candidates: of the program; 0 if nothing had to move.
        solve_s: what the plan has taken on this machine.
    """

    moves: tuple[Move, ...] = ()
    before_s: float = 0.0
    after_s: float = 0.0
    solved: bool = False
    candidates: int = 0
    solve_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class Pace:
    """Measured times of answers, in seconds: means in which the latest answers weigh most.

    Attributes:
        answers: adapter -> time of an answer, from its first step to its last token.
        answer: the same over all adapters.
        token: time per computed prompt token. Long prompts weigh more, because a step has a fixed cost.
        load: how long a request waited for its adapter, among those that waited.
        outputs: tokens of an answer.
    """

    answers: dict[str | None, float] = field(default_factory=dict)
    answer: float = 0.0
    load: float = 0.0
    outputs: float = 0.0
    _ended: int = 0
    _prefill: float = 0.0  # of the last answers, in a mean
    _computed: float = 0.0  # tokens of their prompts, in the same mean

    @property
    def token(self) -> float:
        return self._prefill / self._computed if self._computed else 0.0

    def served(self, adapter: str | None, usage: Usage, timing: Timing | None) -> None:
        """Takes in an answer that has ended. `timing`: None if no single attempt measured it, since that has waits."""
        self._ended += 1
        self.outputs += max(1 / self._ended, NEW_LENGTH) * (usage.completion_tokens - self.outputs)
        if timing is None:
            return
        seconds = timing.prefill + timing.tpot * max(0, usage.completion_tokens - 1)
        self.answers[adapter] = _mean(self.answers.pop(adapter, seconds), seconds)  # the last one
        if len(self.answers) > KNOWN:  # every load of an adapter makes a new version
            del self.answers[next(iter(self.answers))]
        self.answer = _mean(self.answer, seconds)
        if (computed := usage.prompt_tokens - usage.cached_tokens) > 0:
            self._prefill = _mean(self._prefill, timing.prefill)
            self._computed = _mean(self._computed, computed)
        if timing.adapter_cold_start > 0:
            self.load = _mean(self.load, timing.adapter_cold_start)

    def of(self, adapter: str | None) -> float:
        """The time of an answer."""
        return self.answers.get(adapter, self.answer) or FIRST_S


def _mean(old: float, new: float) -> float:
    return old + NEW * (new - old) if old else new


class Balancer:
    """Plans moves from a view and the router's own requests. No plan depends on a clock, but for the solver's limit.

    Attributes:
        pace: what answers have taken.

    Args:
        ways: of adapters to the device, as the policies have them.
    """

    def __init__(self, terms: Terms, block_tokens: int, pace: Pace | None = None, ways: Ways | None = None):
        self.pace = pace or Pace()
        self._ways = ways or Ways()
        self._terms = terms
        self._block_tokens = block_tokens

    def plan(self, view: View, jobs: Sequence[Job]) -> Plan:
        """The moves with which the busiest and the idlest replicas are done soonest."""
        problem = self.problem(view, jobs)
        return Plan() if problem is None else self.solution(problem)

    def solution(self, problem: Problem) -> Plan:
        """The better of the solver's plan and the greedy one; no moves if they save little. Any thread may call."""
        began = time.perf_counter()
        plan = self._solution(problem)
        return replace(plan, candidates=len(problem.candidates), solve_s=time.perf_counter() - began)

    def _solution(self, problem: Problem) -> Plan:
        places, found = greedy(problem), solve(problem, self._terms.limit_s, self._terms.nodes)
        solved = found is not None and problem.end_s(found) < problem.end_s(places)
        if found is not None and solved:
            places = found
        before, after = problem.end_s([None] * len(places)), problem.end_s(places)
        if after > (1 - self._terms.gain) * before:
            return Plan((), before, before, solved)
        moves = tuple(
            Move(one.key, one.source, problem.targets[place].name, one.adapter)
            for one, place in zip(problem.candidates, places, strict=True)
            if place is not None
        )
        return Plan(moves, before, after, solved)

    def problem(self, view: View, jobs: Sequence[Job]) -> Problem | None:
        """The replicas that are behind and the idlest others; None if nothing has to move, or can."""
        terms, pace = self._terms, self.pace
        here: dict[str, list[Job]] = {name: [] for name, seen in view.items() if seen.health == "up"}
        for job in jobs:
            if job.replica in here:
                here[job.replica].append(job)
        # A replica that is behind runs as many at once as it can, so this is what each one can run.
        slots = max((view[name].running for name in here), default=0) or 1
        sides = {name: self._side(view[name], group, group or jobs, slots) for name, group in here.items()}
        order = sorted(here, key=lambda name: (sides[name].seconds, name))
        late = [name for name in order if self._late(sides[name], here[name])]
        # One that other routers keep busy for longer than these would be the last to end, and hide what a move saves.
        last = max((sides[name].seconds for name in late), default=0.0)
        free = [name for name in order if name not in late and not (others(view[name]) and sides[name].seconds > last)]
        idle = free[: terms.replicas]
        behind = [name for name in reversed(late) if self._movable(here[name])][: terms.replicas]
        movable = [job for name in behind for job in self._movable(here[name])]
        if not movable or not idle:
            return None
        candidates = [
            Candidate(
                one.key, one.replica, one.adapter, one.tokens, pace.of(one.adapter) / slots, self._again(one, idle)
            )
            for one in movable
        ]
        loads: dict[tuple[str | None, int], float] = {
            (adapter, u): self._load_s(view[name], adapter, rank, peer=held(view, adapter))
            for adapter, rank in {job.adapter: job.rank for job in movable if job.adapter is not None}.items()
            for u, name in enumerate(idle)
            if view[name].tiers.get(adapter) != "HBM"
        }
        return Problem(candidates, [sides[name] for name in behind], [sides[name] for name in idle], loads, pace.token)

    def _load_s(self, target: ReplicaView, adapter: str, rank: int, peer: bool) -> float:
        """Of bringing an adapter: by where it is, or without a measured way as the last ones that were brought."""
        known = self._ways.seconds(target, Ask(adapter, rank, 0), peer)
        return max(MOVE_S, known or self.pace.load) + self._terms.affinity_s

    def _movable(self, group: Sequence[Job]) -> list[Job]:
        """The cheapest of a replica's jobs."""
        return sorted((job for job in group if job.movable), key=_cost)[: self._terms.jobs]

    def _side(self, seen: ReplicaView, group: Sequence[Job], like: Sequence[Job], slots: int) -> Side:
        """Other routers' requests are as the mean of `like`. Requests have the blocks that no adapter in use has."""
        seconds, tokens = sum(self.pace.of(job.adapter) for job in group), sum(job.tokens for job in group)
        if like and (more := others(seen)):
            seconds += more * sum(self.pace.of(job.adapter) for job in like) / len(like)
            tokens += more * sum(job.tokens for job in like) // len(like)
        adapters = sum({job.adapter: job.blocks for job in group}.values())
        room = max(0, seen.blocks - adapters) * self._block_tokens
        return Side(seen.name, seconds / slots, tokens, room)

    def _late(self, side: Side, group: Sequence[Job]) -> bool:
        waited = max((job.waited_s for job in group), default=0.0)
        return waited > self._terms.queue_s or side.tokens > self._terms.memory * side.room

    def _again(self, job: Job, targets: Sequence[str]) -> tuple[float, ...]:
        """What a move costs at each target: KV that is here, and not there."""
        here = job.cached.get(job.replica, 0) if job.waited_s else job.tokens
        return tuple(MOVE_S + max(0, here - job.cached.get(name, 0)) * self.pace.token for name in targets)


def _cost(job: Job) -> tuple[float, int, int]:
    """Sorts the longest wait first; among equal waits, the fewest tokens to compute again first."""
    return -job.waited_s, job.tokens, job.key


def preload(rooms: Mapping[str, int], adapters: Sequence[Wanted]) -> dict[str, list[str]]:
    """Adapter -> replicas that should have it, such that the least burst tolerance is as large as it gets.

    The tolerance of an adapter is the room that is left where it is, over its load. First, each adapter goes to the
    emptiest replica, the most asked-for one first. Then the one with the least tolerance goes to one more, the
    emptiest, until that lowers the least tolerance. An adapter that nobody asks for gets no replica, nor does one that
    none has room for; if all replicas together lack room, those that are asked for least get none.

    Args:
        rooms: replica -> blocks for adapters and KV.
        adapters: `rate` is the mean load, `size` the blocks.
    """
    names, asked = list(rooms), _most_asked(adapters, sum(rooms.values()))
    if not names or not asked:
        return {}
    left = np.array([rooms[name] for name in names], float)
    rates, sizes = (np.array([getattr(adapter, what) for adapter in asked], float) for what in ("rate", "size"))
    here = np.zeros((len(asked), len(names)), bool)

    def bring(adapter: int) -> int | None:
        """Brings it to one more replica; None if none has room."""
        free = np.where(here[adapter] | (left < sizes[adapter]), -1.0, left)
        to = int(free.argmax())
        if free[to] < 0:
            return None
        here[adapter, to] = True
        left[to] -= sizes[adapter]
        return to

    placed = np.zeros(len(asked), bool)
    for adapter in np.argsort(-rates, kind="stable"):
        placed[adapter] = bring(int(adapter)) is not None
    tolerance = np.where(placed, here @ left / rates, np.inf)
    while placed.any() and (to := bring(first := int(tolerance.argmin()))) is not None:
        least, tolerance = tolerance.min(), np.where(placed, here @ left / rates, np.inf)
        if tolerance.min() < least:
            here[first, to] = False
            break
    return {adapter.key: [names[j] for j in np.flatnonzero(row)] for adapter, row in zip(asked, here, strict=True)}


def _most_asked(adapters: Sequence[Wanted], room: int) -> list[Wanted]:
    """Those that are asked for most, in the order given, as many as fit into so many blocks."""
    fitting = set()
    for adapter in sorted(adapters, key=lambda adapter: -adapter.rate):
        if adapter.rate > LEAST and adapter.size <= room:
            room -= adapter.size
            fitting.add(adapter.key)
    return [adapter for adapter in adapters if adapter.key in fitting]
