"""The two memories and the runner, modelled so that whoever reads the wrong data draws the wrong token.

What blocks hold, in either memory:

    an adapter's block   a number made of its packed data
    a block of KV        for each of its tokens a number made of the adapter's mark, the tenant's salt and
                         every token up to there: as KV depends on all of them, or must not be shared
    groups of layers     each has its own, since streamed copies come group after group

A token is made of what the step reads: the adapter's mark, the numbers at the ends of its blocks, the
seed and the completion as the slot has them, and the position. `expected` makes the same of the request alone.
A prompt token's log-probability is made of the KV of the token before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jlora.cache.transfer import Lost
from jlora.engine.plan import Drawn, StepPlan, Work
from jlora.engine.plan import Sequence as Running
from jlora.engine.ports import Swapper, Undone
from jlora.layout import PoolLayout
from jlora.sim.world.merging import Weights
from jlora.sim.world.sites import Planted, Shortage, Site, Sites
from jlora.sim.world.struck import Struck
from jlora.sim.world.tasks import Tasks
from jlora.types import Request, TokenLogprob

SITES = {
    "copy.fails": Site("a copy fails on its way"),
    "copy.short": Site("memory is too short for a copy on its way"),
    "copy.late": Site("a copy takes up to two seconds", 0.2),
    "copy.placed": Site("memory is too short to make a copy visible", 0.2),
    "copy.out": Site("memory is too short for the snapshot of a copy to the host"),
    "host.short": Site("the host has no memory for an adapter's master copy", 0.2),
    "prefill.short": Site("the device has no memory for a launch of prompts"),
    "decode.short": Site("the device has no memory for a launch of decoding sequences", 0.05),
    "launch.fails": Site("a launch of one sequence fails", 0.05),
    "launch.all": Site("a launch of many sequences fails", 0.1, ends=True, rare=0.6),
    "step.late": Site("a step takes up to a second", 0.05),
    "step.fails": Site("the device fails in the middle of a step", 0.04, ends=True, rare=0.5),
    "pool.lost": Site("a failed program takes the pool with it", 0.5, ends=True, rare=0.6),
}

VOCAB = 64
GARBAGE = 0xBAD
LORA = 1 << 40  # beside KV's numbers
STEP_S, TOKEN_S = 0.004, 0.0002

Cell = Any  # what a block holds of one group of layers: an adapter's number, or one for each token


def adapter_mark(data: np.ndarray) -> int:
    """What the device makes of an adapter's packed blocks."""
    return hash(tuple(content(block) for block in data))


def content(block: Any) -> Cell:
    """What a block of packed data is in either memory."""
    return LORA + zlib.crc32(block.tobytes()) if isinstance(block, np.ndarray) else block


Salt = tuple[str, str]  # the model's own, not the product's: a tenant, and its cache salt


def salt_of(request: Request) -> Salt:
    """Whose KV a request's is."""
    return request.tenant, request.cache_salt


def _salted(salt: Salt) -> int:
    return zlib.crc32(repr(salt).encode())


@dataclass(frozen=True, slots=True)
class Key:
    """What a completion's KV and tokens depend on beside the prompt. `activation` as of `Origin`."""

    mark: int
    salt: Salt
    seed: int
    index: int
    activation: int | None = None


def chain(key: Key, tokens: Sequence[int]) -> list[int]:
    """KV's number at each position."""
    now, found = _root(key.mark, key.salt, key.activation), []
    for position, token in enumerate(tokens):
        now = _next(now, token, key.mark if position == key.activation else None)
        found.append(now)
    return found


def expected(key: Key, tokens: Sequence[int], block_tokens: int) -> int:
    """The token that follows these."""
    numbers = chain(key, tokens)
    ends = numbers[block_tokens - 1 :: block_tokens] + ([numbers[-1]] if len(numbers) % block_tokens else [])
    acts = key.activation is None or len(tokens) > key.activation
    return _drawn(ends, key.mark if acts else 0, key.seed, key.index, len(tokens))


def scored(key: Key, prompt: Sequence[int]) -> tuple[TokenLogprob | None, ...]:
    """The prompt's log-probabilities."""
    numbers = chain(key, prompt[:-1])
    return None, *(_scored(number, token) for number, token in zip(numbers, prompt[1:], strict=True))


def _scored(number: int, token: int) -> TokenLogprob:
    """Of a token behind the KV of this number."""
    return TokenLogprob(token, -float(number % 1000))


def _root(mark: int, salt: Salt, activation: int | None) -> int:
    return hash((0 if activation is not None else mark, _salted(salt)))


def _next(now: int, token: int, mark: int | None) -> int:
    return hash((now, token)) if mark is None else hash((now, token, mark))


def _drawn(ends: Sequence[int], mark: int, seed: int, index: int, position: int) -> int:
    return hash((tuple(ends), mark, seed, index, position)) % VOCAB


class HostMemory:
    """The host tier: see `jlora.cache.pool.HostPool`."""

    def __init__(self, sites: Sites, tasks: Tasks):
        self._cells: dict[int, Cell] = {}
        self._sites = sites
        self._tasks = tasks

    def write(self, ids: Sequence[int], data: Any) -> None:
        """Stores packed data, or what `read` has given."""
        if isinstance(data, np.ndarray) and data.dtype != object:
            self._sites.lack("host.short")
        for block, held in zip(ids, data, strict=True):
            self._tasks.reading()  # others may run between two blocks
            self._cells[block] = content(held)

    def read(self, ids: Sequence[int], layers: slice = slice(None)) -> list[Cell]:
        """What these blocks hold."""
        return [self._cells.get(block, GARBAGE) for block in ids]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Blocks on their way out, as they were."""

    cells: list[Cell]
    pool: DeviceMemory

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        self.pool.carry(())
        array = np.empty(len(self.cells), object)
        array[:] = self.cells
        return array


Staged = list[tuple[int, Cell]]


class DeviceMemory:
    """The pool: see `jlora.cache.pool.DevicePool`. It changes at once, in the order of what is dispatched."""

    def __init__(self, layout: PoolLayout, groups: int, sites: Sites, tasks: Tasks, struck: Struck):
        self.layout = layout
        self.groups = groups
        self.group_layers = layout.layers // groups
        self.lost = False
        self._cells: list[dict[int, Cell]] = [{} for _ in range(groups)]
        self.tasks = tasks
        self._sites = sites
        self._struck = struck

    def carry(self, ids: Sequence[int]) -> None:
        """What may happen to a copy on its way, to these blocks if it is one to the device."""
        self.tasks.sleep(1e-4 + (2 * self.tasks.draw.random() if self._sites.fires("copy.late") else 0.0))
        try:
            self._sites.strike("copy.fails")
            self._sites.lack("copy.short")
        except (Planted, Shortage) as error:
            self._struck.copy(error, ids)
            raise

    def stage(self, ids: Sequence[int], data: Sequence[Cell]) -> Staged:
        self.carry(ids)  # a piece may be read as late as this
        return list(zip(ids, data[:], strict=True))

    def place(self, staged: Staged) -> None:
        self._trouble(staged)
        for cells in self._cells:
            cells.update(staged)

    def place_group(self, staged: Staged, group: int) -> None:
        self._trouble(staged)
        self._cells[group].update(staged)

    def gather(self, ids: Sequence[int]) -> list[_Snapshot]:
        self._sites.lack("copy.out")
        return [_Snapshot([self.read(block) for block in ids], self)]

    def cause(self, error: Exception) -> Exception:
        return error

    def read(self, block: int) -> Cell:
        """What a block holds, if all groups of layers agree."""
        first, *others = [cells.get(block, GARBAGE) for cells in self._cells]
        return first if all(other == first for other in others) else GARBAGE

    def write(self, block: int, offset: int, number: int) -> None:
        """A step computes one token's KV."""
        held = self.read(block)
        numbers = list(held) if isinstance(held, tuple) else [GARBAGE] * self.layout.block_tokens
        numbers[offset] = number
        for cells in self._cells:
            cells[block] = tuple(numbers)

    def number(self, block: int, offset: int) -> int:
        """One token's KV."""
        held = self.read(block)
        return held[offset] if isinstance(held, tuple) else GARBAGE

    def _trouble(self, staged: Staged) -> None:
        if self._sites.fires("pool.lost"):
            self.lost = True
            raise Planted("pool.lost")
        if self._sites.fires("copy.placed"):
            error = Shortage("copy.placed")
            self._struck.copy(error, (block for block, _ in staged))
            raise error


@dataclass(frozen=True, slots=True)
class Step:
    """A dispatched step; see `jlora.engine.ports.Pending`."""

    plan: StepPlan
    dispatched: float
    stalled_s: float
    end: float
    drawn: list[Drawn]
    device: Device

    def read(self) -> list[Drawn]:
        self.device.until(self.end)
        return self.drawn


class Device:
    """Runs plans: see `jlora.engine.runner.Runner`."""

    compiling = False
    compiled_at = 0.0
    compiles_after_warmup = 0
    programs_left = 0
    left = ()

    def __init__(self, pool: DeviceMemory, host: HostMemory, weights: Weights, sites: Sites, struck: Struck):
        self.pool = pool
        self._weights = weights
        self._host = host
        self._sites = sites
        self._tasks = pool.tasks
        self._struck = struck
        self._last: dict[int, int] = {}  # slot -> the token that it drew last
        self._slots: dict[int, tuple[int, int]] = {}  # slot -> seed and completion of whom it was set up for
        self._free_at = 0.0

    def until(self, end: float) -> None:
        """Waits for the device."""
        while (left := end - self._tasks.clock.now) > 0:
            self._tasks.sleep(left)
        self._sites.strike("step.fails")

    def run(self, plan: StepPlan, swapper: Swapper) -> Step:
        done: list[Work] = []
        drawn: list[Drawn] = []
        stalled = 0.0
        for sequence in [work.sequence for work in plan.work if not work.sequence.set_up]:
            self._slots[sequence.slot], sequence.set_up = (sequence.seed, sequence.index), True
        for launch in _launches(plan):
            prompts = launch[0] in plan.prefill
            error = self._trouble(prompts, len(launch))
            try:
                if error is not None:
                    raise error
                stalled += self._stream(plan, swapper) if prompts else 0.0
            except Exception as error:
                if self.pool.lost:
                    raise
                part = self._step(_part(plan, done), stalled, drawn) if done else None
                works = tuple(work for work in plan.work if work not in done)
                guilty = launch[0].sequence if len(launch) == 1 else None
                if guilty is not None and not isinstance(error, Lost):
                    self._struck.request(guilty.handle)
                raise Undone(part, works, guilty) from error
            drawn += [self._compute(work, plan) for work in launch]
            done += launch
        return self._step(plan, stalled, drawn)

    def close(self) -> None:
        """Holds no resources."""

    def _step(self, plan: StepPlan, stalled: float, drawn: list[Drawn]) -> Step:
        now = self._tasks.clock.now
        seconds = STEP_S + TOKEN_S * sum(work.count for work in plan.work)
        seconds += self._tasks.draw.random() if self._sites.fires("step.late") else 0.0
        self._free_at = max(now, self._free_at) + seconds
        return Step(plan, now, stalled, self._free_at, drawn, self)

    def _trouble(self, prompts: bool, sequences: int) -> Exception | None:
        name = "prefill.short" if prompts else "decode.short"
        if self._sites.fires(name):
            return Shortage(name)
        name = "launch.fails" if sequences == 1 else "launch.all"
        return Planted(name) if self._sites.fires(name) else None

    def _stream(self, plan: StepPlan, swapper: Swapper) -> float:
        return sum(swapper.place(copy, group) for group in range(self.pool.groups) for copy in plan.streams)

    def _compute(self, work: Work, plan: StepPlan) -> Drawn:
        sequence, start, count = work.sequence, work.start, work.count
        assert sequence.lease is not None
        table, size, pool = sequence.lease.blocks, self.pool.layout.block_tokens, self.pool
        mark = self._mark(work, plan)
        now = pool.number(table[(start - 1) // size], (start - 1) % size) if start else 0
        numbers: list[int] = []
        for position in range(start, start + count):
            known = position < len(sequence.tokens)
            token = sequence.tokens[position] if known else self._last.get(sequence.slot, GARBAGE)
            if not position:
                now = _root(mark, salt_of(sequence.request), sequence.activation)
            now = _next(now, token, mark if position == sequence.activation else None)
            pool.write(table[position // size], position % size, now)
            numbers.append(now)
        scores = _scores(sequence, start, numbers)
        if not work.samples:
            return Drawn(prompt_logprobs=scores)
        length = start + count
        ends = [pool.number(block, size - 1) for block in table[: length // size]]
        if length % size:
            ends.append(pool.number(table[length // size], length % size - 1))
        seed, index = self._slots[sequence.slot]
        self._last[sequence.slot] = token = _drawn(ends, mark, seed, index, length)
        return Drawn(token, prompt_logprobs=scores)

    def _mark(self, work: Work, plan: StepPlan) -> int:
        """What the adapter is, as the step finds it where it reads it: beside the weights, and in them."""
        blocks = self._blocks(work, plan) if plan.merged.acts(work) else 0
        found = self._weights.act(blocks, plan.merged, work)
        return GARBAGE if found is None else found

    def _blocks(self, work: Work, plan: StepPlan) -> int:
        adapter = work.sequence.adapter
        if work.helped:
            source = next(copy.source for copy in plan.helps if copy.adapter is adapter and adapter in copy.nodes)
            return hash(tuple(self._host.read(source)))
        return hash(tuple(self.pool.read(block) for block in adapter.device))


def _scores(sequence: Running, start: int, numbers: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Of the prompt tokens behind those that a work has computed."""
    if sequence.prompt_logprobs is None:
        return ()
    targets = sequence.tokens[start + 1 : sequence.prompt_len]
    return tuple(_scored(number, token) for number, token in zip(numbers, targets, strict=False))


def _launches(plan: StepPlan) -> Iterator[tuple[Work, ...]]:
    yield from (works for works in (plan.decode, plan.prefill) if works)


def _part(plan: StepPlan, done: Iterable[Work]) -> StepPlan:
    kept = list(done)
    decode, prefill = (tuple(work for work in works if work in kept) for works in (plan.decode, plan.prefill))
    return replace(plan, decode=decode, prefill=prefill)
