"""What a router believes of the replicas' prefix caches, from what it sent where: no message tells it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from jlora.adapters.invocation import last_occurrence


def shared(prompt: Sequence[int], key: str | None, invocation: Sequence[int]) -> tuple[Sequence[int], str | None]:
    """The part of a prompt whose KV others may find, and the version that it depends on; None is the base.

    An activated LoRA acts from its invocation on, so the KV before it is the base's.
    """
    at = last_occurrence(prompt, invocation) if invocation else None
    return (prompt, key) if at is None else (prompt[:at], None)


class Prefixes:
    """Whole blocks of prompts by replica. It keeps the `most` that were used last, and may err about any of them."""

    def __init__(self, block_tokens: int, most: int = 1 << 18):
        self._block_tokens = block_tokens
        self._most = most
        self._where: OrderedDict[int, dict[str, None]] = OrderedDict()  # hash of a block and all before it -> replicas

    def __len__(self) -> int:
        """Blocks that it remembers."""
        return len(self._where)

    def chain(self, tokens: Sequence[int], origin: Hashable) -> list[int]:
        """A hash for each whole block of a prompt. `origin`: what KV depends on beside the tokens."""
        size, last, chain = self._block_tokens, hash((origin,)), list[int]()
        for begin in range(0, len(tokens) - len(tokens) % size, size):
            last = hash((last, *tokens[begin : begin + size]))
            chain.append(last)
        return chain

    def cached(self, chain: Sequence[int]) -> dict[str, int]:
        """Replica -> tokens of the prompt."""
        found: dict[str, int] = {}
        for depth, key in enumerate(chain):
            here = [name for name in self._where.get(key, ()) if found.get(name, 0) == depth]
            if not here:
                break
            for name in here:
                found[name] = depth + 1
        return {name: depth * self._block_tokens for name, depth in found.items()}

    def sent(self, name: str, chain: Sequence[int]) -> None:
        """A replica computes a prompt."""
        for key in reversed(chain):  # a prefix is forgotten after what it begins
            self._where.setdefault(key, {})[name] = None
            self._where.move_to_end(key)
        while len(self._where) > self._most:
            self._where.popitem(last=False)

    def left(self, name: str) -> None:
        """A replica has lost its cache."""
        for names in self._where.values():
            names.pop(name, None)
