"""Reads a PEFT adapter directory, exactly or not at all.

    adapter = read_peft("adapters/sql", spec, max_rank=64)
    scan = scan_peft("adapters/sql", spec, max_rank=64)         # the same checks but those of the weights

The directory is opened once, so another that takes its place is not mixed with it. Files that change
while they are read are read again. The format has no checksum: a flipped bit that leaves a finite number
goes unnoticed. Anybody may have written the files, so what is read and parsed is bounded beforehand.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jlora.adapters import peft_config, tensor_file
from jlora.adapters.adapter import Adapter, Scan
from jlora.adapters.packing import largest_ranks
from jlora.adapters.peft_config import LoraConfig, Target
from jlora.adapters.tensor_file import WIDTHS, Entry
from jlora.errors import Busy, DataLoss, InvalidArgument, JloraError, NotFound
from jlora.model.fields import short
from jlora.model.hf_names import MODULES
from jlora.model.spec import ModelSpec
from jlora.ports import DiskFiles, Files, Folder, Stamp

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

# Older files have the adapter's name before ".weight".
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")

ATTEMPTS = 3  # to read files that change
MAX_FILES = 10_000  # of the directory
MAX_NAME = 512  # characters of a tensor's name
HEADER_BYTES, HEADER_BYTES_PER_MODULE = 1 << 16, 1024  # PEFT's two entries of a module have 300 bytes

# The norms of A, of B with its scale, and their product, by which a projection multiplies at most. Trained
# adapters stay below 1e3. With 1e6 everywhere every sum of a layer stays below 1e30, so float32 and bfloat16 hold it.
MAX_GAIN = 1e6

Check = Callable[[Iterable[tuple[str, int]]], object]  # takes (projection, rank) of every module
Parse = Callable[[bytes, str], LoraConfig]  # takes what the file is called in messages, too

NOTHING = np.empty(0, np.uint8)
BROKEN = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # the disk, or the way to it
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of descriptors or memory


@dataclass(frozen=True, slots=True)
class _Content:
    """Both files of one version.

    Attributes:
        halves: (module, "A" or "B") -> where that matrix is in `data`.
        data: uint8, the weight file behind its header; empty after a scan.
        stamp: the identities of both.
    """

    config_bytes: bytes
    config: LoraConfig
    header: bytes
    halves: Mapping[tuple[str, str], Entry]
    data: np.ndarray
    stamp: Stamp

    @property
    def digest(self) -> str:
        """sha256 of both files; the length prefix separates them."""
        return self._sha256(self.data)

    @property
    def header_digest(self) -> str:
        """sha256 of both without the weights."""
        return self._sha256()

    @property
    def ranks(self) -> dict[str, int]:
        """Module -> rank."""
        return {module.removeprefix("model."): target.rank for module, target in self.config.targets.items()}

    @property
    def target_modules(self) -> tuple[str, ...]:
        present = {target.projection for target in self.config.targets.values()}
        return tuple(p for p in MODULES if p in present)

    def _sha256(self, *data: np.ndarray) -> str:
        content = hashlib.sha256(len(self.config_bytes).to_bytes(8, "little"))
        for part in (self.config_bytes, self.header, *data):
            content.update(part)
        return content.hexdigest()


def read_peft(
    path: str | Path,
    spec: ModelSpec,
    max_rank: int,
    base_names: Collection[str] = (),
    files: Files | None = None,
    check: Check | None = None,
) -> Adapter:
    """Reads and checks the adapter in directory `path` for the base model `spec`.

    Args:
        max_rank: largest rank of a module (`adapters.max_rank`).
        base_names: names of the served base. Logs a warning if the adapter names another base.
        check: may refuse the adapter for the ranks of its modules, before the weights are read.
    Raises:
        NotFound: the directory or one of its two files is missing.
        InvalidArgument: an option is not supported, or the tensors do not fit the options or the base.
        DataLoss: a file is damaged, or cannot be read, or a weight is not finite, or the files change again and again.
    """
    label = os.path.basename(os.path.abspath(path))
    content = _read(files or DiskFiles(), str(path), _parser(spec, max_rank, check), spec)
    weights = _weights(content, f"{label}/{WEIGHTS}")
    _warn_of_another_base(content.config.base, base_names, label)
    return Adapter(
        digest=content.digest,
        rank=max(content.ranks.values()),
        ranks=content.ranks,
        target_modules=content.target_modules,
        weights=weights,
        alora_invocation_tokens=content.config.alora_invocation_tokens,
        header=content.header_digest,
        stamp=content.stamp,
        base=content.config.base,
    )


def scan_peft(path: str | Path, spec: ModelSpec, max_rank: int, files: Files, check: Check | None = None) -> Scan:
    """What the adapter in directory `path` is, without its weights; args and errors as of `read_peft`."""
    content = _read(files, str(path), _parser(spec, max_rank, check), spec, whole=False)
    return Scan(
        header=content.header_digest,
        stamp=content.stamp,
        base=content.config.base,
        ranks=content.ranks,
        target_modules=content.target_modules,
        alora_invocation_tokens=content.config.alora_invocation_tokens,
        sizes=largest_ranks((target.projection, target.rank) for target in content.config.targets.values()),
    )


def _parser(spec: ModelSpec, max_rank: int, check: Check | None) -> Parse:
    def parse(data: bytes, where: str) -> LoraConfig:
        config = peft_config.parse(data, spec, max_rank, where)
        if check is not None:
            check((target.projection, target.rank) for target in config.targets.values())
        return config

    return parse


def _read(files: Files, path: str, parse: Parse, spec: ModelSpec, whole: bool = True) -> _Content:
    """Both files as they were at one time; without `whole`, not the weights."""
    label = os.path.basename(os.path.abspath(path))
    for last in (*[False] * (ATTEMPTS - 1), True):
        try:
            with files.folder(path) as folder:
                try:
                    content = _read_once(folder, label, parse, spec, whole)
                except JloraError:
                    if last or folder.unchanged():
                        raise
                    continue
                if folder.unchanged():
                    return content
        except JloraError:
            raise
        except OSError as e:
            raise _unreadable(f"adapter directory {label!r}", e) from e
        except ValueError as e:  # a NUL in the path
            raise NotFound(f"adapter directory {label!r}: not a path") from e
    raise DataLoss(
        f"adapter directory {label!r}: its files change while they are read; write a new version beside it, "
        "and rename the directory when it is complete"
    )


def _read_once(folder: Folder, label: str, parse: Parse, spec: ModelSpec, whole: bool) -> _Content:
    _refuse_pickles(folder, label)
    config_bytes = _read_config(folder, label)
    config = parse(config_bytes, f"{label}/{CONFIG}")
    where = f"{label}/{WEIGHTS}"
    try:
        with folder.open(WEIGHTS) as file:
            most = HEADER_BYTES + HEADER_BYTES_PER_MODULE * len(config.targets)
            header, entries = tensor_file.read_header(file, most, where)
            halves = _halves(entries, config.targets, spec, where)
            tensor_file.check_extents(file, header, entries, where)
            data = tensor_file.read_data(file, header, where) if whole else NOTHING
    except OSError as e:
        raise _unreadable(where, e) from e
    return _Content(config_bytes, config, header, halves, data, folder.stamp())


def _unreadable(where: str, error: OSError) -> JloraError:
    """What is not there is not found; what the disk cannot give is lost, unless this process is what is short."""
    if error.errno in SHORT:
        return Busy(f"{where}: {error.strerror}; try again later")
    return (DataLoss if error.errno in BROKEN else NotFound)(f"{where}: {error.strerror}")


def _refuse_pickles(folder: Folder, label: str) -> None:
    """Refuses pickled weights, which could run code, even beside a safetensors file."""
    names = folder.names(MAX_FILES + 1)
    if len(names) > MAX_FILES:
        raise InvalidArgument(f"adapter directory {label!r}: must have at most {MAX_FILES} files")
    pickles = [n for n in names if n.endswith(PICKLES) and (n.startswith("adapter_model") or WEIGHTS not in names)]
    if pickles:
        raise InvalidArgument(
            f"{label}/{pickles[0]}: pickled weights are not opened; write {WEIGHTS} "
            "with peft's save_pretrained(..., safe_serialization=True) and remove the pickle"
        )


def _read_config(folder: Folder, label: str) -> bytes:
    try:
        with folder.open(CONFIG) as file:
            if file.size > peft_config.MAX_BYTES:
                limit = f"must be at most {peft_config.MAX_BYTES}"
                raise InvalidArgument(f"{label}/{CONFIG}: {file.size} bytes: {limit}")
            return file.read(file.size).tobytes()
    except OSError as e:
        raise _unreadable(f"{label}/{CONFIG}", e) from e


def _halves(
    entries: Mapping[str, Entry], targets: Mapping[str, Target], spec: ModelSpec, where: str
) -> dict[tuple[str, str], Entry]:
    """(module, "A" or "B") -> its entry, which has the dtype and the shape of that matrix."""
    halves = {}
    for (module, half), name in _names(entries, targets, where).items():
        entry, target = entries[name], targets[module]
        width_in, width_out = spec.projection_shapes[target.projection]
        shape = [target.rank, width_in] if half == "A" else [width_out, target.rank]
        if entry.dtype not in WIDTHS:
            known = ", ".join(WIDTHS)
            raise InvalidArgument(f"{where}: tensor {name!r} is {short(entry.dtype)}: must be one of {known}")
        if entry.shape != shape:
            must = f"must be {shape} for this base model and rank"
            raise InvalidArgument(f"{where}: {module}.lora_{half}: shape {short(entry.shape)}: {must}")
        halves[module, half] = entry
    return halves


def _names(entries: Collection[str], targets: Collection[str], where: str) -> dict[tuple[str, str], str]:
    """(module, "A" or "B") -> tensor's name; every tensor must be such a half, and none may be missing."""
    names: dict[tuple[str, str], str] = {}
    for name in sorted(entries):
        match = _TENSOR.fullmatch(name) if len(name) <= MAX_NAME else None
        if match is None or match["module"] not in targets:
            raise InvalidArgument(
                f"{where}: tensor {short(name)} is not the lora_A or lora_B of a module that "
                "target_modules selects in this base model"
            )
        other = names.setdefault((match["module"], match["half"]), name)
        if other != name:
            raise InvalidArgument(f"{where}: tensors {other!r} and {name!r} are the same matrix of one module")
    for module, half in itertools.product(targets, "AB"):
        if (module, half) not in names:
            raise InvalidArgument(f"{where}: tensor base_model.model.{module}.lora_{half}.weight is missing")
    return names


def _weights(content: _Content, where: str) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    weights = {}
    for module, target in content.config.targets.items():
        a, b = (tensor_file.to_float32(content.data, content.halves[module, half]) for half in "AB")
        norm_a, norm_b = _norm(a, f"{where}: {module}.lora_A"), _norm(b, f"{where}: {module}.lora_B")
        norm_b *= abs(target.scale)
        gain = max(norm_a, norm_b, norm_a * norm_b)
        if not gain <= MAX_GAIN:
            raise InvalidArgument(
                f"{where}: {module}: the weights times lora_alpha are too large: the norms of A and B with its scale, "
                f"and their product, reach {gain:.3g}: must be at most {MAX_GAIN:.0f}"
            )
        weights[target.layer, target.projection] = a, np.ascontiguousarray(b.T) * np.float32(target.scale)
    return weights


def _norm(matrix: np.ndarray, where: str) -> float:
    """Its Frobenius norm in float32, which may be infinite. Raises DataLoss if a value is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(matrix))
    if not math.isfinite(norm) and not np.isfinite(matrix).all():
        raise DataLoss(f"{where}: contains NaN or infinity")
    return norm


def _warn_of_another_base(base: str, base_names: Collection[str], label: str) -> None:
    known = {_last_part(name).lower() for name in base_names if name}
    if base and known and _last_part(base).lower() not in known:
        logger.warning(
            "adapter %s was trained on %r, but the served base is %s: shapes fit, answers may be wrong",
            label, _last_part(base), " or ".join(sorted(known)),
        )  # fmt: skip


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]
