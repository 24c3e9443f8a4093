"""What the NVIDIA kernels issue for a shape: the floor of `counts`, and what their tiles add to it.

`moved` counts bytes that bulk copies ask for; what comes twice may come from the L2 cache the
second time. `flops` are those of whole products, padding included. Both follow the tile shapes in
`gpu_decode`, `gpu_prefill` and `gpu_lora`; tests hold them to the work lists that those follow.

    python -m jlora.pallas.gpu_counts [CHIP]      a table of the large cases on one device (tp=1)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jlora.layout import BYTES, UnitLayout
from jlora.pallas import counts
from jlora.pallas.counts import Chip, Count
from jlora.pallas.gpu_layout import UNITS, chunk_width, fit_units, lora_refusal, tile_rows

if TYPE_CHECKING:
    from jlora.pallas.cases import AttentionCase, LoraCase

TILE = 64  # tokens of context, and rows, of a product
QUERY_ROWS = 128  # (token, head) rows of a prompt tile


def attention(case: AttentionCase) -> Count:
    """Issued by the attention kernel that serves the case."""
    return _decode(case) if case.chunk == 1 else _prefill(case)


def _decode(case: AttentionCase) -> Count:
    """Whole tiles of keys and values, and the heads of a group padded to 8; 4 bytes of weight per row."""
    spec, size = case.spec, BYTES[case.spec.dtype]
    kv_heads, group = spec.kv_heads // case.tp, spec.heads // spec.kv_heads
    padded = -(-group // 8) * 8
    tiles = sum(-(-n // TILE) for n, _ in case.rows) * kv_heads
    queries = len(case.rows) * kv_heads * padded * spec.head_dim
    moved = tiles * 2 * TILE * spec.head_dim * size + 2 * queries * size
    return Count(moved, tiles * 4 * TILE * padded * spec.head_dim)


def _prefill(case: AttentionCase) -> Count:
    """Whole products of 128 rows by 64 keys; keys come again for every tile of queries."""
    spec, size = case.spec, BYTES[case.spec.dtype]
    kv_heads, group = spec.kv_heads // case.tp, spec.heads // spec.kv_heads
    tiles = sum(-(-length // TILE) for length in _tile_contexts(case, group)) * kv_heads
    tokens = len(case.rows) * case.chunk
    moved = tiles * 2 * TILE * spec.head_dim * size + 2 * tokens * kv_heads * group * spec.head_dim * size
    return Count(moved, tiles * 4 * QUERY_ROWS * TILE * spec.head_dim)


def _tile_contexts(case: AttentionCase, group: int) -> Iterator[int]:
    """Context length of every tile of queries of one KV head: `gpu_plan.prompt_tiles` in plain Python."""
    per_tile = QUERY_ROWS // case.chunk
    rows, parts = max(1, per_tile // group), -(-group // per_tile)
    held = 0
    for i, (length, _) in enumerate(case.rows):
        held += 1
        if held == rows or i + 1 not in case.continued:
            yield from [length] * parts
            held = 0


def lora(case: LoraCase, units: Sequence[UnitLayout], split: int) -> Count:
    """Issued by shrink and expand.

    A unit tile is 64 units of one projection. It is read for every tile of tokens that it meets,
    and its sums are written and read once per split.

    Args:
        units: of each projection of the group, as `gpu_layout.fit_units` lays them.
        split: input chunks that one block of shrink adds up.
    """
    size, width, tokens = BYTES[case.spec.dtype], chunk_width(units), min(UNITS, case.count)
    whole = Count(0, 0)
    for at, unit in enumerate(units):
        met = _met_tiles(case, at, unit.per_block, tokens)
        pairs, touched = sum(map(len, met)), sum(map(bool, met))
        splits = -(-unit.a // width // split)
        real = UNITS // tile_rows(unit.per_block) * unit.per_block  # rows of zeros are not read
        moved = pairs * size * (real * (unit.a + unit.b) + tokens * unit.a)
        moved += pairs * tokens * UNITS * (2 * 4 * splits + size * (1 + unit.b // width))
        moved += 2 * touched * tokens * unit.b * size
        whole += Count(moved, pairs * 2 * TILE * UNITS * (unit.a + unit.b))
    return whole


def _met_tiles(case: LoraCase, at: int, per_block: int, tokens: int) -> list[set[int]]:
    """For each tile of tokens, the unit tiles of projection `at` that some token of it uses."""
    ranks = [r if isinstance(r, int) else r[at] for r in case.ranks]
    owners = [who for who, rank in enumerate(ranks) for _ in range(-(-rank // per_block))]
    of: dict[int, set[int]] = {}
    for i, who in enumerate(owners):
        of.setdefault(who, set()).add(i * tile_rows(per_block) // UNITS)
    users = [who for who, n in case.tokens for _ in range(n)]
    tiles = [set(users[i : i + tokens]) for i in range(0, len(users), tokens)]
    return [set().union(*(of.get(who, set()) for who in tile)) for tile in tiles]


def rows(cases: list[tuple[str, Count, Count]], chip: Chip) -> list[str]:
    """A Markdown table: the floor of each case and what the kernels issue beyond it."""
    out = [
        f"| case | floor on {chip.name}, µs | bound | MiB needed | MiB issued | GFLOP needed | GFLOP issued |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, need, issued in cases:
        mib = [f"{count.bytes / 2**20:.1f}" for count in (need, issued)]
        gflop = [f"{count.flops / 1e9:.2f}" for count in (need, issued)]
        out.append(f"| {name} | {1e6 * need.floor(chip):.1f} | {need.bound(chip)} | {' | '.join(mib + gflop)} |")
    return out


def main(arguments: list[str]) -> None:
    """Prints the table for a chip of `counts.CHIPS`, H200 unless named."""
    from jlora.pallas.cases import LARGE_ATTENTION, LARGE_LORA

    chip = counts.CHIPS[arguments[0] if arguments else "H200"]
    found = [(c.name, counts.attention(c), attention(c)) for c in LARGE_ATTENTION if c.tp == 1]
    for case in (c for c in LARGE_LORA if c.tp == 1):
        layout = fit_units(case.layout)
        units = [layout.units[name] for name in case.group]
        if lora_refusal(layout, units) is None:
            found.append((case.name, counts.lora(case), lora(case, units, split=4 if case.count <= UNITS else 8)))
    print("\n".join(rows(found, chip)))


if __name__ == "__main__":
    main(sys.argv[1:])
