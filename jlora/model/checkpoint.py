"""Loads base weights onto the devices, tensor by tensor.

    directory = hub.resolve("org/model")        # or a local path
    spec = read_spec(directory)
    params = load_params(directory, spec, shardings, stacked=False, progress=True)

All headers are checked before the first weight is read. Then each tensor is read, sent to the
devices in its own layout, and transposed and cast there while the next one is read. Files are read,
not mapped, because mapped pages count as memory of this process.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from jlora.errors import DataLoss, FailedPrecondition, InvalidArgument, JloraError, NotFound
from jlora.model import hub, orbax
from jlora.model.config_json import CONFIG, context, read_json, spec_from_json, with_tokenizers_end
from jlora.model.hf_names import Slot, tensor_slots
from jlora.model.llama import Params, abstract
from jlora.model.place import Listed, Stacked
from jlora.model.spec import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of a file's fingerprint, from its begin to its end.
SAMPLES, SAMPLE_BYTES = 9, 4096

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COMPARED_ROWS = 1024

_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def read_spec(directory: str | Path, dtype: str = "auto", max_model_len: int = 0) -> ModelSpec:
    """The shapes and constants of a Hugging Face or converted directory.

    Args:
        dtype: "float32", "bfloat16", or "auto" for the checkpoint's own. "auto" takes bfloat16 for
            float16, and float32 if the checkpoint names none.
        max_model_len: longest context to serve, in tokens; 0 is the model's own.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise NotFound(f"model directory {directory.name!r}: no such directory")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise InvalidArgument(f"model.dtype = {dtype!r}: must be auto, float32 or bfloat16")
    if not orbax.is_converted(directory):
        return spec_from_json(directory, _model_name(directory), dtype, max_model_len)
    spec = orbax.read_spec(directory)
    length = context(spec.max_len, max_model_len)
    spec = replace(spec, dtype=spec.dtype if dtype == "auto" else dtype, max_len=length)
    return with_tokenizers_end(spec, directory)  # it may have been converted by an older version


def fingerprint(directory: Path) -> str:
    """Tells base weights apart: a sha256 of the configuration and of each file's name, size and a few samples.

    "" for a converted model, or one whose files cannot be read, of which `load_params` says more.
    """
    if orbax.is_converted(directory):
        return ""
    try:
        digest = hashlib.sha256((directory / CONFIG).read_bytes())
        for name in _weight_files(directory):
            with (directory / name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{name} {size} ".encode())
                for i in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    except (OSError, JloraError):
        return ""
    return digest.hexdigest()


def check_files(directory: str | Path, spec: ModelSpec) -> None:
    """Raises what `load_params` finds in the headers of the files, without reading a weight."""
    if not orbax.is_converted(Path(directory)):
        with ExitStack() as files:
            _open(Path(directory), spec, files)


def load_params(
    directory: str | Path, spec: ModelSpec, shardings: Params, *, stacked: bool, progress: bool = True
) -> Params:
    """The weights on their devices, in `spec.dtype`, as the pytree that `llama.forward` takes.

    Args:
        shardings: a `jax.sharding.Sharding` per weight, layers as a list (without an [L] axis).
        stacked: return `layers` as one tree of [L, ...] arrays instead of a list.
        progress: show a progress bar of bytes.
    Raises:
        NotFound: there are no weights, or a file of the index is missing.
        InvalidArgument: a tensor is missing, unexpected, or of a wrong shape or dtype; or all weights are pickled.
        DataLoss: a file is damaged, or a weight is NaN or infinite.
    """
    directory = Path(directory)
    into = (Stacked if stacked else Listed)(spec, shardings)
    if orbax.is_converted(directory):
        orbax.load_into(into, directory, spec, shardings)
    else:
        _stream_into(into, directory, spec, progress)
    into.check_finite()
    return into.params


def convert(source: str | Path, target: str | Path, progress: bool = True, max_model_len: int = 0) -> Path:
    """Writes the model `source` (directory or hub id) as an Orbax directory, which loads sharded and faster.

    Holds the whole model in host memory. The result serves contexts up to `max_model_len` tokens, 0 for the model's
    own. Raises AlreadyExists if `target` is not empty, FailedPrecondition if it cannot be written, else as
    `load_params`.
    """
    source = hub.resolve(source)
    spec = read_spec(source, max_model_len=max_model_len)
    needed = sum(leaf.size for leaf in jax.tree.leaves(abstract(spec)[0])) * np.dtype(spec.dtype).itemsize
    orbax.make_target(Path(target), needed)  # before the weights: they take minutes
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # this process has no CPU backend
        device = jax.local_devices()[0]
    shardings = jax.tree.map(lambda _: SingleDeviceSharding(device), abstract(spec)[0])
    params = load_params(source, spec, shardings, stacked=False, progress=progress)
    try:
        orbax.save(source, Path(target), spec, params)
    except (OSError, ValueError) as e:  # ValueError: tensorstore's, of a full disk too
        orbax.clear(Path(target))
        reason = getattr(e, "strerror", None) or str(e).rpartition(": ")[2].partition(" [")[0]
        raise FailedPrecondition(f"target {str(target)!r}: cannot be written ({reason})") from e
    return Path(target)


def _model_name(directory: Path) -> str:
    """The directory's name, or the hub id of a snapshot."""
    directory = directory.resolve()
    if directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--"):
        return directory.parent.parent.name.removeprefix("models--").replace("--", "/")
    return directory.name


class _Tensor(NamedTuple):
    name: str
    slot: Slot
    nbytes: int
    file: str
    handle: Any

    def read(self) -> Any:
        with self._named():
            return self.handle.get_tensor(self.name)

    def read_rows(self, begin: int, end: int) -> np.ndarray:
        with self._named():
            return np.ascontiguousarray(self.handle.get_slice(self.name)[begin : min(end, self.slot.shape[0])])

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as e:
            raise DataLoss(f"{self.file}: tensor {self.name!r} cannot be read ({e})") from e


class _Opened(NamedTuple):
    tensors: list[_Tensor]
    tied_head: _Tensor | None  # a second copy of the embedding, which is compared with it


def _stream_into(into: Listed, directory: Path, spec: ModelSpec, progress: bool) -> None:
    with ExitStack() as files:
        tensors, tied_head = _open(directory, spec, files)
        if tied_head is not None:
            _check_tied(spec, tied_head, next(tensor for tensor in tensors if tensor.slot == tied_head.slot))
        total = sum(tensor.nbytes for tensor in tensors)
        with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar:
            for tensor in tensors:
                into.put(tensor.name, tensor.slot, tensor.read())
                bar.update(tensor.nbytes)


def _open(directory: Path, spec: ModelSpec, files: ExitStack) -> _Opened:
    slots = tensor_slots(spec)
    if spec.tied:
        slots = {**slots, HEAD: slots[EMBEDDING]}
    found: dict[str, _Tensor] = {}
    for file in _weight_files(directory):
        try:
            handle = files.enter_context(safe_open(directory / file, framework="numpy", backend="pread"))
        except (SafetensorError, OSError) as e:
            if not (directory / file).is_file():
                raise NotFound(f"model directory {directory.name!r}: {INDEX} names {file}, which is missing") from e
            raise DataLoss(f"{file}: damaged ({e})") from e
        for name in handle.offset_keys():
            if name in found:
                raise InvalidArgument(f"{file}: tensor {name!r} is also in {found[name].file}")
            if not _ROTARY.fullmatch(name):  # a constant of old checkpoints
                found[name] = _checked(name, slots, file, handle)
    tied_head = found.pop(HEAD, None) if spec.tied else None
    missing = [name for name in slots if name not in found and not (spec.tied and name == HEAD)]
    if missing:
        raise InvalidArgument(f"model directory {directory.name!r}: tensor {missing[0]!r} is missing from the weights")
    # The head and the embedding first: a weight is on its device twice while it is placed, and these are large.
    return _Opened(sorted(found.values(), key=lambda tensor: tensor.slot.layer is not None), tied_head)


def _check_tied(spec: ModelSpec, head: _Tensor, embedding: _Tensor) -> None:
    """Raises InvalidArgument if a head of its own would be lost: transformers 5 keeps it, and 4 drops it."""
    for i in range(0, head.slot.shape[0], COMPARED_ROWS):
        rows = (tensor.read_rows(i, i + COMPARED_ROWS) for tensor in (head, embedding))
        one, other = (part.astype(spec.dtype) for part in rows)  # as they would be served
        if one.tobytes() != other.tobytes():
            raise InvalidArgument(
                f"{head.file}: {HEAD} differs from {EMBEDDING}, and {CONFIG} has tie_word_embeddings = true: "
                f"set it to false, or remove {HEAD}"
            )


def _weight_files(directory: Path) -> list[str]:
    if (directory / SINGLE).is_file():
        return [SINGLE]
    if (directory / INDEX).is_file():
        places = read_json(directory / INDEX).get("weight_map")
        names = set(map(str, places.values())) if isinstance(places, dict) else {""}
        if not all(name.endswith(".safetensors") and os.path.basename(name) == name for name in names):
            raise InvalidArgument(f"{INDEX}: weight_map must map each tensor to a safetensors file beside it")
        return sorted(names)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise InvalidArgument(
            f"model directory {directory.name!r} has {pickles[0]} and no {SINGLE}: pickled weights are not opened; "
            "save the model again with transformers' save_pretrained"
        )
    raise NotFound(f"model directory {directory.name!r} has neither {SINGLE} nor {INDEX}")


def _checked(name: str, slots: Mapping[str, Slot], file: str, handle: Any) -> _Tensor:
    part = handle.get_slice(name)
    shape, dtype = list(part.get_shape()), part.get_dtype()
    if name not in slots:
        raise InvalidArgument(f"{file}: tensor {name!r} {shape} is not part of this model")
    expected = list(slots[name].shape)
    if shape != expected:
        raise InvalidArgument(f"{file}: tensor {name!r}: shape {shape}: must be {expected} by {CONFIG}")
    if dtype not in _BYTES:
        raise InvalidArgument(f"{file}: tensor {name!r} is {dtype}: must be one of {', '.join(_BYTES)}")
    return _Tensor(name, slots[name], math.prod(shape) * _BYTES[dtype], file, handle)
