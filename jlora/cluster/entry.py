"""What a router's dispatcher notes of a request beside the table of requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jlora.cluster.routing.policy import Ask


@dataclass(slots=True)
class Entry:
    """One live request.

    Attributes:
        submitted: answers its caller; None once it has.
        chain: its prompt, for `Prompts`.
        ask: of the attempt under way; None without one.
        outputs: tokens that the attempt has delivered; None before its first answer.
        lacking: a replica lacked its adapter, or memory.
    """

    submitted: Future[int] | None
    chain: Sequence[int] = ()
    ask: Ask | None = None
    outputs: int | None = None
    lacking: bool = False
