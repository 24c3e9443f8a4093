"""The weights that an adapter is merged into, and taken out of, bit by bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jlora.adapters.packing import pack
from jlora.adapters.peft import read_peft
from jlora.engine.merger import Base, Merger
from jlora.layout import PoolLayout
from jlora.model import checkpoint, sharding
from tests import _make, port


class Holder:
    """Weights without a runner."""

    def __init__(self, params: Any):
        self.params, self.version = params, 0

    @property
    def weights(self) -> Holder:
        return self

    def swap_weights(self, params: Any) -> None:
        self.params, self.version = params, self.version + 1


class World:
    """A tiny model on `tp` devices, and two adapters for it."""

    def __init__(self, directory: Path, dtype: str, tp: int, stacked: bool):
        self.spec = _make.make_model(directory / "model", seed=3, dtype=dtype)
        self.mesh = sharding.make_mesh(tp)
        self.layout = PoolLayout.of(self.spec, 40, 8, tp)
        self.stacked = stacked
        self.directory = directory / "model"
        self.packed = {}
        self.read: list[tuple[int, int]] = []  # blocks and layers of the adapter
        for name, rank, targets in (("some", 6, ("q", "v", "down", "o")), ("others", 40, ("k", "gate", "up"))):
            path = _make.make_adapter(directory / name, self.spec, seed=rank, r=rank, targets=targets, lora_alpha=0.2)
            self.packed[name] = pack(read_peft(path, self.spec, 256, ("tiny",)), self.layout)
        self.holder = Holder(self.load())
        self.merger = Merger(Base(self.spec, self.layout, self.mesh, stacked, self.load), self.holder)
        self.merger.prepare()

    def load(self) -> Any:
        shardings = sharding.shardings(self.spec, self.mesh)
        return checkpoint.load_params(self.directory, self.spec, shardings, stacked=self.stacked, progress=False)

    def begin(self, name: str) -> None:
        data = self.packed[name].data

        def read(blocks: Sequence[int], layers: slice) -> np.ndarray:
            self.read += [(block, layer) for block in blocks for layer in range(layers.start, layers.stop)]
            return data[blocks, layers]

        self.merger.begin(self.packed[name].projections, read)

    def bits(self) -> bytes:
        return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(self.holder.params))


KINDS = [(dtype, tp, stacked) for dtype in ("float32", "bfloat16") for tp in (1, 2) for stacked in (False, True)]


@pytest.mark.parametrize("dtype,tp,stacked", [("float32", 2, True), ("bfloat16", 1, False)])
def test_the_weights_are_bit_identical_after_some_switches(tmp_path: Path, dtype: str, tp: int, stacked: bool):
    switch(World(tmp_path, dtype, tp, stacked), 5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype,tp,stacked", KINDS)
def test_the_weights_are_bit_identical_after_a_thousand_switches(tmp_path: Path, dtype: str, tp: int, stacked: bool):
    switch(World(tmp_path, dtype, tp, stacked), 1000)


def switch(world: World, times: int) -> None:
    """Merges so often a random adapter, wholly or in part, and takes it out."""
    merger, before, dice = world.merger, world.bits(), random.Random(times)
    for _ in range(times):
        world.begin(dice.choice(("some", "others")))
        most = 0
        for _ in range(dice.randrange(1, 2 * merger.pieces)):  # any way, also back and forth
            if merger.done and dice.random() < 0.3:
                merger.back()
            elif merger.done < merger.pieces:
                merger.forward()
            most = max(most, merger.done)
        assert most and (world.bits() != before) == (merger.done > 0)
        while merger.done:
            merger.back()
        assert merger.whole() and world.bits() == before
    assert merger.moved > 0 and not merger.reloads


def test_no_step_reads_more_than_one_layer_of_an_adapter(tmp_path: Path):
    world = World(tmp_path, "float32", 1, stacked=False)
    merger = world.merger
    world.begin("some")
    assert not world.read
    steps: list[set[int]] = []  # the layers that each step has read

    def step(do: Callable[[], Any]) -> Any:
        world.read.clear()
        done = do()
        steps.append({layer for _, layer in world.read})
        return done

    while step(merger.measure) is None:
        pass
    for _ in range(merger.pieces):
        step(merger.forward)
    assert max(map(len, steps)) == 1 and set.union(*steps) == set(range(world.spec.layers))
    world.read.clear()
    while merger.done:
        merger.back()
    assert merger.whole() and not world.read and not merger.host_bytes


def test_without_memory_to_load_the_weights_anew_nobody_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World(tmp_path, "float32", 1, stacked=False)
    merger = world.merger

    def short(*_: Any) -> Any:
        raise MemoryError("planted")

    world.begin("some")
    monkeypatch.setattr(*port.merges(merger), short)
    base = port.merge_base(merger)
    monkeypatch.setattr(*base, dataclasses.replace(getattr(*base), pristine=short))
    with pytest.raises(RuntimeError, match="no memory is left to load the weights anew"):
        merger.forward()
