"""dLoRA's program: which requests leave replicas that are behind, and which adapters go with them.

Minimise the time until the last replica is done. x says who goes where, y which adapters have to be brought:

    end of a replica   its seconds without the requests that may move
                       + those of the requests that it gets, and what it computes again for them
                       + the loads of y + the time of the tokens for which it has no room
    x <= y             for each request and the adapter that its new replica lacks

The paper lets the requests of all its replicas move, weighs moves by one factor, and swaps what does not fit. Here
requests leave only replicas that are behind, a move costs the tokens that are computed again there, and so do tokens
that do not fit, since a replica without room preempts. The room that an adapter takes at its new replica, the paper's
M_k, does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array

GAP = 0.01  # of the best plan, at which the solver stops
LITTLE = 1e-4  # weight of what moves cost, beside the end of the last replica: no move without a use


@dataclass(frozen=True, slots=True)
class Side:
    """A replica of a plan: seconds until its requests are done, their tokens, and those that it has room for."""

    name: str
    seconds: float
    tokens: int
    room: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may move.

    Attributes:
        key: the router's name for it.
        seconds: of a replica's time that it takes.
        again: what it adds at each target.
    """

    key: int
    source: str
    adapter: str | None
    tokens: int
    seconds: float
    again: tuple[float, ...]


Places = list[int | None]  # the target of each candidate, or None where it stays


@dataclass(frozen=True, slots=True)
class Problem:
    """Which candidates may leave the `sources`, and for which `targets`.

    Attributes:
        loads: (adapter, target) that lack each other -> seconds.
        token_s: of a token for which there is no room.
    """

    candidates: Sequence[Candidate]
    sources: Sequence[Side]
    targets: Sequence[Side]
    loads: Mapping[tuple[str | None, int], float]
    token_s: float

    def end_s(self, places: Sequence[int | None]) -> float:
        """Seconds until the last replica is done."""
        sides = (*self.sources, *self.targets)
        seconds, tokens = {s.name: s.seconds for s in sides}, {s.name: s.tokens for s in sides}
        brought: dict[tuple[str | None, int], None] = {}  # in order: sums of seconds must not depend on hashes
        for one, place in zip(self.candidates, places, strict=True):
            if place is not None:
                target = self.targets[place].name
                seconds[one.source] -= one.seconds
                tokens[one.source] -= one.tokens
                seconds[target] += one.seconds + one.again[place]
                tokens[target] += one.tokens
                brought[one.adapter, place] = None
        for adapter, place in brought:
            seconds[self.targets[place].name] += self.loads.get((adapter, place), 0.0)
        return max(seconds[s.name] + self.token_s * max(0, tokens[s.name] - s.room) for s in sides)


def solve(problem: Problem, limit_s: float, nodes: int) -> Places | None:
    """A plan near the best, or None if the solver finds none within its limits.

    x is relaxed to real numbers, as in the paper. There, the largest of a request counts; then equal requests would
    all stay, or all go. Here, what one request gets too much or too little counts for the next ones of its replica.
    """
    program = _Program(problem)
    matrix, low, high = program.matrix()
    cost, whole = program.cost()
    answer = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),  # pyright: ignore[reportArgumentType]
        integrality=whole,
        options={"time_limit": limit_s, "node_limit": nodes, "mip_rel_gap": GAP},
    )
    if answer.x is None:
        return None
    width = len(problem.targets) + 1
    x = answer.x[: len(problem.candidates) * width].reshape(-1, width)
    owed = {side.name: np.zeros(width) for side in problem.sources}
    places = Places()
    for one, row in zip(problem.candidates, x, strict=True):
        share = owed[one.source]
        share += one.seconds * row
        chosen = int(share.argmax())
        share[chosen] -= one.seconds
        places.append(chosen - 1 if chosen else None)
    return places


def greedy(problem: Problem) -> Places:
    """The candidates in their order, each to the target that is done first, while that ends the last one sooner."""
    ends = {side.name: side.seconds for side in (*problem.sources, *problem.targets)}
    loads, places = dict(problem.loads), Places()
    for one in problem.candidates:
        added = [one.seconds + again + loads.get((one.adapter, u), 0.0) for u, again in enumerate(one.again)]
        place = min(range(len(added)), key=lambda u: ends[problem.targets[u].name] + added[u])
        target = problem.targets[place].name
        if ends[target] + added[place] < ends[one.source]:
            ends[one.source] -= one.seconds
            ends[target] += added[place]
            loads.pop((one.adapter, place), None)
            places.append(place)
        else:
            places.append(None)
    return places


@dataclass(slots=True)
class _Program:
    """The program's columns: x of each candidate, at home and at each target; y; overflow of each side; the end."""

    problem: Problem
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def _x(self, candidate: int, place: int | None) -> int:
        return candidate * (len(self.problem.targets) + 1) + (0 if place is None else place + 1)

    @property
    def _y(self) -> int:
        return len(self.problem.candidates) * (len(self.problem.targets) + 1)

    @property
    def _overflow(self) -> int:
        return self._y + len(self.problem.loads)

    @property
    def _end(self) -> int:
        return self._overflow + len(self.problem.sources) + len(self.problem.targets)

    def cost(self) -> tuple[np.ndarray, np.ndarray]:
        """What to minimise, and which columns are whole numbers. All are at least 0, and y at most 1 by x <= y."""
        cost, whole = np.zeros(self._end + 1), np.zeros(self._end + 1)
        cost[self._end] = 1.0
        for i, one in enumerate(self.problem.candidates):
            for place, again in enumerate(one.again):
                cost[self._x(i, place)] = LITTLE * again
        cost[self._y : self._overflow] = LITTLE
        whole[self._y : self._overflow] = 1
        return cost, whole

    def matrix(self) -> tuple[coo_array, np.ndarray, np.ndarray]:
        """All constraints, with their lower and upper bounds."""
        problem = self.problem
        ys = {pair: self._y + n for n, pair in enumerate(problem.loads)}
        for i, one in enumerate(problem.candidates):
            places = (None, *range(len(problem.targets)))
            self._add({self._x(i, place): 1.0 for place in places}, 1.0, 1.0)
            for place in range(len(problem.targets)):
                if (y := ys.get((one.adapter, place))) is not None:
                    self._add({self._x(i, place): 1.0, y: -1.0}, -np.inf, 0.0)
        for n, side in enumerate(problem.sources):
            own = [(i, one) for i, one in enumerate(problem.candidates) if one.source == side.name]
            rest_s = side.seconds - sum(one.seconds for _, one in own)
            rest = side.tokens - sum(one.tokens for _, one in own)
            time = {self._x(i, None): one.seconds for i, one in own}
            self._side(n, time, {self._x(i, None): one.tokens for i, one in own}, (rest_s, rest - side.room))
        for place, side in enumerate(problem.targets):
            columns = [(self._x(i, place), one) for i, one in enumerate(problem.candidates)]
            time = {x: one.seconds + one.again[place] for x, one in columns}
            time |= {y: problem.loads[pair] for pair, y in ys.items() if pair[1] == place}
            fill = {x: one.tokens for x, one in columns}
            self._side(len(problem.sources) + place, time, fill, (side.seconds, side.tokens - side.room))
        shape = (len(self._low), self._end + 1)
        matrix = coo_array((self._values, (self._rows, self._columns)), shape)
        return matrix, np.array(self._low), np.array(self._high)

    def _side(self, number: int, time: dict[int, float], fill: dict[int, int], rest: tuple[float, int]) -> None:
        """The end is not before this side's; `rest`: its seconds without the columns, and its tokens over the room."""
        overflow = self._overflow + number
        self._add({**time, overflow: 1.0, self._end: -1.0}, -np.inf, -rest[0])
        token_s = self.problem.token_s
        self._add({x: token_s * tokens for x, tokens in fill.items()} | {overflow: -1.0}, -np.inf, -token_s * rest[1])

    def _add(self, row: Mapping[int, float], low: float, high: float) -> None:
        self._rows += [len(self._low)] * len(row)
        self._columns += row
        self._values += row.values()
        self._low.append(low)
        self._high.append(high)
