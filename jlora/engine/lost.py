"""The entries of the weights that merges have lost, on their way from the device and back.

A merge lists them on the device (see `jlora.model.merge`). The lists have room for far more than there are, so only as
many as there are go to the host, in chunks. That takes two rounds beside the steps: one for how many there are, and one
for the entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jlora.model import merge

NOWHERE = np.iinfo(np.int32).max  # a place that no weight has

Where = tuple[int, str]  # layer, projection


@dataclass(slots=True)
class Lost:
    """Entries of one projection: per shard their places and their bits."""

    at: list[np.ndarray]
    bits: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.at, *self.bits))


@dataclass(frozen=True, slots=True)
class _Coming:
    """Entries on their way to the host: `counts` of them on each shard."""

    counts: np.ndarray
    chunks: list[tuple[jax.Array, jax.Array]]

    def kept(self) -> Lost:
        """Waits for them."""
        shards = len(self.counts)
        if not self.chunks:
            return Lost([np.zeros(0, np.int32)] * shards, [np.zeros(0, np.int32)] * shards)
        found = [[np.asarray(array).reshape(shards, -1) for array in chunk] for chunk in self.chunks]
        at, bits = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        return Lost(*([row[:count].copy() for row, count in zip(a, self.counts, strict=True)] for a in (at, bits)))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in itertools.chain(*self.chunks))


class LostEntries:
    """Those of one adapter, by place.

    Args:
        programs: of every projection.
    """

    def __init__(self, programs: Mapping[str, merge.MergePrograms], mesh: Mesh):
        self.moved = 0  # bytes that have come to the host, ever
        self._programs = programs
        self._mesh = mesh
        self._listed: dict[Where, Sequence[jax.Array]] = {}
        self._coming: dict[Where, _Coming] = {}
        self._kept: dict[Where, Lost] = {}

    @property
    def host_bytes(self) -> int:
        return sum(lost.nbytes for lost in self._kept.values())

    def add(self, where: Where, lists: Sequence[jax.Array]) -> None:
        """Places, bits and counts, as `merge` returns them."""
        self._listed[where] = lists

    def collect(self) -> None:
        """Keeps the entries that were sent for, and sends for those of the merges since."""
        for where, coming in self._coming.items():
            self.moved += coming.nbytes
            self._kept[where] = coming.kept()
        self._coming = {where: self._sent_for(where, *lists) for where, lists in self._listed.items()}
        self._listed = {}

    def __getitem__(self, where: Where) -> Lost:
        """Waits for them."""
        while where in self._listed or where in self._coming:
            self.collect()
        return self._kept[where]

    def drop(self, where: Where) -> None:
        """Forgets them: they are in the weights again."""
        del self._kept[where]

    def clear(self) -> None:
        self._listed, self._coming, self._kept = {}, {}, {}

    def put_back(self, programs: merge.MergePrograms, w: jax.Array, layer: int, lost: Lost) -> jax.Array:
        """Takes w; the weights with these entries."""
        for first, size in merge.chunks(max(map(len, lost.at)), tuple(programs.take)):
            places = [_filled(shard[first : first + size], NOWHERE, size) for shard in lost.at]
            values = [_filled(shard[first : first + size], 0, size) for shard in lost.bits]
            w = programs.patch(w, np.int32(layer), np.concatenate(places), np.concatenate(values))
        return w

    def rehearse(self, name: str, w: jax.Array) -> jax.Array:
        """Compiles what moves entries of a projection. Takes w, and returns it unchanged."""
        programs, shards = self._programs[name], self._mesh.shape["tp"]
        place = NamedSharding(self._mesh, merge.SHARDS)
        lists = [jax.device_put(np.zeros(shards * programs.most, each), place) for each in (np.int32, _bits_of(w))]
        for size, take in programs.take.items():
            take(*lists, np.int32(0))
            w = self.put_back_none(name, w, size)
        return w

    def put_back_none(self, name: str, w: jax.Array, size: int) -> jax.Array:
        """Puts a chunk without entries back, which takes as long as any. Takes w, and returns it unchanged."""
        shards = self._mesh.shape["tp"]
        at, bits = np.full(size, NOWHERE, np.int32), np.zeros(size, _bits_of(w))
        return self.put_back(self._programs[name], w, 0, Lost([at] * shards, [bits] * shards))

    def _sent_for(self, where: Where, at: jax.Array, bits: jax.Array, counts: jax.Array) -> _Coming:
        programs = self._programs[where[1]]
        # With more, taking the adapter out fails its check, and the weights are loaded anew.
        known = np.minimum(np.asarray(counts), programs.most)
        cuts = merge.chunks(int(known.max()), tuple(programs.take))
        chunks = [programs.take[size](at, bits, np.int32(first)) for first, size in cuts]
        for array in itertools.chain(*chunks):
            array.copy_to_host_async()
        return _Coming(known, chunks)


def _bits_of(w: jax.Array) -> np.dtype:
    return np.dtype(f"uint{8 * w.dtype.itemsize}")


def _filled(values: np.ndarray, fill: int, size: int) -> np.ndarray:
    out = np.full(size, fill, values.dtype)
    out[: len(values)] = values
    return out
