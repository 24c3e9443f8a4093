"""Small files in the formats of the public traces, written by hand: what `jlora.sim.workloads.files` reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK = 512


def write_all(directory: Path) -> Path:
    """All of them; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    azure(directory)
    mooncake(directory)
    coding(directory)
    gentd(directory)
    servegen(directory)
    dialogs(directory)
    tatoeba(directory)
    return directory


def azure(directory: Path) -> None:
    """60 requests, one every 2 seconds."""
    rows = [f"2023-11-16 18:{15 + i // 30:02d}:{2 * (i % 30):02d}.1234567,{100 + i},{10 + i}" for i in range(60)]
    text = "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\r\n"
    (directory / "azure_llm_2023_conv.csv").write_text(text, newline="")


def mooncake(directory: Path) -> None:
    """Two sessions of two turns each, one of one, below the block 0 of all."""
    write(
        directory / "mooncake_conversation_0_40min.jsonl.gz",
        [
            _mooncake(0, 1200, 100, [0, 1, 2]),  # 2 full blocks
            _mooncake(60_000, 1400, 80, [0, 1, 4]),  # goes on: 1400 - 1300 tokens are new
            _mooncake(60_000, 600, 50, [0, 3]),
            _mooncake(90_000, 700, 10, [0, 5]),  # has all full blocks of the one before, but block 0 is everybody's
            _mooncake(120_000, 2000, 70, [0, 1, 4, 6]),  # goes on again
        ],
    )


def coding(directory: Path) -> None:
    """One session with a sub-agent, and one that compacts its context after two requests."""
    main = [
        _call(5000, 100, 0.0),
        _call(5400, 50, 4.0),
        {"type": "subagent", "t": 9.0, "requests": [_call(900, 20, 0.0), _call(1000, 30, 2.0)]},
        _call(5600, 60, 8.0),
    ]
    short = [_call(6000, 100, 0.0), _call(6200, 10, 3.0), _call(2000, 10, 3.0)]
    head = {"system_tokens": 1000, "tool_tokens": 3000, "block_size": 64}
    sessions = [{"id": "a", **head, "requests": main}, {"id": "b", **head, "requests": short}]
    write(directory / "agentic_coding_sessions.jsonl.gz", sessions)


def gentd(directory: Path) -> None:
    """Adapters x x y x z in both files; requests without one, and with two."""
    args = ["[]", _lora("x"), _lora("x", "y"), _lora("y"), "[]", _lora("x"), _lora("z")]
    rows = ["predict_type,lora_args", *(f't,"{value}"' for value in args)]
    write_text(directory / "gentd26_lora_requests_untimed.csv.gz", "\n".join(rows))
    rows = ["gmt_create,lora_args", *(f'2024-11-15 16:0{i}:00,"{value}"' for i, value in enumerate(args))]
    write_text(directory / "gentd26_lora_requests_timed_first60.csv.gz", "\n".join(rows))


def servegen(directory: Path) -> None:
    """Three clients of each model in two windows; the first asks four times as much as the others."""
    rows = ["model,client_id,window_start_s,rate_rps,cv,pattern,param1,param2"]
    for model in ("m-small", "m-mid"):
        for window in (518400, 519000):
            rows += [f"{model},7,{window},4.0,1.2,Gamma,0.7,0.1", f"{model},8,{window},1.0,1.5,Weibull,0.8,0.1"]
        rows.append(f"{model},9,518400,1.0,1.0,Gamma,1.0,0.1")
    write_text(directory / "servegen_client_rates.csv.gz", "\n".join(rows))


def dialogs(directory: Path) -> None:
    """Two SGD services, one Taskmaster order with a tool call, one Topical-Chat dialog."""
    turns = [_said("USER", 3), _said("SYSTEM", 6), _said("USER", 9), _said("SYSTEM", 12)]
    sgd = [{"dialogue_id": s, "services": [s, "Other"], "turns": turns} for s in ("Banks_1", "Media_1")]
    write(directory / "sgd_dialogs.jsonl.gz", sgd)
    call = {"name": "api_call", "value": "x" * 40, "context": "c"}
    order = [
        {"index": 0, "speaker": "user", "text": "a b c", "annotations": [call, call]},
        {"index": 1, "speaker": "assistant", "text": "d e f g h i"},
    ]
    write(directory / "taskmaster4_dialogs.jsonl.gz", [{"conversation_id": "t", "utterances": order}])
    talk = [{"agent": f"agent_{1 + i % 2}", "message": "w " * (3 * (i + 1))} for i in range(5)]
    write(directory / "topical_chat_dialogs.jsonl.gz", [{"conversation_id": "c", "content": talk}] * 3)


def tatoeba(directory: Path) -> None:
    """Two languages; one of them takes three bytes a letter."""
    pairs = [("deu", "e" * 40, "d" * 48), ("ben", "e" * 40, "\u0986" * 40)]
    write(directory / "tatoeba_pairs.jsonl.gz", [{"lang": lang, "eng": eng, "tgt": tgt} for lang, eng, tgt in pairs])


def write(path: Path, records: Sequence[Any]) -> None:
    write_text(path, "\n".join(json.dumps(record) for record in records))


def write_text(path: Path, text: str) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(text + "\n")


def _mooncake(at: int, prompt: int, output: int, blocks: list[int]) -> dict[str, Any]:
    return {"timestamp": at, "input_length": prompt, "output_length": output, "hash_ids": blocks}


def _call(prompt: int, output: int, think: float) -> dict[str, Any]:
    return {"type": "n", "in": prompt, "out": output, "think_time": think, "hash_ids": []}


def _lora(*adapters: str) -> str:
    return str([{"modelVersionId": adapter, "scale": 1.0} for adapter in adapters])


def _said(speaker: str, words: int) -> dict[str, str]:
    return {"speaker": speaker, "utterance": "w " * words}
