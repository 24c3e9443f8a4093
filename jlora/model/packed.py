"""Many small arrays that travel to the device as one.

A structured dtype says once where each field lies. The host writes the fields by name, and a program cuts
them out at the same offsets, which are static.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np


@partial(jax.tree_util.register_dataclass, data_fields=("words",), meta_fields=("type",))
@dataclass(frozen=True, slots=True)
class Packed:
    """A record, or an array of records.

    Attributes:
        words: [..., N] int32; numpy where the host writes it, `jax.Array` inside a program.
        type: of a record of N words. Its fields are int32, uint32 or float32, of any shape.
    """

    words: Any
    type: np.dtype

    @classmethod
    def zeros(cls, kind: np.dtype, *shape: int) -> Packed:
        """Records for the host to fill."""
        return cls(np.zeros((*shape, kind.itemsize // 4), np.int32), kind)

    def copy(self) -> Packed:
        """The same on the host, in memory of its own."""
        return Packed(self.words.copy(), self.type)

    def first_word(self, name: str) -> int:
        """Where a field begins in its record."""
        return _places(self.type)[name].first

    def fields(self) -> dict[str, Any]:
        """Each field of every record: [..., *its shape]. On the host they are views, to write to."""
        words, records = self.words, self.words.shape[:-1]
        return {
            name: words[..., place.first : place.after].reshape(records + place.shape).view(place.kind)
            for name, place in _places(self.type).items()
        }


class _Place(NamedTuple):
    first: int  # word of the record
    after: int
    shape: tuple[int, ...]
    kind: np.dtype


@functools.cache
def _places(record: np.dtype) -> dict[str, _Place]:
    """Where each field lies: a step asks more than once, and a dtype takes its time to answer."""
    assert record.fields is not None
    found = {}
    for name, (kind, offset, *_) in record.fields.items():
        found[name] = _Place(offset // 4, (offset + kind.itemsize) // 4, kind.shape, kind.base)
    return found
