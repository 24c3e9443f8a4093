"""The weights that an adapter is merged into, and taken out of, bit by bit."""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jlora.adapters.packing import pack
from jlora.adapters.peft import read_peft
from jlora.engine.compiles import COMPILES
from jlora.engine.merger import PROMPT, Base, Merger
from jlora.engine.ports import Loss
from jlora.layout import PoolLayout
from jlora.model import checkpoint, llama, merge, sharding
from jlora.pallas.ops import GROUPS
from tests import _make, port
from tests.engine import _planted as planted


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

    def __init__(
        self, directory: Path, dtype: str, tp: int, stacked: bool, clock: Callable[[], float] = time.monotonic
    ):
        self.spec = _make.make_model(directory / "model", seed=3, dtype=dtype)
        self.mesh = sharding.make_mesh(tp)
        self.layout = PoolLayout.of(self.spec, 40, 8, tp)
        self.stacked = stacked
        self.directory = directory / "model"
        self.packed = {}
        self.read: list[tuple[int, int]] = []  # blocks and layers of the adapter
        self.targets = {"some": ("q", "v", "down", "o"), "others": ("k", "gate", "up")}
        for (name, targets), rank in zip(self.targets.items(), (6, 40), strict=True):
            path = _make.make_adapter(directory / name, self.spec, seed=rank, r=rank, targets=targets, lora_alpha=0.2)
            self.packed[name] = pack(read_peft(path, self.spec, 256, ("tiny",)), self.layout)
        self.holder = Holder(self.load())
        self.merger = Merger(Base(self.spec, self.layout, self.mesh, stacked, 64, self.load), self.holder, clock)
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
def test_the_weights_are_bit_identical_after_some_switches(
    tmp_path: Path, dtype: str, tp: int, stacked: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(merge, "PART", 500)  # every projection has parts
    switch(World(tmp_path, dtype, tp, stacked), 5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype,tp,stacked", KINDS)
def test_the_weights_are_bit_identical_after_a_thousand_switches(tmp_path: Path, dtype: str, tp: int, stacked: bool):
    switch(World(tmp_path, dtype, tp, stacked), 1000)


def switch(world: World, times: int) -> None:
    """Merges so often a random adapter, wholly or in part, and takes it out."""
    merger, before, dice = world.merger, world.bits(), random.Random(times)
    compiled = COMPILES.count
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
    assert merger.moved > 0 and not merger.reloads and COMPILES.count == compiled


def test_a_switch_is_expected_to_take_as_long_as_the_adapters_rank_and_projections_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The clock tells how often ranks were added, 32 at a time: ranks 6 and 40, of 64."""
    calls, build = 0, merge.build

    def counted(*args: Any) -> dict[str, merge.MergePrograms]:
        def of(programs: merge.MergePrograms) -> merge.MergePrograms:
            def accumulate(*factors: Any) -> Any:
                nonlocal calls
                calls += 1
                return programs.accumulate(*factors)

            return programs._replace(accumulate=accumulate)

        return {name: of(programs) for name, programs in build(*args).items()}

    monkeypatch.setattr(merge, "build", counted)
    world = World(tmp_path, "float32", 1, stacked=True, clock=lambda: float(calls))
    seen = {}
    for name in world.targets:
        seen[name] = world.merger.price(world.packed[name].projections, 0.0)
    # Projections of the groups that each has a part of, over the pieces of a layer.
    some, others = (sum(len(g) for g in GROUPS if {*g} & {*names}) / len(GROUPS) for names in world.targets.values())
    assert seen == {"some": (some, some), "others": (2 * others, 2 * others)}


def test_taking_out_is_expected_to_take_longer_the_more_was_lost(tmp_path: Path):
    merger = World(tmp_path, "float32", 1, stacked=False).merger
    seen = []
    for lost in (0.0, 0.5, 1.0):
        seen.append(merger.price(("q", "down"), lost))
    (into, out), half, whole = seen
    assert half[0] == whole[0] == into and whole[1] - half[1] == pytest.approx(half[1] - out) and half[1] > out


def test_an_audit_knows_a_delta_of_zeros_from_a_weight_that_was_not_merged(tmp_path: Path):
    """PEFT begins with a B of zeros, and an adapter may leave layers out."""
    world = World(tmp_path, "bfloat16", 1, stacked=True)
    merger, packed, before = world.merger, world.packed["some"], world.bits()
    of_v = [index for index, name in enumerate(packed.projections) if name == "v"]
    packed.data[of_v] = 0
    world.begin("some")
    for _ in range(merger.pieces):
        merger.forward()
    merger.audit()
    assert world.bits() != before
    while merger.done:
        merger.back()
    assert merger.whole() and world.bits() == before


def test_an_audit_finds_a_weight_that_was_not_merged(tmp_path: Path):
    world = World(tmp_path, "bfloat16", 1, stacked=False)
    world.begin("some")
    for _ in range(world.merger.pieces):
        world.merger.forward()
    layers, base = list(world.holder.params["layers"]), world.load()["layers"]
    layers[1] = {**layers[1], "v": base[1]["v"]}
    world.holder.params = {**world.holder.params, "layers": layers}
    with pytest.raises(AssertionError, match=r"wrong weights: \[\(1, 'v'\)\]"):
        world.merger.audit()


@pytest.mark.parametrize("stacked", [False, True])
def test_an_audit_finds_a_weight_that_was_merged_twice(tmp_path: Path, stacked: bool):
    world = World(tmp_path, "bfloat16", 1, stacked)
    merger, before = world.merger, world.bits()
    for plant in (None, planted.merged_twice):
        if plant is not None:
            plant(merger)
        world.begin("some")
        while merger.done < merger.pieces:
            merger.forward()
        bits = world.bits()
        if plant is None:
            merger.audit()
            assert world.bits() == bits
        else:
            with pytest.raises(AssertionError, match=r"wrong weights: \[\(0, 'q'\), \(0, 'v'\)"):
                merger.audit()
        while merger.done:
            merger.back()
        assert merger.whole() == (plant is None) and world.bits() == before


def test_lost_entries_travel_in_chunks_and_no_more_of_them_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(merge, "CHUNKS", (16, 4))
    cuts = partial(merge.chunks, sizes=(16, 4))
    assert list(cuts(0)) == [] and list(cuts(3)) == [(0, 4)] and list(cuts(5)) == [(0, 16)]
    assert list(cuts(36)) == [(0, 16), (16, 16), (32, 4)] and list(cuts(37)) == [(0, 16), (16, 16), (32, 16)]
    world = World(tmp_path, "bfloat16", 2, stacked=True)
    merger, before, moved = world.merger, world.bits(), world.merger.moved
    world.begin("others")
    while merger.done < merger.pieces:
        merger.forward()
    port.collect(merger)
    lost = port.lost(merger)
    most = max(len(shard) for found in lost.values() for shard in found.at)
    padded = sum(size for found in lost.values() for _, size in cuts(max(map(len, found.at))))
    assert most > 16 and merger.moved - moved == padded * 2 * 6  # of two shards, 6 bytes each
    while merger.done:
        merger.back()
    assert merger.whole() and world.bits() == before


@pytest.mark.slow
def test_a_measurement_that_is_given_up_holds_nothing(tmp_path: Path):
    world = World(tmp_path, "bfloat16", 1, stacked=True)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    world.begin("some")
    for _ in range(3):
        assert world.merger.measure() is None
    assert sum(array.nbytes for array in jax.live_arrays()) > before
    world.merger.forget()
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before


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


@pytest.mark.slow
@pytest.mark.parametrize("tp,stacked", [(1, False), (2, True)])
def test_the_error_is_that_of_the_logits(tmp_path: Path, tp: int, stacked: bool):
    world = World(tmp_path, "bfloat16", tp, stacked)
    for name, loss in losses(world).items():
        assert loss.error == pytest.approx(error_of(world, name), rel=0.02 if tp == 1 else 0.1)  # shards round, too


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_merge_loses_does_not_depend_on_the_parts_it_is_measured_in(
    tmp_path: Path, tp: int, monkeypatch: pytest.MonkeyPatch
):
    whole = losses(World(tmp_path / "whole", "bfloat16", tp, stacked=False))
    monkeypatch.setattr(merge, "PART", 500)
    for name, loss in losses(World(tmp_path / "parts", "bfloat16", tp, stacked=False)).items():
        assert loss.error == pytest.approx(whole[name].error, rel=0.02) and 0 < loss.lost == whole[name].lost


def losses(world: World) -> dict[str, Loss]:
    """What merging each adapter loses."""
    found = {}
    for name in world.packed:
        world.begin(name)
        while (loss := world.merger.measure()) is None:
            pass
        found[name] = loss
    return found


def error_of(world: World, name: str) -> float:
    """The same, of whole forward passes over weights that numpy has merged."""
    spec, targets = world.spec, world.targets[name]
    directory = world.directory.parent / name
    config = json.loads((directory / "adapter_config.json").read_text())
    found = load_file(directory / "adapter_model.safetensors")
    base = checkpoint.load_params(
        world.directory, spec, sharding.shardings(spec, sharding.make_mesh(1)), stacked=False, progress=False
    )
    base = jax.tree.map(np.asarray, base)

    def factors(
        layer: int, target: str
    ) -> tuple[np.ndarray, np.ndarray]:  # A [in, r] and B [r, out], as they are served
        prefix = f"base_model.model.model.layers.{layer}.{_make.MODULES[target]}"
        a, b = (found[f"{prefix}.lora_{part}.weight"].T for part in "AB")
        return a.astype(ml_dtypes.bfloat16), (b * (config["lora_alpha"] / config["r"])).astype(ml_dtypes.bfloat16)

    def changed(change: Callable[[np.ndarray, np.ndarray], np.ndarray], tree: Any) -> Any:
        layers = []
        for layer, w in enumerate(tree["layers"]):
            deltas = {t: np.float64(a) @ np.float64(b) for t in targets for a, b in [factors(layer, t)]}
            layers.append({**w, **{t: change(w[t], delta) for t, delta in deltas.items()}})
        return {**tree, "layers": layers}

    def adapt(carry: Any, index: Any, x: Any, products: Any) -> Any:
        layers = range(spec.layers)
        pairs = {t: [factors(layer, t) for layer in layers] for t in products if t in targets}
        stacks = {t: [jnp.stack(part)[index] for part in zip(*pair, strict=True)] for t, pair in pairs.items()}
        return {t: y + (x @ stacks[t][0]) @ stacks[t][1] if t in stacks else y for t, y in products.items()}

    tokens = np.random.default_rng(0).integers(0, spec.vocab, (1, PROMPT), dtype=np.int32)
    wide = jax.tree.map(lambda w: w.astype(np.float32), base)
    exact = llama.dense_logits(spec, changed(lambda w, d: (w + d).astype(np.float32), wide), tokens)
    merged = changed(lambda w, d: (np.float32(w) + np.float32(d)).astype(w.dtype), base)
    paths = llama.dense_logits(spec, merged, tokens), llama.dense_logits(spec, base, tokens, adapt)
    of_merged, of_unmerged = (float(np.square(np.float64(path - exact)).sum()) for path in paths)
    return (of_merged / of_unmerged) ** 0.5


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
