"""W1 (a chatbot) and W3 (agents), from public traces or from their shape alone. No jax.

              turns come from        answers         session starts     gap between turns    adapter
    chat      Topical-Chat messages  Azure conv      Azure conv         lognormal, sigma 1   Zipf 0.9, per session
    agents    SGD user utterances    SGD system      Gamma (ServeGen)   exponential          Zipf 0.9, per session
              + tool results of 30 to 150 tokens, below a service prompt of 256 that an adapter's
              sessions share

Without the files the same shapes are drawn: lognormal lengths with the files' own means and
spreads (constants below). Only lengths and times matter; token ids are random.

A small model on a CPU stands for a large one on an accelerator, so everything that is counted in
tokens is divided by `shrink`: lengths, the tokens of a block, the ranks. Then an adapter, a prompt
and the pool have the same sizes in blocks as in the paper (block of 32 tokens, ranks 32 and 64).
Sessions are met in the middle: what those that began before time 0 had said by then is one turn
before time 0.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.trace import FIRST_ID, Trace, Turn

TOKENS_PER_WORD = 4 / 3
ZIPF = 0.9
SERVICE_PROMPT = 256
TOOL_TOKENS = (30, 150)

Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class Load:
    """How much of it.

    Attributes:
        rate: requests per second; seconds: length of the trace.
        gap_s: mean time between two turns of a session, from question to question.
        adapters: how many there are.
        shrink: all lengths are divided by it.
        max_len: a session ends before its context would exceed it, in (shrunk) tokens.
    """

    rate: float
    seconds: float
    gap_s: float
    adapters: int
    shrink: int
    vocab: int
    max_len: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Where lengths come from, in tokens, and how sessions start.

    Attributes:
        dialog: draws a session: (tokens asked, tokens answered) of each turn.
        starts: draws so many gaps between session starts, of mean 1.
        gaps: draws so many gaps between turns, of mean 1.
        turns: mean turns of a dialog.
        prompt: tokens in front of every session of an adapter.
    """

    name: str
    dialog: Callable[[Random], list[tuple[float, float]]]
    starts: Callable[[Random, int], np.ndarray]
    gaps: Callable[[Random, int], np.ndarray]
    turns: float
    prompt: int = 0


def chat(data: Path | None = None) -> Source:
    """W1: from Topical-Chat and Azure conv in the directory `data`, or synthetic."""
    if data is None:

        def dialog(rng: Random) -> list[tuple[float, float]]:
            turns = round(rng.normal(10.9, 0.7))
            return list(zip(_words(rng, turns, 2.84, 0.59), _lognormal(rng, turns, 5.02, 0.86, 1000), strict=True))

        return Source("W1 synthetic", dialog, lambda rng, n: _gamma(rng, n, 1.09), _sticky, 10.9)
    talks = [[len(m["message"].split()) * TOKENS_PER_WORD for m in talk["content"][::2]] for talk in _topical(data)]
    rows = _azure(data)
    outputs = [int(row["GeneratedTokens"]) for row in rows]
    times = [_seconds(row["TIMESTAMP"]) for row in rows]

    def real(rng: Random) -> list[tuple[float, float]]:
        asked = talks[rng.integers(len(talks))]
        return list(zip(asked, rng.choice(outputs, len(asked)), strict=True))

    def starts(rng: Random, count: int) -> np.ndarray:
        """A stretch of the trace's own times, thinned to every tenth."""
        stretch = min(10 * (count + 1), len(times))
        begin = rng.integers(len(times) - stretch + 1)
        kept = np.sort(rng.choice(times[begin : begin + stretch], count + 1, replace=False))
        gaps = np.diff(kept)
        return gaps / gaps.mean()

    return Source("W1", real, starts, _sticky, float(np.mean([len(t) for t in talks])))


def agents(data: Path | None = None) -> Source:
    """W3: from SGD and ServeGen in the directory `data`, or synthetic."""
    if data is None:

        def dialog(rng: Random) -> list[tuple[float, float]]:
            turns = max(1, round(rng.normal(8.9, 2.7)))
            asked = _words(rng, turns, 1.91, 0.62) + rng.uniform(*TOOL_TOKENS, turns)
            return list(zip(asked, _words(rng, turns, 2.21, 0.63), strict=True))

        return Source("W3 synthetic", dialog, lambda rng, n: _gamma(rng, n, 1.3), _memoryless, 8.9, SERVICE_PROMPT)
    talks = [_exchanges(talk["turns"]) for talk in _lines(data / "sgd_dialogs.jsonl.gz")]
    cv = float(np.median([float(row["cv"]) for row in _rates(data)]))

    def real(rng: Random) -> list[tuple[float, float]]:
        return [(asked + rng.uniform(*TOOL_TOKENS), told) for asked, told in talks[rng.integers(len(talks))]]

    turns = float(np.mean([len(t) for t in talks]))
    return Source("W3", real, lambda rng, n: _gamma(rng, n, cv), _memoryless, turns, SERVICE_PROMPT)


SOURCES: dict[str, Callable[[Path | None], Source]] = {"W1": chat, "W3": agents}


def play(source: Source, load: Load) -> Trace:
    """Draws a trace: sessions of `source`, as many and as fast as `load` says."""
    rng = np.random.default_rng(load.seed)
    past = 2 * source.turns * load.gap_s  # sessions that began then are over
    rate = load.rate / source.turns
    count = int(1.5 * rate * (past + load.seconds)) + 16
    starts = np.cumsum(source.starts(rng, count)) / rate - past
    prompts = [_ids(np.random.default_rng((load.seed, i)), source.prompt, load) for i in range(load.adapters)]
    popular = 1 / np.arange(1, load.adapters + 1) ** ZIPF
    order = rng.permutation(load.adapters)
    turns: list[Turn] = []
    for session, start in enumerate(starts[starts < load.seconds]):
        adapter = int(order[rng.choice(load.adapters, p=popular / popular.sum())])
        turns += _session(source, load, rng, Turn(float(start), session, 0, prompts[adapter], 0, adapter))
    turns.sort(key=lambda turn: turn.at)
    return Trace(source.name, tuple(turns), tuple(f"a{i}" for i in range(load.adapters)))


def ranks(load: Load) -> list[int]:
    """Ranks 32 and 64, shrunk, half of the adapters each, whatever their popularity."""
    half = [32 // load.shrink if i % 2 else 64 // load.shrink for i in range(load.adapters)]
    return np.random.default_rng((load.seed, 1)).permutation(half).tolist()


def _session(source: Source, load: Load, rng: Random, first: Turn) -> list[Turn]:
    """The turns of a session; those before time 0 as one, if they are recent or the session goes on."""
    dialog = source.dialog(rng)
    times = first.at + np.cumsum(source.gaps(rng, len(dialog))) * load.gap_s
    past, last = list(first.adds), -math.inf
    turns: list[Turn] = []
    length = len(first.adds)
    for at, (asked, told) in zip(times, dialog, strict=True):
        question, output = _ids(rng, asked, load), max(1, round(told / load.shrink))
        length += len(question) + output
        if at >= load.seconds or length > load.max_len:
            break
        if at < 0:
            past += [*question, *_ids(rng, told, load)]
            last = float(at)
        else:
            adds = question if turns or last > -math.inf else (*past, *question)
            turns.append(Turn(float(at), first.session, len(turns), adds, output, first.adapter))
    if last < -load.gap_s and not turns:
        return []
    return ([Turn(last, first.session, -1, tuple(past), 1, first.adapter)] if last > -math.inf else []) + turns


def _ids(rng: Random, tokens: float, load: Load) -> tuple[int, ...]:
    """Random token ids, so many after shrinking (at least one, if any)."""
    count = max(1, round(tokens / load.shrink)) if tokens else 0
    return tuple(rng.integers(FIRST_ID, load.vocab, count).tolist())


def _words(rng: Random, count: int, mean: float, spread: float) -> np.ndarray:
    return _lognormal(rng, count, mean, spread, 90) * TOKENS_PER_WORD


def _lognormal(rng: Random, count: int, mean: float, spread: float, most: float) -> np.ndarray:
    return np.minimum(rng.lognormal(mean, spread, count), most)


def _gamma(rng: Random, count: int, cv: float) -> np.ndarray:
    return rng.gamma(1 / cv**2, cv**2, count)


def _sticky(rng: Random, count: int) -> np.ndarray:
    """Gaps of a chat: most people answer soon, some late (sigma 1 around the median, as in Mooncake)."""
    return rng.lognormal(-0.5, 1.0, count)


def _memoryless(rng: Random, count: int) -> np.ndarray:
    return rng.exponential(1.0, count)


def _exchanges(turns: Sequence[dict[str, str]]) -> list[tuple[float, float]]:
    """(tokens asked, tokens answered) of a dialog in which user and system alternate."""
    sizes = [len(turn["utterance"].split()) * TOKENS_PER_WORD for turn in turns]
    return list(zip(sizes[::2], sizes[1::2], strict=False))


def _topical(data: Path) -> list[dict]:
    return _lines(data / "topical_chat_dialogs.jsonl.gz")


def _azure(data: Path) -> list[dict[str, str]]:
    try:
        with (data / "azure_llm_2023_conv.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as e:
        raise ConfigError(f"data directory {data}: azure_llm_2023_conv.csv: {e.strerror}") from e


def _rates(data: Path) -> list[dict[str, str]]:
    lines = _text(data / "servegen_client_rates.csv.gz").splitlines()
    return [row for row in csv.DictReader(lines) if row["cv"]]


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in _text(path).splitlines()]


def _text(path: Path) -> str:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    except OSError as e:
        raise ConfigError(f"data directory {path.parent}: {path.name}: {e.strerror}") from e


def _seconds(stamp: str) -> float:
    return datetime.datetime.fromisoformat(stamp[:26]).timestamp()
