"""Reads the public traces and corpora of the workloads, as lengths and times without texts.

Each reader takes the directory with the files below. A missing or broken file is a `ConfigError` that
names it. Lengths are in tokens. Texts are counted, not tokenised: 4/3 tokens per word in English
dialogs, 4 bytes per token with other scripts.

    azure_llm_2023_conv.csv                          Azure LLM inference trace 2023, conversation
    mooncake_conversation_0_40min.jsonl.gz           Mooncake (FAST'25), first 40 minutes
    agentic_coding_sessions.jsonl.gz                 sessions of kv-cache-tester
    gentd26_lora_requests_{untimed,timed_first60}.csv.gz   Alibaba GenTD26 (Lin et al., SoCC'25)
    servegen_client_rates.csv.gz                     ServeGen, clients of m-small and m-mid
    sgd_dialogs.jsonl.gz, taskmaster4_dialogs.jsonl.gz, topical_chat_dialogs.jsonl.gz
    tatoeba_pairs.jsonl.gz                           sentence pairs, 36 languages
"""

from __future__ import annotations

import ast
import csv
import datetime
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.workloads.arrivals import WINDOW_S, Clients, Recorded

TOKENS_PER_WORD = 4 / 3
BYTES_PER_TOKEN = 4
MOONCAKE_BLOCK = 512
MOONCAKE_TICK_S = 3.0


@dataclass(frozen=True, eq=False)
class Lengths:
    """Requests: seconds, prompt tokens and output tokens of each."""

    times: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray


@dataclass(frozen=True, slots=True)
class Step:
    """A request of a recorded session.

    Attributes:
        asked, told: tokens of the question and of the answer.
        gap_s: seconds since the request before (Mooncake) or its answer (coding agents).
        agent: 0, or the number of a sub-agent, which has a separate context.
    """

    asked: float
    told: float
    gap_s: float = 0.0
    agent: int = 0


def azure(data: Path) -> Lengths:
    """Azure conv 2023: 19,366 requests in 58 minutes."""
    with _rows(data, "azure_llm_2023_conv.csv") as rows:
        listed = list(rows)
        # datetime reads six of the seven digits of a second.
        stamps = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in listed]
        return Lengths(
            np.array([(stamp - stamps[0]).total_seconds() for stamp in stamps]),
            np.array([int(row["ContextTokens"]) for row in listed]),
            np.array([int(row["GeneratedTokens"]) for row in listed]),
        )


def mooncake(data: Path) -> tuple[np.ndarray, list[list[Step]]]:
    """Session starts in seconds, and the steps of each session.

    The trace has no sessions. A request continues the request with which it shares the longest prefix,
    if they share more than block 0, which nearly all share, and if it contains that whole prompt. It
    adds its length without the prompt and the answer before. Times within a tick of 3 s are spread.
    """
    sessions: list[list[Step]] = []
    starts: list[float] = []
    holder: dict[int, int] = {}  # prefix -> the last request with it
    known: list[tuple[int, float, int, int]] = []  # per request: its session, time, prompt, prompt and answer
    with _rows(data, "mooncake_conversation_0_40min.jsonl.gz") as rows:
        for number, row in enumerate(rows):
            at = row["timestamp"] / 1000 + MOONCAKE_TICK_S * (number * 0.618034 % 1)
            length, output = row["input_length"], row["output_length"]
            depth, parent = _share(row["hash_ids"], holder, number)
            if parent is not None and depth > 1:
                session, before, prompt, context = known[parent]
                if depth >= prompt // MOONCAKE_BLOCK and length > context:
                    sessions[session].append(Step(length - context, output, max(at - before, 0.0)))
                    known.append((session, at, length, length + output))
                    continue
            known.append((len(sessions), at, length, length + output))
            sessions.append([Step(length, output)])
            starts.append(at)
    order = np.argsort(starts, kind="stable")
    return np.array(starts)[order], [sessions[i] for i in order]


def _share(blocks: list[int], holder: dict[int, int], number: int) -> tuple[int, int | None]:
    """(blocks, request) of the longest shared prefix. Then registers all prefixes for `number`."""
    path, depth, parent = 0, 0, None
    for count, block in enumerate(blocks, 1):
        path = hash((path, block))
        if path in holder:
            depth, parent = count, holder[path]
        holder[path] = number
    return depth, parent


def coding_sessions(data: Path) -> tuple[int, list[list[Step]]]:
    """Mean tokens of system prompt and tools, and the steps of each session without them.

    A prompt much shorter than the context so far is a compacted context. Contexts only grow here, so
    the session ends there.
    """
    sessions, heads = [], []
    with _rows(data, "agentic_coding_sessions.jsonl.gz") as rows:
        for row in rows:
            head = row["system_tokens"] + row["tool_tokens"]
            heads.append(head)
            sessions.append(list(_steps(row["requests"], head)))
    return round(float(np.mean(heads))), [session for session in sessions if session]


def _steps(requests: list[dict[str, Any]], head: int, agent: int = 0) -> Iterator[Step]:
    context, agents = head, 0
    for request in requests:
        if request["type"] == "subagent":
            agents += 1
            yield from _steps(request["requests"], 0, agents)
            continue
        length, told = request["in"], max(request["out"], 1)
        if length < context / 2:
            return
        asked = max(length - context, 1)
        yield Step(asked, told, request.get("think_time") or 0.0, agent)
        context += asked + told


def lora_order(data: Path) -> list[str]:
    """GenTD26: the first adapter of each request that has one, in order."""
    with _rows(data, "gentd26_lora_requests_untimed.csv.gz") as rows:
        return [found for row in rows if (found := _adapter(row))]


def lora_clock(data: Path) -> Recorded:
    """GenTD26: times of the requests with an adapter in 16 days; an adapter is a client."""
    with _rows(data, "gentd26_lora_requests_timed_first60.csv.gz") as rows:
        listed = [(datetime.datetime.fromisoformat(r["gmt_create"]), a) for r in rows if (a := _adapter(r))]
    numbers = {adapter: i for i, adapter in enumerate(dict.fromkeys(adapter for _, adapter in listed))}
    times = np.array([(at - listed[0][0]).total_seconds() for at, _ in listed])
    return Recorded(times, np.array([numbers[adapter] for _, adapter in listed]))


def _adapter(row: dict[str, str]) -> str:
    used = ast.literal_eval(row["lora_args"])
    return used[0]["modelVersionId"] if used else ""


def clients(data: Path, model: str) -> Clients:
    """ServeGen's clients of `model` ("m-small", "m-mid"): rates by window, and median shape of each one's gaps."""
    with _rows(data, "servegen_client_rates.csv.gz") as rows:
        listed = [row for row in rows if row["model"] == model]
        windows = np.array([float(row["window_start_s"]) for row in listed]) / WINDOW_S
        numbers = {client: i for i, client in enumerate(dict.fromkeys(row["client_id"] for row in listed))}
        rates = np.zeros((len(numbers), int(windows.max() - windows.min()) + 1))
        shapes: dict[int, list[float]] = {i: [] for i in numbers.values()}
        weibull = np.zeros(len(numbers))
        for row, window in zip(listed, (windows - windows.min()).astype(int), strict=True):
            client = numbers[row["client_id"]]
            rates[client, window] = float(row["rate_rps"])
            shapes[client].append(float(row["param1"]))
            weibull[client] += 1 if row["pattern"] == "Weibull" else -1
    return Clients(rates, np.array([float(np.median(s)) for s in shapes.values()]), weibull > 0)


def topical(data: Path) -> list[list[Step]]:
    """Topical-Chat: the first speaker asks, the second answers."""
    with _rows(data, "topical_chat_dialogs.jsonl.gz") as rows:
        return [_exchanges([_words(message["message"]) for message in row["content"]]) for row in rows]


def sgd(data: Path) -> dict[str, list[list[Step]]]:
    """Schema-guided dialogs (SGD) by first service."""
    services: dict[str, list[list[Step]]] = {}
    with _rows(data, "sgd_dialogs.jsonl.gz") as rows:
        for row in rows:
            steps = _exchanges([_words(turn["utterance"]) for turn in row["turns"]])
            services.setdefault(row["services"][0], []).append(steps)
    return services


def taskmaster(data: Path) -> list[list[Step]]:
    """Taskmaster-4: user and assistant in turn; questions include tool calls and their results."""
    dialogs = []
    with _rows(data, "taskmaster4_dialogs.jsonl.gz") as rows:
        for row in rows:
            said = [(_words(u["text"]), _annotations(u)) for u in row["utterances"]]
            dialog = [Step(user + tool, told) for (user, tool), (told, _) in zip(said[::2], said[1::2], strict=False)]
            if dialog:
                dialogs.append(dialog)
    return dialogs


def tatoeba(data: Path) -> dict[str, list[tuple[float, float]]]:
    """Tokens of a sentence and of its translation, by language."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    with _rows(data, "tatoeba_pairs.jsonl.gz") as rows:
        for row in rows:
            sizes = len(row["eng"].encode()) / BYTES_PER_TOKEN, len(row["tgt"].encode()) / BYTES_PER_TOKEN
            pairs.setdefault(row["lang"], []).append(sizes)
    return pairs


def _exchanges(sizes: list[float]) -> list[Step]:
    """Exchanges of two speakers in turn, without a last question that has no answer."""
    return [Step(asked, told) for asked, told in zip(sizes[::2], sizes[1::2], strict=False)]


def _words(text: str) -> float:
    return len(text.split()) * TOKENS_PER_WORD


def _annotations(utterance: dict[str, Any]) -> float:
    texts = [annotation["value"] for annotation in utterance.get("annotations") or []]
    return sum(len(text.encode()) for text in texts) / BYTES_PER_TOKEN


@contextmanager
def _rows(data: Path, name: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The rows of a CSV, or of a file of JSON lines. Any error in reading them becomes a ConfigError with its name."""
    path = data / name
    try:
        with gzip.open(path, "rt", encoding="utf-8") if name.endswith(".gz") else path.open(encoding="utf-8") as file:
            yield map(json.loads, file) if ".jsonl" in name else iter(csv.DictReader(file))
    except OSError as e:
        raise ConfigError(f"data directory {data}: {name}: {e.strerror or e}") from e
    except (KeyError, ValueError, TypeError, IndexError, EOFError) as e:
        raise ConfigError(f"data directory {data}: {name}: {type(e).__name__}: {e}") from e
