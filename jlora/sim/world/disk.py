"""The adapters' files: a disk that is slow, breaks off, fails, loses and changes what is on it.

A `Version` is an adapter as its files are; the disk holds one in each directory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jlora.adapters.packing import pack
from jlora.adapters.peft import FILES, read_peft
from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.ports import File, Files, Folder, Stamp
from jlora.sim.world.device import adapter_mark
from jlora.sim.world.sites import Site, Sites

SITES = {
    "disk.slow": Site("a read takes up to two seconds", 0.2),
    "disk.torn": Site("a read ends early", 0.05),
    "disk.error": Site("a read, an open or a look at a file fails with an I/O error", 0.05),
    "disk.vanished": Site("a directory is gone when it is opened", 0.08),
    "disk.changed": Site("a directory changes while it is read", 0.1),
    "disk.overwritten": Site("files are overwritten in the middle of a read, by others of their size", 0.1),
    "disk.replaced": Site("another adapter of the same size has taken a directory's place", 0.1),
    "disk.full": Site("the registry of adapters is on a full disk", 0.2),
}

READ_S = 0.002  # of a read
SPEC = ModelSpec(64, 4, 4, 2, 1, 1, 4, max_len=48, eos_ids=(2,))
BLOCK_TOKENS = 4
VERSIONS = 16  # adapters that the seeds draw from; each has one of four shapes
ACTIVATED = 8  # of them, activated LoRAs
INVOCATION = (5, 6)
HF = {"q": "q_proj", "v": "v_proj"}


@dataclass(frozen=True, slots=True)
class Version:
    """One adapter.

    Attributes:
        mark: what the device makes of its blocks; blocks: that its ranks fill.
        shape: equal for two of one size.
    """

    files: Mapping[str, bytes]
    digest: str
    mark: int
    blocks: int
    activated: bool
    shape: int


@functools.cache
def versions() -> tuple[Version, ...]:
    """Adapters of one to four blocks, all different; the last ones are activated LoRAs."""
    return tuple(_version(number) for number in range(VERSIONS))


def _version(number: int) -> Version:
    draw, activated = np.random.default_rng(number), number >= VERSIONS - ACTIVATED
    rank, targets = 1 + 2 * (number % 2), ("q", "v") if number % 4 < 2 else ("q",)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 + number,
        "target_modules": [HF[name] for name in targets],
    }
    if activated:
        config["alora_invocation_tokens"] = list(INVOCATION)
    tensors: dict[str, np.ndarray] = {}
    for layer, name in itertools.product(range(SPEC.layers), targets):
        width_in, width_out = SPEC.projection_shapes[name]
        module = f"base_model.model.model.layers.{layer}.self_attn.{HF[name]}"
        tensors[f"{module}.lora_A.weight"] = draw.standard_normal((rank, width_in), np.float32)
        tensors[f"{module}.lora_B.weight"] = draw.standard_normal((width_out, rank), np.float32)
    files: dict[str, bytes] = dict(zip(FILES, (json.dumps(config).encode(), _safetensors(tensors)), strict=True))
    disk = Disk(random.Random(0), Sites(SITES, random.Random(0)), lambda seconds: None)
    disk.sites.heal()
    disk.put("a", Version(files, "", 0, 0, activated, number % 4))
    adapter, layout = read_peft("a", SPEC, 8, (), disk), PoolLayout.of(SPEC, 2, BLOCK_TOKENS)
    mark = adapter_mark(pack(adapter, layout).data)
    blocks = sum(math.ceil(rank / layout.units[name].per_block) for name in targets)
    return Version(files, adapter.digest, mark, blocks, activated, number % 4)


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for tensor in tensors.values())


@dataclass(slots=True)
class _Stored:
    """A file on the disk. Who has it open sees what is written into it. `written` tells two writes apart."""

    data: bytes
    inode: int
    written: int

    @property
    def identity(self) -> Stamp:
        return self.inode, len(self.data), self.written


@dataclass(slots=True, eq=False)
class _Directory:
    version: Version
    files: dict[str, _Stored]

    def identity(self, names: Iterable[str]) -> Stamp:
        """Of these files together. Raises OSError."""
        return sum((self.file(name).identity for name in names), ())

    def file(self, name: str) -> _Stored:
        """Raises OSError."""
        if name not in self.files:
            raise OSError(errno.ENOENT, "No such file or directory")
        return self.files[name]


class Disk(Files):
    """Directories of adapters. `sleep` passes time, and lets others run; `struck` hears which directory was struck."""

    def __init__(
        self,
        draw: random.Random,
        sites: Sites,
        sleep: Callable[[float], None],
        struck: Callable[[str], None] = lambda path: None,
    ):
        self.sites = sites
        self._struck = struck
        self._draw = draw
        self._sleep = sleep
        self._directories: dict[str, _Directory] = {}
        self._numbers = itertools.count(1)  # of files, and of writes

    def keep(self, before: Disk) -> None:
        """It is the disk of an earlier process."""
        self._directories, self._numbers = before._directories, before._numbers

    def put(self, path: str, version: Version) -> None:
        """Another directory takes the path's place."""
        self._directories[path] = _Directory(version, self._stored(version))
        self._struck(path)

    def remove(self, path: str) -> None:
        """The directory is gone, if there was one, and all that was in it."""
        if (found := self._directories.pop(path, None)) is not None:
            found.files.clear()
        self._struck(path)

    def digest(self, path: str) -> str:
        """Of what is at the path; "" if nothing is."""
        try:
            return self.look(path).version.digest
        except OSError:
            return ""

    @contextlib.contextmanager
    def folder(self, directory: str) -> Iterator[_OpenFolder]:
        self.delay(directory)
        if self.fires("disk.vanished", directory):
            raise OSError(errno.ENOENT, "No such file or directory")
        found = self.look(directory)
        if self.fires("disk.replaced", directory):
            self.write(found, alike=True)
        yield _OpenFolder(self, directory, found)

    def stamp(self, directory: str, names: Iterable[str]) -> Stamp:
        self.delay(directory)
        return self.look(directory).identity(names)

    def look(self, path: str) -> _Directory:
        """What is at the path. Raises OSError."""
        name = path.rpartition("/")[2]
        if name not in self._directories:
            raise OSError(errno.ENOENT, "No such file or directory")
        return self._directories[name]

    def fires(self, name: str, path: str) -> bool:
        """Whether a fault strikes a read of the path."""
        fires = self.sites.fires(name)
        if fires:
            self._struck(path)
        return fires

    def write(self, directory: _Directory, alike: bool = False, over: bool | None = None) -> None:
        """Somebody writes another version into a directory.

        `alike`: one of its size. `over`: into the files that are there; None: perhaps.
        """
        now = directory.version
        others = [v for v in versions() if v.activated == now.activated and v is not now]
        like = [v for v in others if v.shape == now.shape] if alike else others
        directory.version = version = self._draw.choice(like)
        if not (self._draw.random() < 0.5 if over is None else over):
            directory.files = self._stored(version)
            return
        for name, file in directory.files.items():
            file.data, file.written = version.files[name], next(self._numbers)

    def _stored(self, version: Version) -> dict[str, _Stored]:
        """New files."""
        return {name: _Stored(data, next(self._numbers), next(self._numbers)) for name, data in version.files.items()}

    def delay(self, path: str) -> None:
        """What every access costs."""
        self._sleep(READ_S * self._draw.random() + (2 * self._draw.random() if self.sites.fires("disk.slow") else 0))
        if self.fires("disk.error", path):
            raise OSError(errno.EIO, "Input/output error")


@dataclass(slots=True)
class _OpenFolder(Folder):
    """An open directory, which stays the same one when another takes its place."""

    disk: Disk
    path: str
    directory: _Directory
    opened: dict[str, Stamp] = field(default_factory=dict)  # what each file was when it was opened

    def names(self, most: int) -> list[str]:
        return sorted(self.directory.files)[:most]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[_OpenFile]:
        self.disk.delay(self.path)
        if self.directory.files and self.disk.fires("disk.changed", self.path):
            self.disk.write(self.directory)
        found = self.directory.file(name)
        self.opened[name] = found.identity
        yield _OpenFile(len(found.data), self, found)

    def unchanged(self) -> bool:
        try:
            return self.directory.identity(self.opened) == self.stamp()
        except OSError:
            return False

    def stamp(self) -> Stamp:
        return sum(self.opened.values(), ())


@dataclass(slots=True)
class _OpenFile(File):
    size: int
    folder: _OpenFolder
    file: _Stored
    at: int = 0

    def read(self, size: int) -> np.ndarray:
        disk, path = self.folder.disk, self.folder.path
        disk.delay(path)
        if disk.fires("disk.torn", path):
            size = min(size, (self.size - self.at) // 2)
        end = self.at + size
        half = (self.at + end) // 2
        found = self.file.data[self.at : half]
        if self.folder.directory.files and disk.fires("disk.overwritten", path):
            disk.write(self.folder.directory, alike=True, over=True)
        found += self.file.data[half:end]
        self.at += len(found)
        return np.frombuffer(found, np.uint8)
