"""What an engine knows of an adapter: as its files say it, as it serves it, and as the catalogue keeps it. No jax.

files ── of_files ──▶ Record ── row_of ──▶ Row of the catalogue
                         ▲                  │
                         └───── of_row ─────┘    the next start
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jlora.adapters.catalogue import Row
from jlora.adapters.registry import Record
from jlora.cache.tree import AdapterNode


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """An adapter that has been read, checked and packed.

    Attributes:
        projections: for each of its blocks, the projection whose units it holds.
        data: [n, L, B, 2K, H], what `Swapper.fill` takes.
        bytes: of `data`.
        read_s: seconds to read and pack it.
        path: the directory it was read from; "": it was made in memory.
        header, stamp, base: of its files, as of `Scan`.
    """

    name: str
    digest: str
    ranks: Mapping[str, int]
    target_modules: tuple[str, ...]
    alora_invocation_tokens: tuple[int, ...]
    projections: tuple[str, ...]
    data: Any
    bytes: int
    read_s: float
    path: str = ""
    header: str = ""
    stamp: tuple[int, ...] = ()
    base: str = ""

    @property
    def blocks(self) -> int:
        return len(self.projections)


def of_files(new: NewAdapter, node: AdapterNode, created: float) -> Record:
    """Of an adapter that was read or scanned; `created` in seconds since 1970."""
    return Record(
        name=new.name,
        digest=new.digest,
        ranks=new.ranks,
        target_modules=new.target_modules,
        alora_invocation_tokens=new.alora_invocation_tokens,
        projections=new.projections,
        bytes=new.bytes,
        node=node,
        load_cost_s=new.read_s,
        path=new.path,
        header=new.header,
        stamp=new.stamp,
        base=new.base,
        created=created,
    )


def of_row(row: Row, node: AdapterNode, used: float) -> Record:
    """Of an adapter that an earlier process has registered; `used` in seconds of the engine's clock."""
    return Record(
        name=row.name,
        digest=row.digest,
        ranks=row.ranks,
        target_modules=tuple(row.modules),
        alora_invocation_tokens=tuple(row.alora_tokens),
        projections=(),
        bytes=row.bytes,
        node=node,
        load_cost_s=0.0,
        last_used=used,
        path=row.path,
        header=row.header,
        stamp=tuple(row.stamp),
        base=row.base,
        created=row.created,
        keeps_pin=row.pinned,
    )


def row_of(record: Record, fits: str, used: float) -> Row:
    """For the catalogue; `used` in seconds since 1970."""
    return Row(
        name=record.name,
        uid=record.node.uid,
        digest=record.digest,
        header=record.header,
        base=record.base,
        fits=fits,
        ranks=record.ranks,
        modules=record.target_modules,
        bytes=record.bytes,
        blocks=record.node.size,
        path=record.path,
        stamp=record.stamp,
        pinned=record.node.pinned or record.keeps_pin,
        alora_tokens=record.alora_invocation_tokens,
        created=record.created,
        last_used=used,
    )
