"""Traces: a workload as a list of turns, and its facts. No jax.

A *turn* is one request of a session. It states what it adds to the session's context. Its prompt is
the context so far, with the answers of the engine that plays it, then its own tokens.

    prompt of turn n = adds 0 + answer 0 + adds 1 + answer 1 + ... + adds n

An *aside* reads the context and leaves it unchanged, like a check by another adapter.
`jlora.sim.script` decides when a turn is due.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import statistics
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from jlora.errors import ConfigError

log = logging.getLogger(__name__)

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "adapter", "session")
NEEDED = COLUMNS[:3]
BEYOND = "fields beyond the columns"
FIRST_ID = 3  # token ids below are special in most vocabularies


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        at: seconds from the start of the trace, at the earliest when the session's turn before is
            answered. A turn before 0 is history: computed before the clock starts, and not counted.
        session, turn: session, and the turn's number in it (-1: its history).
        adds: token ids added to the session's context.
        output: tokens of the answer.
        adapter: index of the adapter; None is the base model.
        tenant: salt of the prefix cache.
        after: in a closed loop, seconds after the answer to the user's turn before (a user's first turn
            is sent at `at`); `at` then assumes that answers take no time. None in an open loop.
        user: number of the user, who asks one thing at a time; None: the session's number.
        aside: neither `adds` nor the answer stays in the session's context.
        acts_from: an activated LoRA acts from this token of `adds` on, and the base computes the tokens
            before it. None: the adapter acts on every token.
    """

    at: float
    session: int
    turn: int
    adds: tuple[int, ...]
    output: int
    adapter: int | None
    tenant: str = ""
    after: float | None = None
    user: int | None = None
    aside: bool = False
    acts_from: int | None = field(default=None, repr=False)  # `digest` adds it itself, to keep older digests

    def activation(self, prompt: int) -> int | None:
        """Position of the first token on which the activated LoRA acts, in a prompt of `prompt` tokens."""
        return None if self.acts_from is None else prompt - len(self.adds) + self.acts_from


@dataclass(frozen=True, slots=True)
class Trace:
    """Turns in order of `at`.

    Attributes:
        adapters: names by index.
        users: number of a closed loop's; 0: open loop.
        lost: requests of its workload that it leaves out, because they exceed the context.
    """

    name: str
    turns: tuple[Turn, ...]
    adapters: tuple[str, ...]
    users: int = 0
    lost: int = 0

    @property
    def asked(self) -> Counter[int]:
        """Turns after time 0 of each adapter."""
        return Counter(turn.adapter for turn in self.turns if turn.adapter is not None and turn.at >= 0)

    def digest(self) -> str:
        """A digest of the turns: two traces with one digest are the same work."""
        sha = hashlib.sha256(repr(self.adapters).encode())
        for t in self.turns:
            sha.update(repr(replace(t, adds=())).encode())
            sha.update(np.asarray(t.adds, np.int64).tobytes())
            sha.update(b"" if t.acts_from is None else f"from {t.acts_from}".encode())
        return sha.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a trace. Lengths in tokens, sizes in blocks.

    Attributes:
        rate: requests per second, 0 if all are due at once.
        burstiness: coefficient of variation of the gaps between requests.
        prompt, added, output: (mean, median, 95th percentile) of tokens.
        top10: share of the requests that use the ten most popular adapters.
        recent10: share of the requests with an adapter that use one of the last ten.
        bound: share of prompt tokens that an unlimited cache finds, in whole blocks.
        bound_shared: the same if all adapters share KV.
        kv_blocks, adapter_blocks: the largest working set: blocks that were used and will be used again.
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
    recent10: float
    bound: float
    bound_shared: float
    kv_blocks: int
    adapter_blocks: int

    @property
    def working_set(self) -> int:
        return self.kv_blocks + self.adapter_blocks

    def describe(self) -> dict[str, object]:
        return {**asdict(self), "working_set": self.working_set}

    def text(self, name: str) -> str:
        return (
            f"{name}: {self.requests} requests of {self.sessions} sessions, {self.rate:.2f}/s, gaps vary "
            f"{self.burstiness:.2f}\n"
            f"  {self.adapters} adapters in use, the top 10 by {self.top10:.0%} of requests; one of the last 10 by "
            f"{self.recent10:.0%}\n"
            f"  prompts of {_span(self.prompt)} tokens, of which new {_span(self.added)}\n"
            f"  answers of {_span(self.output)}\n"
            f"  an unlimited cache finds {self.bound:.0%} of the prompts, {self.bound_shared:.0%} if all adapters "
            f"share KV\n"
            f"  working set {self.working_set} blocks: {self.kv_blocks} of KV, {self.adapter_blocks} of adapters"
        )


def read_csv(path: Path, vocab: int, seed: int = 0) -> Trace:
    """Reads a trace from a CSV with the columns of `COLUMNS`; adapter and session may be empty, or have no column.

    A prompt longer than its session's context so far continues it; a shorter one starts a new
    context. Token ids are drawn from the seed. Raises ConfigError.
    """
    rng = np.random.default_rng(seed)
    rows = sorted(_rows(path), key=lambda row: row.arrival_s)
    start = rows[0].arrival_s if rows else 0.0
    names = {name: i for i, name in enumerate(dict.fromkeys(row.adapter for row in rows if row.adapter))}
    live: dict[tuple[str, str], tuple[int, int, int]] = {}  # session, adapter -> its number, turns, context
    turns = []
    for count, row in enumerate(rows):
        key = (row.session or f"#{count}", row.adapter)
        session, turn, context = live.get(key, (count, 0, 0))
        if row.prompt_tokens <= context:
            session, turn, context = count, 0, 0
        adds = tuple(rng.integers(FIRST_ID, vocab, row.prompt_tokens - context).tolist())
        adapter = names[row.adapter] if row.adapter else None
        turns.append(Turn(row.arrival_s - start, session, turn, adds, row.output_tokens, adapter))
        live[key] = (session, turn + 1, row.prompt_tokens + row.output_tokens)
    return Trace(path.stem, tuple(turns), tuple(names))


def facts(trace: Trace, block_tokens: int, sizes: Sequence[int]) -> Facts:
    """Measures a trace whose adapters have these `sizes` in blocks. Raises ConfigError if no turn is after time 0."""
    turns = [turn for turn in trace.turns if turn.at >= 0]
    if not turns:
        raise ConfigError(f"trace {trace.name}: has no request")
    spans, seen, told = _Spans(), set[object](), set[object]()
    prompts, found, found_shared = [], 0, 0
    contexts: dict[int, _Content] = {}
    for turn in trace.turns:
        content = contexts.setdefault(turn.session, _Content(block_tokens))
        content = content.fork() if turn.aside else content
        content.extend(turn.adds)
        if turn.adapter is not None:
            spans.use(("adapter", turn.adapter), turn.at, sizes[turn.adapter])
        base = (turn.activation(len(content)) or 0) // block_tokens  # blocks that are the base's KV
        keys = [_kv(turn, h, i >= base) for i, h in enumerate(content.chain)]
        known = _prefix(content, [spans.use(key, turn.at, 1) or key in told for key in keys])
        shared = _prefix(content, [(turn.tenant, h) in seen for h in content.chain])
        if turn.at >= 0:
            found, found_shared = found + known, found_shared + shared
            prompts.append(len(content))
        # Only its own session knows an answer: use ids that no other session has.
        answer = -1 - turn.session * (1 << 20) - len(content)
        content.extend(range(answer, answer - turn.output, -1))
        computed = content.chain[: (len(content) - 1) // block_tokens]  # the KV of the last token is not
        told.update(_kv(turn, h, i >= base) for i, h in enumerate(computed))
        seen.update((turn.tenant, h) for h in computed)
    kv, adapters = spans.peak()
    gaps = np.diff([turn.at for turn in turns])
    asked = trace.asked
    return Facts(
        requests=len(turns),
        sessions=len({turn.session for turn in turns}),
        adapters=len(asked),
        rate=len(turns) / turns[-1].at if turns[-1].at else 0.0,
        burstiness=float(gaps.std() / gaps.mean()) if gaps.any() else 0.0,
        prompt=_lengths(prompts),
        added=_lengths([len(turn.adds) for turn in turns]),
        output=_lengths([turn.output for turn in turns]),
        top10=sum(n for _, n in asked.most_common(10)) / len(turns),
        recent10=_recent([turn.adapter for turn in turns if turn.adapter is not None], 10),
        bound=found / sum(prompts),
        bound_shared=found_shared / sum(prompts),
        kv_blocks=kv,
        adapter_blocks=adapters,
    )


def lengths(trace: Trace) -> list[int]:
    """Tokens of each turn's prompt and answer together."""
    contexts: Counter[int] = Counter()
    found = []
    for turn in trace.turns:
        found.append(contexts[turn.session] + len(turn.adds) + turn.output)
        if not turn.aside:
            contexts[turn.session] = found[-1]
    return found


def longest(trace: Trace) -> int:
    """Tokens of the longest prompt and answer together."""
    return max(lengths(trace), default=0)


def sped_up(trace: Trace, speed: float) -> Trace:
    """The same turns `speed` times as fast, with shorter times to think."""

    def sooner(turn: Turn) -> Turn:
        return replace(turn, at=turn.at / speed, after=None if turn.after is None else turn.after / speed)

    return replace(trace, turns=tuple(map(sooner, trace.turns)))


def shrunk(trace: Trace, divisor: int) -> Trace:
    """The same trace with all lengths divided, at least 1; keeps the first part of what a turn adds."""

    def less(turn: Turn) -> Turn:
        kept = max(1, round(len(turn.adds) / divisor))
        acts_from = None if turn.acts_from is None else min(turn.acts_from, kept - 1)
        return replace(turn, adds=turn.adds[:kept], output=max(1, round(turn.output / divisor)), acts_from=acts_from)

    return replace(trace, turns=tuple(map(less, trace.turns)))


class _Spans:
    """First and last use of each item, for the largest working set."""

    def __init__(self) -> None:
        self._spans: dict[object, tuple[float, float, int]] = {}

    def use(self, what: object, at: float, size: int) -> bool:
        """Records a use. Returns whether the item was used before."""
        first, _, _ = self._spans.get(what, (at, at, size))
        known = what in self._spans
        self._spans[what] = (first, at, size)
        return known

    def peak(self) -> tuple[int, int]:
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


class _Content:
    """A growing context; `chain` has a hash per full block, of all tokens up to the block's end."""

    def __init__(self, block_tokens: int, chain: Iterable[int] = (), rest: Iterable[int] = ()):
        self.block_tokens = block_tokens
        self.chain = list(chain)
        self._rest = list(rest)  # of the block that is not full

    def __len__(self) -> int:
        return len(self.chain) * self.block_tokens + len(self._rest)

    def fork(self) -> _Content:
        return _Content(self.block_tokens, self.chain, self._rest)

    def extend(self, tokens: Iterable[int]) -> None:
        rest = [*self._rest, *tokens]
        full = len(rest) - len(rest) % self.block_tokens
        for begin in range(0, full, self.block_tokens):
            before = self.chain[-1] if self.chain else 0
            self.chain.append(hash((before, *rest[begin : begin + self.block_tokens])))
        self._rest = rest[full:]


def _kv(turn: Turn, block: int, adapted: bool) -> object:
    return "kv", turn.adapter if adapted else None, turn.tenant, block


def _prefix(content: _Content, known: Sequence[bool]) -> int:
    """Tokens of a prompt in the cache: whole blocks up to the first unknown one, without the last token."""
    found = known.index(False) if False in known else len(known)
    return min(found, (len(content) - 1) // content.block_tokens) * content.block_tokens


def _recent(adapters: Sequence[int], size: int) -> float:
    """Hit rate of an LRU list of `size` adapters."""
    last: dict[int, None] = {}
    hits = 0
    for adapter in adapters:
        hits += adapter in last
        last.pop(adapter, None)
        last[adapter] = None
        if len(last) > size:
            del last[next(iter(last))]
    return hits / len(adapters) if adapters else 0.0


def _span(values: tuple[float, float, float]) -> str:
    return "{:.0f} (median {:.0f}, p95 {:.0f})".format(*values)


def _lengths(values: Sequence[int]) -> tuple[float, float, float]:
    return statistics.fmean(values), statistics.median(values), float(np.percentile(values, 95))


class _Row(msgspec.Struct):
    """A line of a trace's CSV, with the columns of `COLUMNS`."""

    arrival_s: Annotated[float, Meta(ge=-1e15, le=1e15, description="must be a number of seconds")]
    prompt_tokens: Annotated[int, Meta(ge=1, description="must be a whole number of at least 1")]
    output_tokens: Annotated[int, Meta(ge=1, description="must be a whole number of at least 1")]
    adapter: str = ""
    session: str = ""


def _rows(path: Path) -> Iterator[_Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            reader = csv.DictReader(file, restkey=BEYOND, restval="")
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"trace {path}: has no column {missing[0]!r}; its first line must name its columns, separated by "
                    f"commas, of {', '.join(COLUMNS)}"
                )
            if extra := [name for name in reader.fieldnames or () if name not in COLUMNS]:
                log.warning("trace %s: not used: %s; used: %s", path, ", ".join(extra), ", ".join(COLUMNS))
            for line, row in enumerate(reader, 2):
                where = f"trace {path}: line {line}"
                if BEYOND in row:
                    most = len(reader.fieldnames or ())
                    raise ConfigError(
                        f"{where}: has {most + len(row[BEYOND])} fields: must be at most {most}, as in the first line"
                    )
                yield _row(row, where)
    except OSError as e:
        raise ConfigError(f"trace {path}: {e.strerror}") from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"trace {path}: is no CSV in UTF-8: {e}") from e


def _row(row: dict[str, str], where: str) -> _Row:
    values: dict[str, str | float] = {**row}
    with suppress(ValueError):  # msgspec says what is wrong
        values["arrival_s"] = float(row["arrival_s"])  # msgspec itself takes no ".1"
    try:
        return msgspec.convert(values, _Row, strict=False)
    except msgspec.ValidationError as e:
        column = str(e).rpartition("$.")[2].strip("`")
        limit = typing.get_type_hints(_Row, include_extras=True)[column].__metadata__[0].description
        raise ConfigError(f"{where}: {column} = {row[column]!r}: {limit}") from e
