"""Reads a PEFT adapter directory, exactly or not at all.

    adapter = read_peft("adapters/sql", spec, max_rank=64)

Both files are read once into memory. The digest, the checks and the weights come from these bytes,
so a file that is replaced meanwhile cannot mix two versions. The format has no checksum: a flipped
bit that leaves a finite number goes unnoticed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

from jlora.adapters import peft_config
from jlora.adapters.adapter import Adapter
from jlora.errors import DataLoss, InvalidArgument, NotFound
from jlora.model.hf_names import MODULES
from jlora.model.spec import ModelSpec
from jlora.ports import DiskFiles, Files

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
# Older files have the adapter's name before ".weight".
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")
_CONFIG_LIMIT = 16 << 20  # bytes; PEFT writes a few thousand
_SLACK = 64 << 20  # extra bytes of a weight file to read, so that an error can name the unexpected tensor

Tensors = Mapping[str, np.ndarray]


def read_peft(
    path: str | Path, spec: ModelSpec, max_rank: int, base_names: Collection[str] = (), files: Files | None = None
) -> Adapter:
    """Reads and checks the adapter in directory `path` for the base model `spec`.

    Args:
        max_rank: largest rank of a module (`adapters.max_rank`).
        base_names: names of the served base. Logs a warning if the adapter names another base.
    Raises:
        NotFound: the directory or one of its two files is missing.
        InvalidArgument: an option is not supported, or the tensors do not fit the options or the base.
        DataLoss: a file is damaged, or a weight is not finite.
    """
    label = os.path.basename(os.path.abspath(path))
    directory, files = str(path), files or DiskFiles()
    _refuse_pickles(files, directory, label)
    config_bytes = _read(files, directory, f"{label}/{CONFIG}", _CONFIG_LIMIT)
    config = peft_config.parse(config_bytes, spec, f"{label}/{CONFIG}")
    modules = peft_config.target_modules(config, spec, f"{label}/{CONFIG}")
    for module in modules:
        if config.rank(module) > max_rank:
            raise InvalidArgument(
                f"{label}/{CONFIG}: r = {config.rank(module)} for {module}: "
                f"must be at most {max_rank} (adapters.max_rank)"
            )
    data = _read(files, directory, f"{label}/{WEIGHTS}", _expected_bytes(config, modules, spec) + _SLACK)
    tensors = _tensors(data, f"{label}/{WEIGHTS}")
    weights = _weights(tensors, config, modules, spec, f"{label}/{WEIGHTS}")
    _warn_of_another_base(config.base, base_names, label)
    ranks = {module.removeprefix("model."): config.rank(module) for module in modules}
    present = {projection for _, projection in weights}
    return Adapter(
        digest=_digest(config_bytes, data),
        rank=max(ranks.values()),
        ranks=ranks,
        target_modules=tuple(p for p in MODULES if p in present),
        weights=weights,
        alora_invocation_tokens=config.alora_invocation_tokens,
    )


def _refuse_pickles(files: Files, directory: str, label: str) -> None:
    """Refuses pickled weights, which could run code, even beside a safetensors file."""
    try:
        names = files.names(directory)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise NotFound(f"adapter directory {label!r}: {getattr(e, 'strerror', None) or 'not a path'}") from e
    pickles = [n for n in names if n.endswith(PICKLES) and (n.startswith("adapter_model") or WEIGHTS not in names)]
    if pickles:
        raise InvalidArgument(
            f"{label}/{pickles[0]}: pickled weights are not opened; write {WEIGHTS} "
            "with peft's save_pretrained(..., safe_serialization=True) and remove the pickle"
        )


def _read(files: Files, directory: str, where: str, limit: int) -> bytes:
    label, name = os.path.split(where)
    path = os.path.join(directory, name)
    try:
        size = files.size(path)
        if size is None:
            raise NotFound(f"adapter directory {label!r}: {name} is missing")
        if size > limit:
            raise InvalidArgument(f"{where}: {size} bytes: must be at most {limit} for this adapter")
        return files.read(path, size)
    except OSError as e:
        raise NotFound(f"{where}: {e.strerror}") from e


def _expected_bytes(config: peft_config.LoraConfig, modules: Mapping[str, tuple[int, str]], spec: ModelSpec) -> int:
    """Bytes of the weights in float64, the widest dtype."""
    shapes = spec.projection_shapes
    return 8 * sum(config.rank(module) * sum(shapes[projection]) for module, (_, projection) in modules.items())


def _tensors(data: bytes, where: str) -> Tensors:
    try:
        entries = deserialize(data)
    except SafetensorError as e:
        raise DataLoss(f"{where}: damaged ({e})") from e
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise InvalidArgument(f"{where}: tensor {name!r} is {entry['dtype']}: must be one of {', '.join(_DTYPES)}")
        tensors[name] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def _weights(
    tensors: Tensors,
    config: peft_config.LoraConfig,
    modules: Mapping[str, tuple[int, str]],
    spec: ModelSpec,
    where: str,
) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    halves = _halves(tensors, modules, where)
    weights = {}
    for module, (layer, projection) in modules.items():
        rank = config.rank(module)
        width_in, width_out = spec.projection_shapes[projection]
        a = _matrix(tensors[halves[module, "A"]], (rank, width_in), f"{where}: {module}.lora_A")
        b = _matrix(tensors[halves[module, "B"]], (width_out, rank), f"{where}: {module}.lora_B")
        with np.errstate(over="ignore"):  # the check below names the module
            b = np.ascontiguousarray(b.T) * np.float32(config.scale(module))
        if not np.isfinite(b).all():
            raise InvalidArgument(f"{where}: {module}: the weights times lora_alpha overflow float32")
        weights[layer, projection] = (a, b)
    return weights


def _halves(tensors: Tensors, modules: Mapping[str, tuple[int, str]], where: str) -> dict[tuple[str, str], str]:
    """(module, "A" or "B") -> tensor's name; every tensor must be such a half, and none may be missing."""
    halves: dict[tuple[str, str], str] = {}
    for name in sorted(tensors):
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] not in modules:
            raise InvalidArgument(
                f"{where}: tensor {name!r} is not the lora_A or lora_B of a module that "
                "target_modules selects in this base model"
            )
        other = halves.setdefault((match["module"], match["half"]), name)
        if other != name:
            raise InvalidArgument(f"{where}: tensors {other!r} and {name!r} are the same matrix of one module")
    for module, half in itertools.product(modules, "AB"):
        if (module, half) not in halves:
            raise InvalidArgument(f"{where}: tensor base_model.model.{module}.lora_{half}.weight is missing")
    return halves


def _matrix(tensor: np.ndarray, shape: tuple[int, int], where: str) -> np.ndarray:
    if tensor.shape != shape:
        raise InvalidArgument(
            f"{where}: shape {list(tensor.shape)}: must be {list(shape)} for this base model and rank"
        )
    with np.errstate(over="ignore"):  # a float64 may overflow float32: the check below reports it
        matrix = tensor.astype(np.float32)
    if not np.isfinite(matrix).all():
        raise DataLoss(f"{where}: contains NaN or infinity")
    return matrix


def _digest(config: bytes, weights: bytes) -> str:
    """sha256 of both files; the length prefix separates them."""
    content = hashlib.sha256(len(config).to_bytes(8, "little"))
    content.update(config)
    content.update(weights)
    return content.hexdigest()


def _warn_of_another_base(base: str, base_names: Collection[str], label: str) -> None:
    known = {_last_part(name).lower() for name in base_names if name}
    if base and known and _last_part(base).lower() not in known:
        logger.warning(
            "adapter %s was trained on %r, but the served base is %s: shapes fit, answers may be wrong",
            label, _last_part(base), " or ".join(sorted(known)),
        )  # fmt: skip


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]
