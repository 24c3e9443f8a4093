"""The packed form is the same in every release with the same `FORMAT`."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from jlora.adapters.adapter import Adapter
from jlora.adapters.packing import FORMAT, pack
from jlora.engine import sources
from jlora.engine.sources import Reader
from jlora.layout import PoolLayout
from jlora.ports import DiskFiles
from tests import _make

SPEC = _make.tiny_spec(layers=2)
# (FORMAT, dtype, tp) -> of the adapter below. One that has changed: raise FORMAT, so that no replica takes the form of
# another release for its own, then put the new digest here.
DIGESTS = {
    (1, "float32", 1): "99a4c6c25cf0dd35",
    (1, "bfloat16", 2): "f26190d75cf4500f",
}


def adapter() -> Adapter:
    """Three ranks of q in one layer, two in the other, and one of down: every weight is another number."""
    ranks, weights, first = {(0, "q"): 3, (1, "q"): 2, (1, "down"): 1}, {}, 1
    for (layer, name), rank in ranks.items():
        halves = []
        for width in SPEC.projection_shapes[name]:
            halves.append(np.arange(first, first + rank * width, dtype=np.float32).reshape(rank, width) / 4096)
            first += rank * width
        weights[layer, name] = tuple(halves)
    return Adapter("d", 3, {}, ("q", "down"), weights)


@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 2)])
def test_a_packed_adapter_is_what_its_format_says(dtype: str, tp: int):
    spec = _make.tiny_spec(layers=2, dtype=dtype)
    packed = pack(adapter(), PoolLayout.of(spec, 8, 16, tp))
    found = hashlib.sha256(packed.data.tobytes() + repr((packed.data.shape, packed.projections)).encode()).hexdigest()
    assert found[:16] == DIGESTS[FORMAT, dtype, tp]


def test_replicas_of_two_releases_pack_alike_and_of_two_formats_do_not(monkeypatch: pytest.MonkeyPatch):
    reader = Reader(SPEC, PoolLayout.of(SPEC, 8, 16), 64, ("base",), DiskFiles(), lambda: 0.0)
    before = reader.fits
    monkeypatch.setattr(sources, "__version__", "another", raising=False)
    assert reader.fits == before
    monkeypatch.setattr(sources, "FORMAT", FORMAT + 1)
    assert reader.fits != before
