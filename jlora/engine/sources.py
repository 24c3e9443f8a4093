"""Where adapters come from: their directories, and what the catalogue remembers of them. No jax.

read_adapter     everything: read, checked and packed; any thread
scan_adapter     the same without the weights, which stay on the disk; any thread
find             the adapters that a server begins with
eager            those of them to read at the start
told             how many of them are in memory then, and why no more
read_ahead       reads adapters on threads, and gives them back in order
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

from tqdm.auto import tqdm

from jlora.adapters.catalogue import Catalogue, Row
from jlora.adapters.names import at_start, check_key, check_name, removed
from jlora.adapters.packing import FORMAT, blocks_of, largest_ranks, pack
from jlora.adapters.peft import FILES, read_peft, scan_peft
from jlora.adapters.registry import Record
from jlora.config import Config
from jlora.engine.loading import check_size
from jlora.engine.records import NewAdapter
from jlora.errors import DataLoss, InvalidArgument, JloraError
from jlora.layout import PoolLayout
from jlora.memory import WAIT_S, Memory, unlimited
from jlora.model.own_chat import OwnChat
from jlora.model.spec import TARGETS, ModelSpec
from jlora.ports import Clock, Files, Stamp

log = logging.getLogger(__name__)

READING = 10  # times an adapter's blocks: the memory that reading takes; 9.3 measured


@dataclass(frozen=True, slots=True)
class Reader:
    """What reading an adapter needs beside its path.

    Attributes:
        base_names: what an adapter may call this base.
        targets: `adapters.target_modules`.
        own_chat: tells of adapters whose own tokenizer files differ from the base's.
        memory: what reading takes is promised there; wait_s: seconds that a read may wait for others' memory.
    """

    spec: ModelSpec
    layout: PoolLayout
    max_rank: int
    base_names: tuple[str, ...]
    files: Files
    clock: Clock
    targets: str = "all"
    memory: Memory = field(default_factory=unlimited)
    wait_s: float = WAIT_S
    own_chat: OwnChat | None = None

    @property
    def fits(self) -> str:
        """Equal for two readers that accept the same adapters and pack them alike."""
        layout = replaced(self.layout, blocks=0)
        return hashlib.sha256(repr((FORMAT, self.spec, layout, self.max_rank, self.targets)).encode()).hexdigest()[:16]

    def check(self, name: str) -> None:
        """Raises InvalidArgument if it is no name for an adapter."""
        if check_key(name) == self.base_names[0]:
            raise InvalidArgument(f"name = {name!r}: is the base model's own name")

    def check_ranks(self, name: str, ranks: Iterable[tuple[str, int]]) -> int:
        """The blocks that an adapter of these ranks takes. Raises InvalidArgument for a projection that is not served.

        Raises ResourceExhausted as `check_blocks` does.
        """
        sizes, targets = largest_ranks(ranks), self.targets
        if others := sorted(sizes.keys() - set(TARGETS[targets])):
            raise InvalidArgument(
                f"adapter {name}: target_modules has {', '.join(others)}: must be of {', '.join(TARGETS[targets])} "
                f"(adapters.target_modules = {targets})"
            )
        size = blocks_of(sizes, self.layout)
        self.check_blocks(name, size)
        return size

    def check_blocks(self, name: str, blocks: int) -> None:
        """Raises ResourceExhausted if the pool can never hold so many: block 0 is unused, and one is for KV."""
        check_size(name, blocks, self.layout.blocks - 2, self.layout.blocks - 1)

    def stamp(self, path: str) -> Stamp | None:
        """The identities of an adapter's two files; None if one is missing."""
        try:
            return self.files.stamp(path, FILES)
        except (OSError, ValueError):
            return None


def read_adapter(name: str, path: str, reader: Reader) -> NewAdapter:
    """Reads, checks and packs an adapter. It touches no engine, so any thread may call it.

    Raises:
        JloraError: the name is not one for an adapter, or see `read_peft` and `pack`.
        MemoryError: too little memory is left, also once other reads have ended.
    """
    reader.check(name)
    began = reader.clock()
    with ExitStack() as held:

        def check(ranks: Iterable[tuple[str, int]]) -> None:
            need = READING * reader.check_ranks(name, ranks) * reader.layout.block_bytes
            held.close()  # the files have changed, and are read again
            held.enter_context(reader.memory.promised(need, f"{name}: reading it", reader.wait_s))
            nonlocal began
            began = reader.clock()  # what it waited for is no part of what it takes

        adapter = read_peft(path, reader.spec, reader.max_rank, reader.base_names, reader.files, check)
        packed = pack(adapter, reader.layout)
    if reader.own_chat is not None:
        reader.own_chat.compare(name, path, adapter.digest)
    return NewAdapter(
        name=name,
        digest=adapter.digest,
        ranks=adapter.ranks,
        target_modules=adapter.target_modules,
        alora_invocation_tokens=adapter.alora_invocation_tokens,
        projections=packed.projections,
        data=packed.data,
        bytes=packed.data.nbytes,
        read_s=reader.clock() - began,
        path=os.path.abspath(path),
        header=adapter.header,
        stamp=adapter.stamp,
        base=adapter.base,
    )


def scan_adapter(name: str, path: str, reader: Reader) -> NewAdapter:
    """As `read_adapter`, without the weights: it has no data and no digest."""
    reader.check(name)
    scan = scan_peft(path, reader.spec, reader.max_rank, reader.files, lambda r: reader.check_ranks(name, r))
    units = reader.layout.units
    counts = {projection: -(-rank // units[projection].per_block) for projection, rank in scan.sizes.items()}
    projections = tuple(projection for projection, count in counts.items() for _ in range(count))
    return NewAdapter(
        name=name,
        digest="",
        ranks=scan.ranks,
        target_modules=scan.target_modules,
        alora_invocation_tokens=scan.alora_invocation_tokens,
        projections=projections,
        data=None,
        bytes=len(projections) * reader.layout.block_bytes,
        read_s=0.0,
        path=os.path.abspath(path),
        header=scan.header,
        stamp=scan.stamp,
        base=scan.base,
    )


def check_version(known: Record | Row | NewAdapter, digest: str, header: str) -> None:
    """Raises DataLoss if files with this digest and header are not the version that was registered."""
    if known.digest and (digest != known.digest or header != known.header):
        raise DataLoss(
            f"adapter {known.name!r}: its files have changed on the disk (sha256 {digest[:12]}…, registered as "
            f"{known.digest[:12]}…); restore them, or load it again with replace (HTTP: load_inplace)"
        )
    if header != known.header:
        raise DataLoss(f"adapter {known.name!r}: its files have changed on the disk since it was found; try again")


def pinned_as(row: Row | None, new: NewAdapter) -> NewAdapter:
    """A scanned adapter under the digest that an earlier process has pinned, if it has; raises `check_version`'s."""
    if row is None or not row.digest or row.path != new.path:
        return new
    check_version(row, row.digest, new.header)
    return replaced(new, digest=row.digest)


def find(config: Config, reader: Reader, catalogue: Catalogue, progress: bool) -> list[Row | NewAdapter]:
    """The adapters of a server that starts: as the catalogue knows them, or scanned.

    An adapter whose files the catalogue has seen as they are is not opened.

    Raises:
        JloraError: one cannot be served. With `adapters.lazy`, those of `adapters.dir` are left out instead.
    """
    rows = {row.name: row for row in catalogue.rows()}
    known_paths = [row.path for row in rows.values()]
    tolerant = config.adapters.lazy
    paths = at_start(config.adapters.paths, config.adapters.dir, reader.files, tolerant)
    if config.adapters.dir and paths.keys() <= config.adapters.paths.keys():
        log.warning("adapters.dir = %r: no subdirectory has an adapter_config.json yet", config.adapters.dir)
    found: list[Row | NewAdapter] = []
    left_out: list[str] = []
    shapes: dict[object, Any] = {}  # most adapters have the same modules and ranks
    for name in tqdm(paths, desc="adapters", disable=not progress or len(paths) < 2, leave=False):
        row = rows.pop(name, None)
        try:
            item = _known_or_scanned(check_name(name), paths[name], row, reader)
        except JloraError as e:
            if not tolerant or name in config.adapters.paths:
                raise type(e)(f"adapter {name}: {e} (from {paths[name]})") from e
            log.warning("adapter %r is left out: %s", name, e)
            left_out += [name] * (row is not None and not row.digest)
        else:
            if row is not None and row.path != os.path.abspath(paths[name]) and reader.stamp(row.path) is not None:
                log.warning("adapter %r: is served from %s, and no longer from %s", name, paths[name], row.path)
            found.append(replaced(item, ranks=shapes.setdefault(tuple(item.ranks.items()), item.ranks)))
    before = list(_loaded_before(rows.values(), reader))
    known = {item.name for item in before}
    gone = removed(os.path.abspath(config.adapters.dir), known_paths) if config.adapters.dir else set()
    left_out += [name for name, row in rows.items() if name not in known and (not row.digest or row.path in gone)]
    catalogue.remove(left_out)  # what has a digest and may come back stays pinned to it
    return found + before


def required(config: Config, reader: Reader) -> Container[str]:
    """The names of the adapters without which no server starts, as `find` has it."""
    return at_start(config.adapters.paths, "" if config.adapters.lazy else config.adapters.dir, reader.files)


def _loaded_before(rows: Iterable[Row], reader: Reader) -> Iterator[Row | NewAdapter]:
    """Adapters that an earlier process loaded at run time, and that are still there."""
    for row in rows:
        if reader.stamp(row.path) is None:
            log.warning("adapter %s is left out: its files are gone, or cannot be read", row.name)
            continue
        try:
            yield _known_or_scanned(row.name, row.path, row, reader)
        except JloraError as e:
            log.warning("adapter %s is left out: %s", row.name, e)


def _known_or_scanned(name: str, path: str, row: Row | None, reader: Reader) -> Row | NewAdapter:
    if row is None or row.path != os.path.abspath(path):
        return scan_adapter(name, path, reader)
    stamp = reader.stamp(path)
    if row.fits == reader.fits and stamp is not None and (row.digest or tuple(row.stamp) == stamp):
        reader.check_blocks(name, row.blocks)  # the pool may be smaller than the earlier process's
        return row  # with a digest, the first read compares
    new = scan_adapter(name, path, reader)
    if not row.digest:
        return new
    check_version(row, row.digest, new.header)
    return replaced(row, fits=reader.fits, blocks=new.blocks, bytes=new.bytes, stamp=new.stamp)


def held(found: Iterable[Row | NewAdapter], host_blocks: int, required: Container[str]) -> Iterator[Row | NewAdapter]:
    """Those that the host tier can hold; others are left out, as none of them is required."""
    for item in found:
        if item.blocks <= host_blocks or item.name in required:
            yield item
        else:
            log.warning(
                "adapter %r is left out: it needs %d blocks, and the host tier has %d; raise cache.host_blocks or "
                "cache.host_gib", item.name, item.blocks, host_blocks
            )  # fmt: skip


def eager(found: list[Row | NewAdapter], host_blocks: int, config: Config) -> Iterator[Row | NewAdapter]:
    """Those to read at start: all if the host tier holds them, or else as fill half of it.

    Those that are pinned or are to be merged come first, also with `adapters.lazy`, and may fill all of it.
    """
    first = {item.name for item in found if isinstance(item, Row) and item.pinned} | {config.engine.merge}
    kept = [item for item in found if item.name in first]
    others = [] if config.adapters.lazy else [item for item in found if item.name not in first]
    room = host_blocks
    for item in kept:
        if item.blocks > room:
            what = "is not pinned" if isinstance(item, Row) and item.pinned else "is not read at the start"
            why = f"it takes {item.blocks} blocks, and {room} of the host tier's {host_blocks} are free"
            log.warning("adapter %s %s: %s", item.name, what, why)
            continue
        room -= item.blocks
        yield item
    if sum(item.blocks for item in found) > host_blocks:
        room -= host_blocks - host_blocks // 2
    for item in others:
        if item.blocks > room:
            return
        room -= item.blocks
        yield item


def told(found: Sequence[Row | NewAdapter], in_memory: int, host_blocks: int, block_bytes: int, config: Config) -> str:
    """One line of where the adapters are when a server starts, and of the key that brings more into memory."""
    line, left = f"{in_memory} of {len(found)} adapters are in host memory", len(found) - in_memory
    if not left:
        return line
    line += f", and {left} stay on the disk until a request needs them"
    if config.adapters.lazy:
        return line + "; adapters.lazy=false reads them at the start"
    blocks, gib = sum(item.blocks for item in found), block_bytes / 2**30
    if blocks <= host_blocks:  # so they could not be read: the log names each
        return line
    key = "host_blocks" if config.cache.host_blocks else "host_gib"
    sizes = f"all of them take {blocks * gib:.2f} GiB, and the host tier has {host_blocks * gib:.2f} GiB"
    return line + f": {sizes}; raise cache.{key}"


def read_ahead(
    found: Iterable[Row | NewAdapter], reader: Reader, threads: Executor, most: int
) -> Iterator[tuple[Row | NewAdapter, Future[NewAdapter]]]:
    """Each adapter in turn, and what `read_adapter` has of it, while `threads` read those behind it.

    At most `most` are being read or wait for their turn: each takes several times its size in memory.
    """
    under_way: deque[tuple[Row | NewAdapter, Future[NewAdapter]]] = deque()
    for item in found:
        under_way.append((item, threads.submit(read_adapter, item.name, item.path, reader)))
        if len(under_way) == most:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()
