"""Times the steps of a running engine: batches of many ranks and lengths, in several rounds.

A scene is a set of requests that come at once. The engine's thread is this one, and each step has ended on the
device before the next is planned. So a scene has the same steps in every round, and a step's rounds lie as far apart as
the rounds. Adapters have random numbers: speed depends on their ranks alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jlora.doctor.engine import random_adapter
from jlora.engine.build import Built
from jlora.engine.engine import Engine, Shape
from jlora.engine.plan import ROW, StepPlan
from jlora.sim.device import load_of
from jlora.step_model import StepLoad
from jlora.types import Request, SamplingParams

ANSWER = 5  # tokens of an answer: most of a scene's steps decode
TOKENS = 384  # of the prompts of a scene, at most
SHARE = 0.3  # of the pool, for a scene's adapters at most
FEW = 4  # adapters of a rank
DISTINCT = (1, 2, 4, 8, 16)  # adapters in a scene, at most


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: tokens of prompt and answer, and its adapter as (rank, number); rank 0 is the base."""

    prompt: int
    output: int
    adapter: tuple[int, int] = (0, 0)


Scene = tuple[Ask, ...]


@dataclass(slots=True)
class Timed:
    """A step of a scene: its launches, the ranks of its sequences, its seconds in every round."""

    decode: StepLoad | None
    prompt: StepLoad | None
    ranks: tuple[int, ...]
    seconds: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return "mixed" if self.decode and self.prompt else "decode" if self.decode else "prompt"

    @property
    def loads(self) -> tuple[StepLoad, ...]:
        return tuple(load for load in (self.decode, self.prompt) if load is not None)

    @property
    def least_s(self) -> float:
        """Over the rounds: what else the machine does only adds to a step."""
        return min(self.seconds)


def joined(steps: Sequence[Timed]) -> Iterator[Timed]:
    """A scene's steps, where those in which the same sequences decode are one: the middle one, at its least."""
    for (kind, _), group in itertools.groupby(steps, lambda step: (step.kind, step.ranks)):
        same = list(group)
        if kind != "decode":
            yield from same
        else:
            least = [min(seconds) for seconds in zip(*(step.seconds for step in same), strict=True)]
            yield replace(same[len(same) // 2], seconds=least)


class Profile:
    """An engine that plays scenes. Every program of `built` is compiled (`compile_rest`).

    Attributes:
        took_s: of all steps so far.
        speed: prompt tokens per second of the fastest step that only computed prompts.
    """

    def __init__(self, built: Built):
        self._watched = _Watched(built.runner)
        shape = Shape(built.info.limits.max_len, built.info.block_bytes, overlap=False)
        self.engine = Engine(replace(built.parts, runner=self._watched), shape)
        self._built = built
        self._registry = built.parts.registry
        self._asked = 0
        self.took_s = self.speed = 0.0

    def run(self, scene: Scene, steps: list[Timed]) -> None:
        """Plays a scene once; adds its seconds to `steps`, which an earlier round of it has filled, or fills it."""
        for rank, number in sorted({ask.adapter for ask in scene if ask.adapter[0]}):
            self._load(rank, number)
        rng = np.random.default_rng(len(scene))
        for ask in scene:
            self._asked += 1
            prompt = tuple(rng.integers(3, self._built.info.limits.vocab, ask.prompt).tolist())
            sampling = SamplingParams(temperature=0.0, max_tokens=ask.output, ignore_eos=True)
            name = _name(*ask.adapter) if ask.adapter[0] else None
            request = Request(f"fit-{self._asked}", prompt, sampling, name, bypass_prefix_cache=True)
            self.engine.submit(request)
        found = list(self._steps())
        self.took_s += sum(seconds for _, seconds in found)
        speeds = [step.prompt.prompt / s for step, s in found if step.prompt and not step.decode]
        self.speed = max([self.speed, *speeds])
        if [(step.decode, step.prompt) for step in steps] == [(step.decode, step.prompt) for step, _ in found]:
            for step, (_, seconds) in zip(steps, found, strict=True):
                step.seconds.append(seconds)
        elif not steps:  # the first round warms up
            steps += [step for step, _ in found]

    def _steps(self) -> Iterator[tuple[Timed, float]]:
        while self.engine.busy:
            self._watched.plan = None
            began = time.perf_counter()
            self.engine.step()
            self._watched.wait()
            seconds, plan = time.perf_counter() - began, self._watched.plan
            if plan is not None and not (plan.copies or plan.streams or plan.helps):
                yield self._timed(plan), seconds
        self.engine.flush_cache()

    def _timed(self, plan: StepPlan) -> Timed:
        decode = load_of(plan.decode, ()) if plan.decode else None
        prompt = load_of((), plan.prefill) if plan.prefill else None
        nodes = [work.sequence.adapter for work in plan.work]
        ranks = [max(self._registry.by_uid(node.uid).ranks.values()) if node.size else 0 for node in nodes]
        return Timed(decode, prompt, tuple(ranks))

    def _load(self, rank: int, number: int) -> None:
        """Brings an adapter to the device."""
        name, engine = _name(rank, number), self.engine
        if name not in self._registry:
            spec, layout = self._built.reader.spec, self._built.reader.layout
            engine.adapters.add(random_adapter(spec, layout, name, rank))
        node = self._registry.get(name).node
        if not node.ready:
            engine.prefetch(Request(name, (1,), SamplingParams(max_tokens=1), name))
        while engine.copying:
            engine.tend()
            engine.rest()


class _Watched:
    """A runner that remembers the plan of the last step."""

    def __init__(self, runner: Any):
        self._runner = runner
        self.plan: StepPlan | None = None

    def run(self, plan: StepPlan, swapper: Any) -> Any:
        self.plan = plan
        return self._runner.run(plan, swapper)

    def wait(self) -> None:
        """Until the device has ended its work; a step in the middle of a prompt has nothing that is read."""
        self._runner.pool.array.block_until_ready()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def _name(rank: int, number: int) -> str:
    return f"fit-r{rank}-{number}"


@dataclass(frozen=True, slots=True)
class Space:
    """What scenes are drawn from.

    Attributes:
        decode, prompt: rows of the compiled forms of launches.
        ranks: of adapters.
        blocks: of an adapter of each rank; room: blocks for a scene's adapters.
        context: tokens that a scene's sequences may have in the pool.
    """

    decode: tuple[int, ...]
    prompt: tuple[int, ...]
    max_len: int
    ranks: tuple[int, ...]
    blocks: tuple[int, ...]
    room: int
    context: int

    @classmethod
    def of(cls, built: Built, ranks: Sequence[int]) -> Space:
        """The engine's own forms and sizes."""
        buckets, layout = built.runner.builder.buckets, built.reader.layout
        spec = built.reader.spec
        blocks = tuple(random_adapter(spec, layout, "", rank).blocks for rank in ranks)
        room, context = int(SHARE * (layout.blocks - 1)), (layout.blocks - 1) // 2 * layout.block_tokens
        return cls(buckets.decode, buckets.prefill, built.info.limits.max_len, tuple(ranks), blocks, room, context)

    def scenes(self, rng: np.random.Generator, count: int) -> list[Scene]:
        """`count` scenes for every compiled form: a half of it to all of it full."""
        found = []
        for forms, draw in ((self.decode, self._decoding), (self.prompt, self._prompts)):
            for last, size in zip((0, *forms[:-1]), forms, strict=True):
                found += [draw(rng, int(rng.integers(last + 1, size + 1))) for _ in range(count)]
        return found

    def long(self, rng: np.random.Generator, tokens: int) -> list[Scene]:
        """A scene of few sequences of the base with `tokens` of context in all; none if other scenes have as many.

        Less where pool or model hold less. The sequences that are computed first decode until all of them do.
        """
        chunk = self.prompt[-1] * ROW
        tokens = min(tokens, self.context, self.decode[-1] * self.max_len // 2, chunk * self.max_len // 4)
        longest = self.max_len - ANSWER - -(-tokens // chunk)
        if tokens <= 2 * TOKENS or longest < 1:
            return []
        least = -(-tokens // longest)
        count = min(self.decode[-1], int(rng.integers(least, least + FEW)))
        each = min(longest, tokens // count)
        ends = [-(-each * (i + 1) // chunk) for i in range(count)]
        return [tuple(Ask(each, ANSWER + ends[-1] - end) for end in ends)]

    def _decoding(self, rng: np.random.Generator, sequences: int) -> Scene:
        longest = min(self.max_len - ANSWER, 2 * TOKENS // sequences)
        shortest = max(1, longest // 16)
        prompts = rng.integers(shortest, max(longest, shortest + 1), sequences).tolist()
        adapters = self._adapters(rng)
        return tuple(Ask(prompt, ANSWER, adapters[int(rng.integers(len(adapters)))]) for prompt in prompts)

    def _prompts(self, rng: np.random.Generator, rows: int) -> Scene:
        """One to four prompts that fill so many rows."""
        longest = (self.max_len - 1) // ROW
        count = max(min(rows, int(rng.integers(1, 5))), -(-rows // longest))
        cuts = np.linspace(0, rows, count + 1).astype(int)
        adapters = self._adapters(rng)
        lengths = [int(part * ROW - rng.integers(0, ROW)) for part in np.diff(cuts)]
        return tuple(Ask(n, 1, adapters[int(rng.integers(len(adapters)))]) for n in lengths)

    def _adapters(self, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Some adapters that the room holds, and as often as one of them the base."""
        found: list[tuple[int, int]] = [(0, 0)] * int(rng.integers(0, 2))
        left = self.room
        for _ in range(int(rng.choice(DISTINCT))):
            at = int(rng.integers(len(self.ranks)))
            adapter = self.ranks[at], int(rng.integers(FEW))
            if adapter not in found and self.blocks[at] <= left:
                found.append(adapter)
                left -= self.blocks[at]
        return found or [(0, 0)]
