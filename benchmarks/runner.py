"""What a study is run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records import Records
from jlora import machine
from jlora.loadgen.rounds import Budget


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of a study.

    Attributes:
        out: where results go; work: weights and other things that a later run finds again.
        rounds: 0 leaves the number to the study.
        data: directory of the public traces; None draws the synthetic equivalents.
        settings: jlora `section.key` overrides.
        peer_python: an interpreter with torch, transformers and peft; "" measures jlora alone.
        llama_server: llama.cpp's, "" measures jlora alone; llama_convert: a program that makes GGUF files.
        commits, studies: of `compare`.
        only: of `faults` and `gaps`: which; of `cluster-migration`, `-table`: sides; of `skew`: shares; none: all.
        replicas: of `failures`; 0 leaves the number to the study.
        cluster, leak: of `soak`: replicas behind a router (0: one server), and a server that leaks.
    """

    out: Path
    work: Path
    quick: bool = False
    dtype: str = "float32"
    rounds: int = 0
    minutes: float = 13.0
    seconds: float = 0.0
    data: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    grpc: bool = True
    peer_python: str = ""
    llama_server: str = ""
    llama_convert: str = ""
    commits: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    replicas: int = 0
    cluster: int = 0
    leak: bool = False

    def folder(self, name: str) -> Path:
        """Where a study keeps its weights."""
        return self.work / ("quick" if self.quick else "") / name

    def records(self, name: str, settings: Mapping[str, Any]) -> Records:
        """The study's file, OUT/NAME.jsonl, with what every study's settings have."""
        common = {"dtype": self.dtype, "settings": dict(self.settings), "threads": machine.threads()}
        return Records(self.out / f"{name}.jsonl", {**common, **settings, "versions": machine.versions()})

    def budget(self, rounds: int, quick: int = 2) -> Budget:
        """As the flags say; else `rounds`."""
        return Budget(self.rounds or (quick if self.quick else rounds), self.minutes)
