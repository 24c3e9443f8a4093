"""The packed form is the same in every release with the same `FORMAT`."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest

from jlora.adapters.adapter import Adapter
from jlora.adapters.packing import FORMAT, NUMPY_DTYPES, all_finite, pack
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


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_a_value_that_is_not_finite_is_found_whatever_its_bits(kind: str):
    dtype = NUMPY_DTYPES.get(kind, np.dtype(np.float16))
    high = np.arange(1 << 16, dtype=np.uint16)  # sign, exponent, and more
    low = (np.uint32(0), np.uint32(1), np.uint32(0xFFFF))
    each = [high] if dtype.itemsize == 2 else [high.astype(np.uint32) << 16 | bits for bits in low]
    for values in (bits.view(dtype) for bits in each):
        with np.errstate(invalid="ignore"):  # NumPy may say so of a NaN
            finite = np.isfinite(values)
        assert all_finite(values[finite])
        assert not any(all_finite(values[at : at + 1]) for at in np.flatnonzero(~finite))
    assert all_finite(values[:0])


def test_the_check_of_weights_copies_none_of_them():
    """Through float32 it took 10 to 20 times as long, most of it for new pages of memory."""
    data = np.ones((4, 1 << 18), NUMPY_DTYPES["bfloat16"])
    tracemalloc.start()
    try:
        assert all_finite(data)
        assert tracemalloc.get_traced_memory()[1] < data.nbytes / 8
    finally:
        tracemalloc.stop()
