"""Bugs of merging, planted where it keeps what it merged."""

from __future__ import annotations

from jlora.engine.merger import Merger


def left_behind(merger: Merger) -> None:
    """One projection is not taken out."""
    merger._unmerged = lambda layer, name, w: w  # pyright: ignore[reportAttributeAccessIssue]


def merged_twice(merger: Merger) -> None:
    """One projection is merged twice."""
    real = merger._merged
    merger._merged = lambda layer, name, w: real(layer, name, real(layer, name, w))  # pyright: ignore[reportAttributeAccessIssue]


def taken_out_twice(merger: Merger) -> None:
    """One projection is taken out twice."""
    real = merger._unmerged
    merger._unmerged = lambda layer, name, w: real(layer, name, real(layer, name, w))  # pyright: ignore[reportAttributeAccessIssue]


def stale_copy(merger: Merger) -> None:
    """The factors on the host change between merge and unmerge."""
    merger._factors = {where: (a, b + 1) for where, (a, b) in merger._factors.items()}


def lost_lost(merger: Merger) -> None:
    """What rounding has lost is not put back."""
    for lost in merger._lost._kept.values():
        lost.at, lost.bits = [a[:0] for a in lost.at], [b[:0] for b in lost.bits]
