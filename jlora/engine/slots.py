"""What a launch says of its rows that stays the same from step to step, by slot. numpy only.

A sequence keeps its slot while it runs, so a step copies rows of these tables instead of making them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jlora.engine.plan import Sequence as Seq
from jlora.engine.plan import Work
from jlora.model.packed import Packed
from jlora.model.sampling import NOTHING, row_type
from jlora.validation import MAX_STOP_TOKENS


class SlotTable:
    """Sampling parameters by slot, written when a sequence gets its slot, read every step."""

    def __init__(self, slots: int, eos_ids: frozenset[int]):
        most = MAX_STOP_TOKENS + len(eos_ids)  # end tokens that min_tokens holds back
        self._rows = Packed.zeros(row_type(most), slots + 1)  # the last one pads
        self._fields = self._rows.fields()
        self._position = self._rows.first_word("position")
        self.version = 0  # changes with every `set`
        self._eos_ids = eos_ids
        self._fields["slot"][:] = np.arange(slots + 1)  # padding is outside the state: dropped
        for name in ("top_p", "repetition"):
            self._fields[name][slots] = 1

    def set(self, sequence: Seq) -> None:
        """Writes a sequence's parameters into its slot."""
        self.version += 1
        p, slot = sequence.request.sampling, sequence.slot
        row = {
            "temperature": p.temperature,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition": p.repetition_penalty,
            "presence": p.presence_penalty,
            "frequency": p.frequency_penalty,
            "top_k": p.top_k,
            "completion": sequence.index,
            "tables": uses_tables(sequence),
            "logprobs": p.logprobs is not None,
            "seed": (sequence.seed >> 32, sequence.seed & 0xFFFFFFFF),
            "until": sequence.prompt_len + p.min_tokens,
            "banned": NOTHING,
        }
        for name, value in row.items():
            self._fields[name][slot] = value
        ends = set(p.stop_token_ids) | (set() if p.ignore_eos else self._eos_ids)
        self._fields["banned"][slot, : len(ends)] = sorted(ends)

    def rows(self, slots: np.ndarray, positions: np.ndarray) -> Packed:
        """The parameters of these slots' sequences, which draw their tokens at `positions`."""
        words = self._rows.words[slots]
        words[: len(positions), self._position] = positions
        return Packed(words, self._rows.type)


def uses_tables(sequence: Seq) -> bool:
    """Whether penalties or logit_bias need the slot's tables on the device."""
    p = sequence.request.sampling
    return bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


class PageTables:
    """The block ids of each slot's context."""

    def __init__(self, slots: int, width: int):
        self._tables = np.zeros((slots, width), np.int32)
        self._written: list[tuple[int, ...]] = [()] * slots  # what each row says

    def rows(self, works: Sequence[Work]) -> np.ndarray:
        """The table of each work's sequence; only those that have changed are written."""
        slots = [work.sequence.slot for work in works]
        for work, slot in zip(works, slots, strict=True):
            lease = work.sequence.lease
            if lease is not None and lease.blocks is not self._written[slot]:
                self._written[slot] = lease.blocks
                self._tables[slot, : len(lease.blocks)] = lease.blocks
        return self._tables[slots]
