"""A workload as a list of turns, and what it is like. Plain Python, no jax.

A *turn* is one request of a session. It says what it adds to the session's context; its prompt is
everything the session said and heard so far, then that. Answers are whatever the engine that
replays the trace gives, so a prompt repeats what was really computed, as in a chat.

    prompt of turn n = adds 0 + answer 0 + adds 1 + answer 1 + ... + adds n
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jlora.errors import ConfigError

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "adapter", "session")
FIRST_ID = 3  # token ids below are special in most vocabularies


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        at: seconds from the start of the trace; it is never sent before its session's turn before
            has been answered.
            Before 0 it is history: computed before the clock starts, and no part of the figures.
        session, turn: which session, and the turn's number there (-1: its history).
        adds: token ids that it adds to its session's context.
        output: tokens of its answer.
        adapter: index of its adapter; None is the base model.
        tenant: salt of the prefix cache.
    """

    at: float
    session: int
    turn: int
    adds: tuple[int, ...]
    output: int
    adapter: int | None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Turns in order of `at`; `adapters` are names by index."""

    name: str
    turns: tuple[Turn, ...]
    adapters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trace is like. Lengths in tokens, sizes in blocks.

    Attributes:
        rate: requests per second; burstiness: coefficient of variation of the gaps between them.
        prompt, added, output: (mean, median, 95th percentile) of tokens.
        top10: share of the requests that goes to the ten most asked for adapters.
        bound: share of prompt tokens that a cache of any size would find, in whole blocks.
        kv_blocks, adapter_blocks: the working set: what was used and will be used again, at the
            moment when that is most.
    """

    requests: int
    sessions: int
    adapters: int
    rate: float
    burstiness: float
    prompt: tuple[float, float, float]
    added: tuple[float, float, float]
    output: tuple[float, float, float]
    top10: float
    bound: float
    kv_blocks: int
    adapter_blocks: int

    @property
    def working_set(self) -> int:
        """Blocks."""
        return self.kv_blocks + self.adapter_blocks

    def describe(self) -> dict[str, object]:
        """The same as plain values, for a results file."""
        return {**asdict(self), "working_set": self.working_set}


def read_csv(path: Path, vocab: int, seed: int = 0) -> Trace:
    """A user's own trace: a CSV with the columns of `COLUMNS`; adapter and session may be empty.

    A prompt longer than its session's context so far continues it; a shorter one starts a context
    of its own. Token ids are drawn from the seed.

    Raises:
        ConfigError: the file is unreadable, or a row has no such column or no such number.
    """
    rng = np.random.default_rng(seed)
    rows = _rows(path)
    rows.sort(key=lambda row: row.at)
    start = rows[0].at if rows else 0.0
    names = list(dict.fromkeys(row.adapter for row in rows if row.adapter))
    live: dict[tuple[str, str], tuple[int, int, int]] = {}  # session, adapter -> its number, turns, context
    turns = []
    for count, row in enumerate(rows):
        key = (row.session or f"#{count}", row.adapter)
        session, turn, context = live.get(key, (count, 0, 0))
        if row.prompt <= context:
            session, turn, context = count, 0, 0
        adds = tuple(rng.integers(FIRST_ID, vocab, row.prompt - context).tolist())
        adapter = names.index(row.adapter) if row.adapter else None
        turns.append(Turn(row.at - start, session, turn, adds, row.output, adapter))
        live[key] = (session, turn + 1, row.prompt + row.output)
    return Trace(path.stem, tuple(turns), tuple(names))


def facts(trace: Trace, block_tokens: int, sizes: Sequence[int]) -> Facts:
    """Measures a trace.

    Args:
        sizes: blocks of each adapter.
    """
    spans = _Spans()
    prompts, found = [], 0
    contexts: dict[int, list[int]] = {}
    for turn in trace.turns:
        context = contexts.setdefault(turn.session, [])
        prompt = [*context, *turn.adds]
        if turn.adapter is not None:
            spans.use(("adapter", turn.adapter), turn.at, sizes[turn.adapter])
        known = _use_blocks(spans, turn, prompt, block_tokens)
        if turn.at >= 0:
            found += known
            prompts.append(len(prompt))
        # An answer is known to its own session only: ids that nobody else has.
        answer = (-1 - turn.session * (1 << 20) - len(prompt) - i for i in range(turn.output))
        contexts[turn.session] = [*prompt, *answer]
    kv, adapters = spans.peak()
    turns = [turn for turn in trace.turns if turn.at >= 0]
    gaps = np.diff([turn.at for turn in turns])
    asked = Counter(turn.adapter for turn in turns if turn.adapter is not None)
    return Facts(
        requests=len(turns),
        sessions=len({turn.session for turn in turns}),
        adapters=len(asked),
        rate=len(turns) / max(turns[-1].at, 1e-9),
        burstiness=float(gaps.std() / gaps.mean()) if len(gaps) else 0.0,
        prompt=_lengths(prompts),
        added=_lengths([len(turn.adds) for turn in turns]),
        output=_lengths([turn.output for turn in turns]),
        top10=sum(n for _, n in asked.most_common(10)) / len(turns),
        bound=found * block_tokens / sum(prompts),
        kv_blocks=kv,
        adapter_blocks=adapters,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    at: float
    prompt: int
    output: int
    adapter: str
    session: str


class _Spans:
    """When what was first and last used: the sum of what is between its two at one moment."""

    def __init__(self) -> None:
        self._spans: dict[object, tuple[float, float, int]] = {}

    def use(self, what: object, at: float, size: int) -> bool:
        """Whether it was used before."""
        first, _, _ = self._spans.get(what, (at, at, size))
        known = what in self._spans
        self._spans[what] = (first, at, size)
        return known

    def peak(self) -> tuple[int, int]:
        """Blocks of KV and of adapters when their sum is largest."""
        changes = []
        for what, (first, last, size) in self._spans.items():
            kind = isinstance(what, tuple) and what[0] == "adapter"
            if last > first:
                changes += [(first, kind, size), (last, kind, -size)]
        held, best = [0, 0], (0, 0)
        for _, kind, size in sorted(changes):
            held[kind] += size
            best = max(best, (held[0], held[1]), key=sum)
        return best


def _use_blocks(spans: _Spans, turn: Turn, prompt: list[int], block_tokens: int) -> int:
    """Uses the blocks of a prompt and its answer's; how many of the prompt's were known."""
    found, known = 0, True
    path = hash((turn.adapter, turn.tenant))
    usable = (len(prompt) - 1) // block_tokens  # the last token is always computed
    for index in range(len(prompt) // block_tokens):
        path = hash((path, tuple(prompt[index * block_tokens : (index + 1) * block_tokens])))
        known = spans.use(("kv", path), turn.at, 1) and known
        found += known and index < usable
    return found


def _lengths(values: Sequence[int]) -> tuple[float, float, float]:
    return statistics.fmean(values), statistics.median(values), float(np.percentile(values, 95))


def _rows(path: Path) -> list[_Row]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(_parse(csv.DictReader(file), path))
    except OSError as e:
        raise ConfigError(f"trace {path}: {e.strerror}") from e


def _parse(reader: csv.DictReader[str], path: Path) -> Iterator[_Row]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"trace {path}: has no column {missing[0]!r}; it needs {', '.join(COLUMNS)}")
    for line, row in enumerate(reader, 2):
        try:
            at, prompt, output = float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])
        except (TypeError, ValueError) as e:
            raise ConfigError(f"trace {path}: line {line}: {e}") from e
        if prompt < 1 or output < 1:
            raise ConfigError(f"trace {path}: line {line}: prompt_tokens and output_tokens must be at least 1")
        yield _Row(at, prompt, output, row["adapter"] or "", row["session"] or "")
