"""Reads a safetensors file whose tensors are known beforehand.

    8 bytes          length n of the header
    n bytes          JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    the rest         the tensors, side by side

The safetensors package reads a header of any size and copies every tensor while it holds Python's lock.
Here the caller says how long the header may be and checks names and shapes before any data is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from jlora.errors import DataLoss, InvalidArgument
from jlora.ports import File

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}  # bytes of the dtypes that adapters have


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor's line in the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(file: File, most: int, where: str) -> tuple[bytes, dict[str, Entry]]:
    """The file's bytes up to its data, and its tensors.

    Raises:
        InvalidArgument: the header is longer than `most` bytes. It is not read.
        DataLoss: the header is damaged.
    """
    prefix = file.read(8).tobytes()
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > file.size - 8:
        raise _damaged(where, f"{file.size} bytes, too few for a header of {length}")
    if length > most:
        raise InvalidArgument(f"{where}: a header of {length} bytes: must be at most {most} for this adapter")
    header = file.read(length).tobytes()
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if "__metadata__" in entries:
            msgspec.json.decode(entries.pop("__metadata__"), type=dict[str, str])
        return prefix + header, {name: _ENTRY.decode(entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as e:
        raise _damaged(where, f"its header is not one of safetensors: {str(e)[:100]}") from e


def check_extents(file: File, header: bytes, entries: Mapping[str, Entry], where: str) -> None:
    """Raises DataLoss unless the tensors fill the file behind its header without gaps and overlaps.

    The caller has checked dtypes and shapes.
    """
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        begin, end = end, end + math.prod(entry.shape) * WIDTHS[entry.dtype]
        if entry.data_offsets != (begin, end):
            raise _damaged(where, f"data_offsets {list(entry.data_offsets)}: must be {[begin, end]}")
    if file.size != len(header) + end:
        raise _damaged(where, f"{file.size} bytes, and its header describes {len(header) + end}")


def read_data(file: File, header: bytes, where: str) -> np.ndarray:
    """The data behind the header as uint8. Raises DataLoss if the file ends before."""
    size = file.size - len(header)
    data = file.read(size)
    if len(data) < size:
        raise _damaged(where, f"{len(header) + len(data)} bytes, and its header describes {file.size}")
    return data


def to_float32(data: np.ndarray, entry: Entry) -> np.ndarray:
    """A tensor of the data in float32; a view where it is. Casts by numpy, which gives Python's lock back meanwhile."""
    raw = data[slice(*entry.data_offsets)]
    if entry.dtype == "BF16":  # the upper half of a float32
        matrix = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # a float64 may overflow: who checks the values reports it
            matrix = raw.view(f"<f{WIDTHS[entry.dtype]}").astype(np.float32, copy=False)
    return matrix.reshape(entry.shape)


def _damaged(where: str, why: str) -> DataLoss:
    return DataLoss(f"{where}: damaged ({why})")


_ENTRY = msgspec.json.Decoder(Entry)
