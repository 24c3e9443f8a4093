"""Merges one adapter into the weights on the device, piece by piece, and takes it out again bit by bit.

A piece is the projections of one layer that share an input (`jlora.pallas.ops.GROUPS`). Pieces are merged
from the first to the last and taken out from the last to the first, between steps. At any point the
first `done` pieces are merged: a step for the merged adapter applies its blocks in the others only.

A piece's factors are unpacked when it is merged, so that no step waits for a whole adapter. They and the
entries that the merge has lost stay on the host until the piece is taken out. A digest of every projection,
taken when the weights were loaded, proves each unmerge.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jlora.adapters.packing import unpack
from jlora.cache.pool import as_shortage
from jlora.engine.lost import LostEntries, Where
from jlora.engine.ports import Loss, Price, Read
from jlora.layout import PoolLayout
from jlora.model import merge
from jlora.model.llama import Params
from jlora.model.spec import PROJECTIONS, ModelSpec
from jlora.pallas.ops import GROUPS
from jlora.ports import Clock

log = logging.getLogger(__name__)

PROMPT = 32  # tokens of the prompt that a loss is measured on
ROUNDS = 3  # of timing pieces; the fastest counts

_Factors = tuple[np.ndarray, np.ndarray]  # of one place: A [R, in], B [R, out]


class Holder(Protocol):
    """Who owns the weights: the runner."""

    @property
    def weights(self) -> Any: ...
    def swap_weights(self, params: Params) -> Any: ...


@dataclass(frozen=True, slots=True)
class Base:
    """The model whose weights are merged into. `max_rank`: of any adapter. `pristine` loads its weights anew."""

    spec: ModelSpec
    layout: PoolLayout
    mesh: Mesh
    stacked: bool
    max_rank: int
    pristine: Callable[[], Params]


@dataclass(slots=True)
class _Cost:
    """Seconds of a group's piece, without ranks, and for each `merge.RANKS` of them.

    patch_s: of putting as many lost entries back as the lists have room for.
    """

    into_s: float = 0.0
    out_s: float = 0.0
    call_s: float = 0.0
    patch_s: float = 0.0


class Merger:
    """See `jlora.engine.ports.Merger`. All methods belong to the engine's thread."""

    def __init__(self, base: Base, holder: Holder, clock: Clock):
        self.done = 0
        self.reloads = 0
        self._costs = [_Cost() for _ in GROUPS]
        self._base = base
        self._holder = holder
        self._clock = clock
        self._programs = merge.build(base.spec, base.mesh, base.stacked)
        self._probes = merge.build_probe(base.spec, base.mesh, base.stacked)
        self._blocks: Mapping[str, list[int]] = {}  # by projection: which of the adapter's blocks are its
        self._read: Read | None = None
        self._factors: dict[Where, _Factors] = {}  # of what is merged
        self._probe: Iterator[None] | None = None
        self._loss: Loss | None = None
        self._lost = LostEntries(self._programs, base.mesh)
        self._checks: list[tuple[Where, jax.Array]] = []  # digests of what was taken out
        self._digests: dict[Where, int] = {}

    @property
    def pieces(self) -> int:
        return self._base.spec.layers * len(GROUPS)

    @property
    def host_bytes(self) -> int:
        """What the merged adapter takes of the host."""
        factors = sum(a.nbytes + b.nbytes for a, b in self._factors.values())
        return factors + self._lost.host_bytes

    @property
    def moved(self) -> int:
        """Bytes of lost entries that have come to the host, ever."""
        return self._lost.moved

    def prepare(self) -> None:
        """Takes the digests, compiles every program, and measures how long a piece takes by the adapter's rank."""
        found = {where: self._digest(*where) for where in self._places()}
        self._digests = {where: int(digest) for where, digest in found.items()}
        most = -(-self._base.max_rank // merge.RANKS)
        self._begin_zero(1)
        while self.measure() is None:  # compiles, as the first pieces do
            pass
        for name in PROJECTIONS:
            self._change(0, name, lambda _, name, w: self._lost.rehearse(name, w))
        self._timed(1)
        few = [self._timed(1) for _ in range(ROUNDS)]
        many = [self._timed(most) for _ in range(ROUNDS)] if most > 1 else few
        for group, cost in enumerate(self._costs):
            (into, out), (longer, _) = (map(min, zip(*(one[group] for one in r), strict=True)) for r in (few, many))
            cost.call_s = max(0.0, longer - into) / max(1, most - 1)
            cost.into_s, cost.out_s = into - cost.call_s, out - cost.call_s
            cost.patch_s = sum(map(self._patch_s, GROUPS[group]))
        self.forget()

    def _begin_zero(self, calls: int) -> None:
        """Names a zero adapter whose ranks take so many calls of `accumulate`."""
        layout = self._base.layout
        shape, dtype = (1, *layout.block_shape[1:]), jax.numpy.dtype(layout.dtype)
        ranks = min(self._base.max_rank, calls * merge.RANKS)
        counts = {name: -(-ranks // layout.units[name].per_block) for name in PROJECTIONS}
        blocks = [name for name, count in counts.items() for _ in range(count)]
        self.begin(blocks, lambda which, layers: np.zeros((len(which), *shape), dtype))

    def _timed(self, calls: int) -> list[tuple[float, float]]:
        """Seconds of each group's piece of such an adapter, merged and taken out."""
        self._begin_zero(calls)
        into = [self._waited(self.forward) for _ in GROUPS]
        out = [self._waited(self.back) for _ in GROUPS]
        assert self.whole() and not self.reloads, "merging a zero adapter has changed the weights"
        return list(zip(into, out[::-1], strict=True))

    def _patch_s(self, name: str) -> float:
        """Of one projection, by its largest chunk."""
        programs = self._programs[name]
        size = next(iter(programs.take))

        def put_back() -> None:
            self._change(0, name, lambda _, name, w: self._lost.put_back_none(name, w, size))

        return min(self._waited(put_back) for _ in range(ROUNDS)) * programs.most / size

    def _waited(self, change: Callable[[], None]) -> float:
        began = self._clock()
        change()
        jax.block_until_ready((self._holder.weights.params, self._checks))
        return self._clock() - began

    def price(self, projections: Sequence[str], lost: float) -> Price:
        """See `jlora.engine.ports.Merger.price`."""
        blocks = Counter(projections or PROJECTIONS)
        ranks = max(count * self._base.layout.units[name].per_block for name, count in blocks.items())
        calls = -(-ranks // merge.RANKS)
        mine = [cost for cost, names in zip(self._costs, GROUPS, strict=True) if not blocks.keys().isdisjoint(names)]
        into_s = sum(cost.into_s + cost.call_s * calls for cost in mine)
        out_s = sum(cost.out_s + cost.call_s * calls + cost.patch_s * lost for cost in mine)
        return Price(into_s / len(GROUPS), out_s / len(GROUPS))

    def begin(self, projections: Sequence[str], read: Read) -> None:
        """The next merge is of this adapter; reads nothing yet."""
        assert not self.done and not self._checks, "another adapter is merged"
        blocks: dict[str, list[int]] = {}
        for index, name in enumerate(projections):
            blocks.setdefault(name, []).append(index)
        self._blocks, self._read = blocks, read
        self._probe, self._loss = None, None

    def forget(self) -> None:
        """Gives back what a measurement under way holds, on the host and on the device."""
        self._blocks, self._read, self._probe = {}, None, None

    def measure(self) -> Loss | None:
        """Goes one piece on with measuring what the merge would lose; the loss when it is known.

        Raises MemoryError if the device lacks memory.
        """
        if self._probe is None:
            self._probe = self._measured()
        try:
            next(self._probe, None)
        except Exception as error:
            self._probe, short = None, as_shortage(error)
            if short is error:
                raise
            raise short from error
        return self._loss

    def forward(self) -> None:
        """Merges the next piece."""
        layer, names = self._piece(self.done)
        with self._anew_if_short():
            self._lost.collect()
            for name in names:
                self._factors[layer, name] = self._unpacked(layer, name)
                self._change(layer, name, self._merged)
        self.done += 1

    def collect(self) -> None:
        """Lets what taking out will need come to the host."""
        self._lost.collect()

    def back(self) -> None:
        """Takes the last piece out."""
        self.done -= 1
        layer, names = self._piece(self.done)
        with self._anew_if_short():
            for name in names:
                self._change(layer, name, self._unmerged)
                self._lost.drop((layer, name))
                del self._factors[layer, name]
                self._checks.append(((layer, name), self._digest(layer, name)))

    def whole(self) -> bool:
        """Whether everything taken out has left the base's bits. If not, the weights are loaded anew."""
        wrong = [where for where, digest in self._checks if int(digest) != self._digests[where]]
        self._checks = []
        if not wrong:
            return True
        log.error("taking an adapter out has left other weights in %d projections; loading all anew", len(wrong))
        self._reload()
        return False

    def audit(self) -> None:
        """Takes every merged projection out and merges it again: nothing compiles, and little memory is needed.

        Raises AssertionError if any projection then has other bits than the base's.
        """
        merged = {(layer, name) for layer, names in map(self._piece, range(self.done)) for name in names}
        with self._anew_if_short():
            wrong = [where for where in self._places() if not self._holds_base(*where, where in merged)]
        assert not wrong, f"of {self.done} merged pieces, these projections have wrong weights: {wrong}"

    # -- inside -----------------------------------------------------------------------------

    def _places(self) -> Iterator[Where]:
        return ((layer, name) for layer in range(self._base.spec.layers) for name in PROJECTIONS)

    def _piece(self, index: int) -> tuple[int, list[str]]:
        """Its layer, and its projections that the adapter has."""
        layer, group = divmod(index, len(GROUPS))
        return layer, [name for name in GROUPS[group] if name in self._blocks]

    def _weight(self, layer: int, name: str) -> jax.Array:
        layers = self._holder.weights.params["layers"]
        return layers[name] if self._base.stacked else layers[layer][name]

    def _digest(self, layer: int, name: str) -> jax.Array:
        return self._programs[name].digest(self._weight(layer, name), np.int32(layer))

    def _holds_base(self, layer: int, name: str, merged: bool) -> bool:
        """Whether a projection is the base's, once what is merged is out of it."""
        if merged:
            self._change(layer, name, self._unmerged)
        right = int(self._digest(layer, name)) == self._digests[layer, name]
        if merged:
            self._change(layer, name, self._merged)
            self._lost.collect()  # or the full lists of all of them would stay on the device
        return right

    def _change(self, layer: int, name: str, change: Callable[[int, str, jax.Array], jax.Array]) -> None:
        """Replaces a projection's weight, which `change` takes."""
        new = change(layer, name, self._weight(layer, name))
        params = self._holder.weights.params
        if self._base.stacked:
            layers: Any = {**params["layers"], name: new}
        else:
            layers = list(params["layers"])
            layers[layer] = {**layers[layer], name: new}
        self._holder.swap_weights({**params, "layers": layers})

    def _merged(self, layer: int, name: str, w: jax.Array) -> jax.Array:
        new, *lost = self._programs[name].merge(w, np.int32(layer), self._delta(name, self._factors[layer, name]))
        self._lost.add((layer, name), lost)
        return new

    def _unmerged(self, layer: int, name: str, w: jax.Array) -> jax.Array:
        programs = self._programs[name]
        w = programs.unmerge(w, np.int32(layer), self._delta(name, self._factors[layer, name]))
        return self._lost.put_back(programs, w, layer, self._lost[layer, name])

    def _unpacked(self, layer: int, name: str) -> _Factors:
        """Reads the factors of one place from the host tier; R is padded to whole calls, 0 without the adapter."""
        layout = self._base.layout
        if name not in self._blocks:
            unit, dtype = layout.units[name], jax.numpy.dtype(layout.dtype)
            return np.zeros((0, unit.a * layout.tp), dtype), np.zeros((0, unit.b * layout.tp), dtype)
        assert self._read is not None, "no adapter is to be merged"
        data = self._read(self._blocks[name], slice(layer, layer + 1))[:, 0]
        shards = unpack(data, layout, name)
        a, b = (np.concatenate(parts, axis=1).astype(data.dtype) for parts in zip(*shards, strict=True))
        padding = ((0, -len(a) % merge.RANKS), (0, 0))
        return np.pad(a, padding), np.pad(b, padding)

    def _delta(self, name: str, factors: _Factors) -> jax.Array:
        programs, delta = self._programs[name], self._programs[name].zeros()
        places = self._places_of(name)
        for first in range(0, len(factors[0]), merge.RANKS):
            tile = slice(first, first + merge.RANKS)
            a, b = (jax.device_put(factor[tile], place) for factor, place in zip(factors, places, strict=True))
            delta = programs.accumulate(delta, a, b)
        return delta

    @contextmanager
    def _anew_if_short(self) -> Iterator[None]:
        """Loads the weights anew if memory ends in the middle of a piece: it may have changed a part of them."""
        try:
            yield
        except Exception as error:
            short = as_shortage(error)
            if not isinstance(short, MemoryError):
                raise
            log.error("memory ended while weights were changed; loading all anew")
            self._reload()
            raise short from error

    def _reload(self) -> None:
        self.reloads += 1
        for leaf in jax.tree.leaves(self._holder.weights.params):
            leaf.delete()
        try:
            self._holder.swap_weights(self._base.pristine())
        except MemoryError as error:  # no weights are left: that is more than a merge
            raise RuntimeError("no memory is left to load the weights anew") from error
        self._factors, self._checks, self.done = {}, [], 0
        self._lost.clear()
        wrong = [where for where in self._places() if int(self._digest(*where)) != self._digests[where]]
        if wrong:
            raise RuntimeError(f"the checkpoint's weights have changed since the start in {len(wrong)} projections")

    def _measured(self) -> Iterator[None]:
        """See `jlora.model.merge`: one short prompt through exact, unmerged and merged weights, piece by piece.

        A float32 model's unmerged path is itself the measure, so only the lost entries are counted.
        """
        base, params, worst = self._base, self._holder.weights.params, list[jax.Array]()
        tokens = np.random.default_rng(0).integers(0, base.spec.vocab, PROMPT, dtype=np.int32)
        compares = base.spec.dtype != "float32"
        xs = self._probes.begin(params["embed"], tokens) if compares else None
        for layer in range(base.spec.layers):
            factors, at = dict[str, tuple[Any, ...]](), np.int32(layer)
            for names in GROUPS:
                for name in names:
                    found = self._unpacked(layer, name)
                    worst.append(self._programs[name].lost(self._weight(layer, name), at, self._delta(name, found)))
                    if compares:
                        factors[name] = self._widest(name, found)
                yield
            if compares:
                layers = params["layers"]
                xs = self._probes.layer(layers if base.stacked else layers[layer], at, factors, xs)
                yield
        self._loss = Loss(self._error(xs) if compares else 1.0, max(map(float, worst)))

    def _error(self, xs: Any) -> float:
        params = self._holder.weights.params
        head = params["embed" if self._base.spec.tied else "head"]
        unmerged, merged = map(float, self._probes.errors(head, params["norm"], xs))
        return (merged / max(unmerged, 1e-30)) ** 0.5

    def _widest(self, name: str, factors: _Factors) -> tuple[Any, ...]:
        """The factors on the device with as many ranks as any adapter's, as one program takes all; their tiles."""
        each = self._base.layout.units[name].per_block
        ranks = -(-self._base.max_rank // each) * each
        most = ranks + -ranks % merge.RANKS
        padded = (np.pad(factor, ((0, most - len(factor)), (0, 0))) for factor in factors)
        placed = [jax.device_put(f, place) for f, place in zip(padded, self._places_of(name), strict=True)]
        return *placed, np.int32(len(factors[0]) // merge.RANKS)

    def _places_of(self, name: str) -> list[NamedSharding]:
        return [NamedSharding(self._base.mesh, spec) for spec in merge.factor_specs(name)]
