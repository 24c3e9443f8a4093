"""Compiles a launch's programs before it runs, on any thread.

    ahead = Ahead(programs, shapes, groups)
    first = ahead.begin(builder, threads)       # while weights are read
    ahead.compile(blank)                        # the first call of these programs compiles nothing

jit finds the executable that `lower(...).compile()` made for arguments of the same shapes and
shardings. XLA compiles, and loads from the persistent cache, without Python's lock: threads gain,
and an engine that runs meanwhile keeps its pace. Tracing holds the lock, for about 0.2 s a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jlora.cache.pool import pieces
from jlora.engine.batch import BatchBuilder, Form, Launch
from jlora.model.cut import SPLIT, layer_of
from jlora.model.llama import Params
from jlora.model.sampling import SlotState
from jlora.model.sharding import BLOCKS
from jlora.model.spec import PROJECTIONS, SITES
from jlora.model.step import Programs, group_layers, head_of


class Shapes(NamedTuple):
    """An engine's arrays, each a `jax.ShapeDtypeStruct` with its sharding: they need not exist yet."""

    params: Params
    pool: jax.ShapeDtypeStruct
    state: SlotState


@dataclass(frozen=True, slots=True)
class First:
    """The programs that serve every launch, on their way.

    Attributes:
        blanks: of every form, a launch of padding.
        compiled: of the forms that serve every launch, when their programs are there.
        copies: when the programs that copy blocks are there.
    """

    blanks: Mapping[Form, Launch]
    compiled: Mapping[Form, Future[None]]
    copies: Sequence[Future[None]]


class Ahead:
    """Compiles by the shapes of an engine's arrays. It holds no array: the engine's thread donates and frees them.

    Args:
        groups: equal groups of layers that a streamed copy comes in, each of `group_layers`.
    """

    def __init__(self, programs: Programs, shapes: Shapes, groups: int, group_layers: int):
        self.programs = programs
        self.helps = False  # the host may compute the adapters' part of any form
        self._groups, self._group_layers = groups, group_layers
        self._params, self._pool, self._state = shapes

    def begin(self, builder: BatchBuilder, threads: Executor) -> First:
        """Compiles the programs that serve every launch on `threads`. Call it on the builder's thread."""
        blanks = {form: builder.blank(*form) for form in builder.buckets.forms()}
        first = builder.buckets.largest.forms()
        copies = [threads.submit(self.compile_copies, size) for size in pieces(self._pool.shape[0] // self._layers)]
        return First(blanks, {form: threads.submit(self.compile, blanks[form]) for form in first}, copies)

    @property
    def _layers(self) -> int:
        return self._groups * self._group_layers

    def compile(self, blank: Launch) -> None:
        """Compiles what every launch of the same form runs."""
        programs, params, last = self.programs, self._params, self._state.last
        lists = blank.batch.lists
        lists = jax.ShapeDtypeStruct(lists.shape, lists.dtype, sharding=last.sharding)
        forward = programs.forward.lower(params, self._pool, last, blank.batch._replace(lists=lists))
        forward.compile()
        _, rows, hidden = (self._replicated(out) for out in forward.out_info)
        if blank.sampling is not None:
            for draw in filter(None, (programs.sample, programs.greedy, programs.drawn)):
                draw.lower(head_of(params), rows, self._state, blank.sampling).compile()
        if blank.score_targets is not None:
            programs.score.lower(head_of(params), hidden, blank.score_targets).compile()

    def compile_copies(self, size: int) -> None:
        """Compiles what copies so many blocks into the pool, whole or a group of their layers, and out of it."""
        programs, pool, ids = self.programs, self._pool, np.zeros(size, np.int32)
        sharding = NamedSharding(pool.sharding.mesh, BLOCKS)
        data, group = (
            jax.ShapeDtypeStruct((size, depth, *pool.shape[1:]), pool.dtype, sharding=sharding)
            for depth in (self._layers, self._group_layers)
        )
        programs.write_blocks.lower(pool, ids, data).compile()
        programs.write_layers.lower(pool, ids, group, np.int32(0)).compile()
        programs.read_blocks.lower(pool, ids).compile()

    def compile_groups(self, blank: Launch) -> None:
        """Compiles what launches of the same form run behind copies on their way, group of layers by group."""
        for lowered in self._grouped(blank):
            lowered.compile()

    def grouped(self, form: Form) -> bool:
        """Whether launches of this form may run behind copies on their way."""
        return self.helps or (form.chunk > 1 and self._groups > 1)

    def _grouped(self, launch: Launch) -> Iterator[jax.stages.Lowered]:
        programs, params = self.programs, self._params
        batch = jax.device_put(launch.batch, self._state.last.sharding)
        embed = programs.embed.lower(params["embed"], self._state.last, batch)
        yield embed
        x = self._replicated(embed.out_info)
        group = group_layers(params, 0, self._group_layers)
        yield programs.layers.lower(group, self._pool, x, np.int32(0), batch)
        yield programs.finish.lower(params["norm"], x, batch)
        if self.helps:
            yield from self._cut(x, batch)

    def _cut(self, x: jax.ShapeDtypeStruct, batch: Any) -> Iterator[jax.stages.Lowered]:
        """The programs of a layer with the host's help; its weights tell the products' widths."""
        programs, w, at = self.programs.cut, layer_of(self._params, 0), np.int32(0)
        width = {name: w[name].shape[-1] for name in PROJECTIONS}
        qkv, gate_up, out = (self._split(x, sum(width[n] for n in names)) for names in (*SITES[::2], "o"))
        yield programs.enter.lower(w, x, at)
        yield programs.attend.lower(w, self._pool, (qkv, qkv), at, batch)
        yield programs.middle.lower(w, x, (x, out), at)
        yield programs.hidden.lower(w, (gate_up, gate_up), at)
        yield programs.leave.lower(x, (x, out))

    def _split(self, x: jax.ShapeDtypeStruct, width: int) -> jax.ShapeDtypeStruct:
        """An array of products, split over the mesh."""
        sharding = NamedSharding(x.sharding.mesh, SPLIT)
        return jax.ShapeDtypeStruct((x.shape[0], width), x.dtype, sharding=sharding)

    def _replicated(self, out: Any) -> jax.ShapeDtypeStruct:
        """An output as the next program's input; `last` is replicated over the mesh, too."""
        return jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=self._state.last.sharding)
