"""`jlora top [ADDRESS]`: a running server at a glance, live in the terminal.

Without a terminal, or with --once, it prints one picture.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

import grpc
from rich import box
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jlora.serve import client
from jlora.serve.client import Login, connect
from jlora.serve.flags import Parser
from jlora.serve.pages import walk
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

TIMEOUT_S = 5.0
FILE_COLUMNS, FILE_ROWS = 1000, 1000  # where no terminal limits them
NAME_COLUMNS = 32  # of a name, where a terminal does
BAR_COLUMNS = 20
TIERS = ("HBM", "LOADING", "HOST", "DISK")  # of an adapter's weights

# What a tier's blocks hold: field, character and color of the bar, heading.
CLASSES = (
    ("adapters", "#", "cyan", "# adapters"),
    ("running_kv", "=", "green", "= running"),
    ("history_kv", "-", "yellow", "- history"),
    ("free", ".", "dim", ". free"),
)


def main(argv: Sequence[str]) -> int:
    """Watches until q or Ctrl-C; returns the exit code. Raises JloraError if no server answers."""
    parser = Parser("jlora top", "Shows a running server: tiers by class, adapters by tier, requests. q quits.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", metavar="ADDRESS", help="HOST:PORT")
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two (default 1)")
    client.add_flags(parser.add_argument)
    args = parser.parse(argv)
    if not 0.1 <= args.interval <= 3600:
        parser.error(f"--interval {args.interval}: must be in [0.1, 3600] seconds")
    tty = sys.stdout.isatty()
    console = Console(highlight=False, width=None if tty else FILE_COLUMNS)
    with connect(args.address, Login.of(args)) as channel, contextlib.suppress(KeyboardInterrupt):
        if args.once or console.is_dumb_terminal or not (tty and sys.stdin.isatty()):
            limits = (console.height, NAME_COLUMNS) if tty else (FILE_ROWS, None)
            console.print(picture(Reading.take(channel), None, *limits))
        else:
            watch(channel, args.interval, console)
    return 0


@dataclass(frozen=True, slots=True)
class Reading:
    """The server's state at one moment; `at` is `time.monotonic()` seconds."""

    info: pb.ServerInfo
    cache: pb.CacheState
    adapters: Sequence[pb.AdapterInfo]
    at: float

    @classmethod
    def take(cls, channel: grpc.Channel) -> Reading:
        control = rpc.ControlStub(channel)
        return cls(
            control.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S),
            control.GetCacheState(pb.GetCacheStateRequest(with_kv=True), timeout=TIMEOUT_S),
            tuple(walk(rpc.AdaptersStub(channel), TIMEOUT_S)),
            time.monotonic(),
        )


def watch(channel: grpc.Channel, interval_s: float, console: Console) -> None:
    """Draws on a screen of its own until q is pressed."""
    before: Reading | None = None
    with keys(sys.stdin) as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = Reading.take(channel)
            live.update(picture(now, before, console.height), refresh=True)
            before = now
            if pressed(interval_s) in ("q", "Q"):
                return


@contextlib.contextmanager
def keys(source: TextIO) -> Iterator[Callable[[float], str]]:
    """Single key presses: the yielded function waits that many seconds for one, and returns "" if none came."""
    import termios  # exists only where there are such terminals
    import tty

    def pressed(seconds: float) -> str:
        """Reads past the buffer of `source`, which `select` does not see. The end of input counts as q."""
        if not select.select([source], [], [], seconds)[0]:
            return ""
        return os.read(source.fileno(), 1).decode(errors="replace") or "q"

    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        yield pressed
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)


def picture(now: Reading, before: Reading | None, rows: int, name_columns: int | None = NAME_COLUMNS) -> RenderableType:
    """The whole picture, cut to fit `rows`, and names to `name_columns`; None shows all of a name.

    Without an earlier reading, rates are means since the server started.
    """
    info = now.info
    head = f"jlora {info.version}  {info.model}  {info.platform} x{info.tp}, {info.dtype}  policy {now.cache.policy}"
    title = Text(f"{head}  up {_age(info.uptime_s)}", style="bold", no_wrap=True)
    title.append("  DRAINING" if info.draining else "", style="red")
    tiers = _table("tier", "", "blocks", *(heading for *_, heading in CLASSES))
    for name, tier in (("HBM", now.cache.hbm), ("host", now.cache.host)):
        counts = [str(getattr(tier, field)) for field, *_ in CLASSES]
        tiers.add_row(name, bar(tier, BAR_COLUMNS), str(tier.total), *counts)
    members = (members_table(info.replicas, name_columns), "") if info.replicas else ()
    merging = bool(info.merge.switches) + bool(info.merge.alpha)
    left = max(1, rows - 21 - merging - (len(info.replicas) + 3 if members else 0))
    return Group(title, "", _numbers(now, before), "", *members, tiers, "", *_adapters(now, left, name_columns))


def members_table(replicas: Sequence[pb.ReplicaStatus], name_columns: int | None = NAME_COLUMNS) -> Table:
    """The replicas behind a router, a row each."""
    headings = ("requests", "running", "waiting", "adapters", "free blocks", "blocks", "step")
    table = _table("replica", "address", "health", *headings, widest=name_columns)
    for r in replicas:
        counts = (r.sent, r.running, r.waiting, r.adapters, r.free_blocks, r.blocks)
        health = Text(r.health, style="" if r.health == "up" else "red")
        table.add_row(Text(r.name), Text(r.address), health, *map(str, counts), _seconds(r.step_s))
    return table


def _table(*headings: str, widest: int | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True, max_width=widest)
    return table


def _numbers(now: Reading, before: Reading | None) -> Table:
    info, c = now.info, now.cache
    came, went = _rates(now, before)
    since = "" if before else " (mean since start)"
    device = c.kv_hit_tokens - c.kv_host_hit_tokens
    kv = f"device {_share(device, c.kv_lookup_tokens)}, host {_share(c.kv_host_hit_tokens, c.kv_lookup_tokens)}"
    if c.kv_base_hit_tokens:
        kv += f", base's {_share(c.kv_base_hit_tokens, c.kv_lookup_tokens)}"  # found by activated LoRAs
    lost = f"{c.blocks_lost} blocks lost  {c.recomputed_tokens} tokens recomputed  invalid KV {c.invalid_kv}"
    cold = f"{c.cold_waited} waited, {c.cold_streamed} streamed, {c.cold_helped} helped by the host"
    if c.cold_predicted:
        took, wanted, error = (s / c.cold_predicted for s in (c.cold_measured_s, c.cold_predicted_s, c.cold_error_s))
        cold += f"  first token {_seconds(took)}, predicted {_seconds(wanted)}, mean error {_seconds(error)}"
    mean = f" ({_seconds(c.adapter_read_s / c.adapter_reads)} each)" if c.adapter_reads else ""
    read = f"{c.adapters_reading} on their way  {c.adapter_reads} adapters read{mean}"
    gaps = f"event loop {_seconds(info.longest_loop_gap_s)}  engine {_seconds(info.longest_engine_gap_s)}"
    compiling = f"  {info.programs_left} programs left to compile" if info.programs_left else ""
    merged = ()
    if info.merge.switches:
        now_merged = f"{info.merge.adapter} {100 * info.merge.share:.0f} %" if info.merge.adapter else "nothing"
        said = f"{now_merged}  {info.merge.switches} switches  {info.merge.reloads} weight reloads"
        said += f"  {decimal(info.merge.host_bytes)} of host memory" if info.merge.adapter else ""
        merged = (("merged", said),)
    if info.merge.alpha:
        cost = info.merge.adapters_cost
        said = f"adapters cost {100 * cost:.1f} % of a step" if cost else "no cost of adapters measured"
        said += f"  in above {info.merge.alpha:.2f}, out below {info.merge.beta:.2f} of the batch"
        merged += (("merging", said),)
    grid = Table.grid("name", "value", padding=(0, 2))
    for row in (
        *merged,
        ("requests", f"{info.running} running  {info.waiting} waiting{compiling}"),
        ("TTFT", _spread(info, "ttft", info.recent_requests)),
        ("TPOT", _spread(info, "tpot", info.recent_tpot_requests)),
        ("gaps", f"{gaps} (longest in the last minute)"),
        ("hits", f"adapters {_share(c.adapter_hits, c.adapter_lookups)}  KV tokens {kv}"),
        ("swapped", f"in {decimal(came)}/s  out {decimal(went)}/s{since}  in flight {c.in_flight} blocks"),
        ("evictions", f"{c.clean_evictions} clean  {lost}"),
        ("cold starts", cold),
        ("disk", f"{read}  {c.adapter_reads_failed} reads failed  {c.adapters_dropped} adapters dropped"),
    ):
        grid.add_row(*(Text(cell, no_wrap=True) for cell in row))
    return grid


def _spread(info: pb.ServerInfo, name: str, count: int) -> str:
    """The distribution of the last minute, as the dashboard shows it."""
    if not count:
        return "no request ended in the last minute"
    values = (f"{kind} {_seconds(getattr(info, f'recent_{name}_{kind}_s'))}" for kind in ("p50", "p90", "p99", "mean"))
    return f"{'  '.join(values)} ({count} in the last minute)"


def _rates(now: Reading, before: Reading | None) -> tuple[int, int]:
    """Bytes per second into and out of the device."""
    came, went, seconds = now.cache.bytes_swapped_in, now.cache.bytes_swapped_out, now.info.uptime_s
    if before is not None and came >= before.cache.bytes_swapped_in:  # otherwise the server has been restarted
        came, went = came - before.cache.bytes_swapped_in, went - before.cache.bytes_swapped_out
        seconds = now.at - before.at
    return round(came / max(seconds, 1e-3)), round(went / max(seconds, 1e-3))


def bar(tier: pb.TierState, width: int) -> Text:
    """`width` characters in the proportions of the classes; a class with any block has at least one."""
    counts = [getattr(tier, field) for field, *_ in CLASSES]
    total = sum(counts)
    cells = [max(1, round(width * count / total)) if count else 0 for count in counts]
    while total and (excess := sum(cells) - width) != 0:  # rounding: the largest part gives or takes
        cells[cells.index(max(cells))] -= 1 if excess > 0 else -1
    return Text.assemble(*((char * count, style) for (_, char, style, _), count in zip(CLASSES, cells, strict=True)))


def _adapters(now: Reading, most: int, name_columns: int | None) -> list[RenderableType]:
    adapters, kv = now.adapters, now.cache.kv
    tiers = Counter(pb.AdapterInfo.Tier.Name(a.tier) for a in adapters)
    parts: list[RenderableType] = [f"{len(adapters)} adapters: " + ", ".join(f"{tiers[tier]} {tier}" for tier in TIERS)]
    if not adapters:
        return parts
    headings = ("tier", "rank", "running", "waiting", "hits", "last use", "load cost", "blocks", "KV")
    table = _table("adapter", *headings, widest=name_columns)
    routed = bool(now.info.replicas)
    for a in sorted(adapters, key=_routed_order if routed else _order)[:most]:
        tier = pb.AdapterInfo.Tier.Name(a.tier) + (" pin" if a.pinned else "")
        uses = ("-", "-", "-", "-") if routed else _uses(a)
        below = str(kv.get(a.uid, 0)) if now.cache.kv_whole else f"{kv[a.uid]}+" if a.uid in kv else ""
        table.add_row(Text(a.name), tier, str(a.rank), str(a.running), *uses, str(a.blocks), below)
    parts.append(table)
    if len(adapters) > most:
        parts.append(f"and {len(adapters) - most} more")
    return parts


def _uses(a: pb.AdapterInfo) -> tuple[str, str, str, str]:
    """What only the engine of an adapter counts: a router has none of it."""
    used = _age(a.last_used_s) if a.last_used_s >= 0 else "never"
    return str(a.waiting), str(a.hits), used, _seconds(a.load_cost_s)


def _order(a: pb.AdapterInfo) -> tuple[bool, float, str]:
    return a.last_used_s < 0, a.last_used_s, a.name


def _routed_order(a: pb.AdapterInfo) -> tuple[int, int, int, str]:
    return -a.running, a.tier, -a.blocks, a.name  # tiers are numbered from the device on


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
