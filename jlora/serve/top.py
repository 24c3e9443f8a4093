"""`jlora top [ADDRESS]`: a running server at a glance, live in the terminal.

    HBM  [########======-------------........] 700 blocks: 160 adapters, 120 running KV, ...

Reads GetServerInfo, GetCacheState and ListAdapters once per interval and draws what they say;
rates are differences of two readings. Everything that decides how it looks is in `render`, which
is text in, text out. Without a terminal, or with --once, one picture is printed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

import grpc

from jlora.serve.console import complain, connect
from jlora.serve.flags import Parser
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

TIMEOUT_S = 5.0
FILE = os.terminal_size((160, 1000))  # columns and rows where no terminal cuts
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen, no cursor; and back
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: Sequence[str]) -> int:
    """Watches until q or Ctrl-C; returns the exit code (1: no server answers)."""
    parser = Parser("jlora top", "Shows a running server: tiers by class, adapters by tier, requests. q quits.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", metavar="ADDRESS", help="HOST:PORT")
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two (default 1)")
    args = parser.parse(argv)
    if not 0.1 <= args.interval <= 3600:
        parser.error(f"--interval {args.interval}: must be in [0.1, 3600] seconds")
    try:
        with connect(args.address) as channel:
            if args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
                size = shutil.get_terminal_size(FILE) if sys.stdout.isatty() else FILE
                print("\n".join(render(Reading.take(channel), None, size)))
            else:
                with keys(sys.stdin, sys.stdout) as pressed:
                    watch(channel, args.interval, pressed)
    except grpc.RpcError as e:
        return complain("top", args.address, e)
    except KeyboardInterrupt:
        return 0
    return 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What the server said at one moment; `at` is `time.monotonic()` seconds."""

    info: pb.ServerInfo
    cache: pb.CacheState
    adapters: Sequence[pb.AdapterInfo]
    at: float

    @classmethod
    def take(cls, channel: grpc.Channel) -> Reading:
        """Three calls. Raises grpc.RpcError if the server does not answer."""
        control = rpc.ControlStub(channel)
        return cls(
            control.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S),
            control.GetCacheState(pb.GetCacheStateRequest(), timeout=TIMEOUT_S),
            rpc.AdaptersStub(channel).ListAdapters(pb.ListAdaptersRequest(), timeout=TIMEOUT_S).adapters,
            time.monotonic(),
        )


def watch(channel: grpc.Channel, interval_s: float, pressed: Callable[[float], str]) -> None:
    """Draws again and again until q is pressed; `pressed(seconds)` waits for a key, "" if none came."""
    before: Reading | None = None
    while True:
        now = Reading.take(channel)
        lines = render(now, before, shutil.get_terminal_size())
        sys.stdout.write(HOME + f"{CLEAR_LINE}\n".join(lines) + CLEAR_LINE + CLEAR_BELOW)
        sys.stdout.flush()
        before = now
        if pressed(interval_s) in ("q", "Q"):
            return


@contextlib.contextmanager
def keys(source: TextIO, out: TextIO) -> Iterator[Callable[[float], str]]:
    """A screen of its own and single key presses; the terminal is as before at the end, whatever happens."""
    import termios  # where there is a terminal of this kind
    import tty

    before = termios.tcgetattr(source)
    out.write(ENTER)
    try:
        tty.setcbreak(source)
        yield lambda seconds: _key(source, seconds)
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
        out.write(LEAVE)
        out.flush()


def _key(source: TextIO, seconds: float) -> str:
    """Past the buffer of `source`: `select` knows nothing of that. The end of input counts as q."""
    if not select.select([source], [], [], seconds)[0]:
        return ""
    return os.read(source.fileno(), 1).decode(errors="replace") or "q"


def render(now: Reading, before: Reading | None, size: tuple[int, int]) -> list[str]:
    """The picture as lines.

    Args:
        before: an earlier reading, for rates; None: rates are means since the server started.
        size: columns and rows of the screen; the table of adapters is cut to fit.
    """
    columns, rows = size
    tiers = {"HBM": now.cache.hbm, "host": now.cache.host}
    width = max(10, min(60, columns - 10 - max(len(_held(tier)) for tier in tiers.values())))
    lines = [
        _head(now.info, now.cache),
        "",
        *_numbers(now, before),
        "",
        *(_tier(name, tier, width) for name, tier in tiers.items()),
        "      # adapters  = running KV  - history KV  . free",
        "",
    ]
    lines += _adapters(now.adapters, max(1, rows - len(lines) - 3))
    return [line[:columns] for line in lines]


def _head(info: pb.ServerInfo, cache: pb.CacheState) -> str:
    kind = f"{info.platform} x{info.tp}, {info.dtype}"
    state = "  DRAINING" if info.draining else ""
    return f"jlora {info.version}  {info.model}  {kind}  policy {cache.policy}  up {_age(info.uptime_s)}{state}"


def _numbers(now: Reading, before: Reading | None) -> list[str]:
    info, c = now.info, now.cache
    device = c.kv_hit_tokens - c.kv_host_hit_tokens
    ttft = "none ended in the last minute"
    if info.recent_requests:
        mean, p99 = _seconds(info.recent_ttft_mean_s), _seconds(info.recent_ttft_p99_s)
        ttft = f"mean {mean}, p99 {p99} ({info.recent_requests} in the last minute)"
    came, went = _rates(now, before)
    since = "" if before else " (mean since start)"
    kv = f"device {_share(device, c.kv_lookup_tokens)}, host {_share(c.kv_host_hit_tokens, c.kv_lookup_tokens)}"
    if c.kv_base_hit_tokens:
        kv += f", base's {_share(c.kv_base_hit_tokens, c.kv_lookup_tokens)}"  # found by activated LoRAs
    return [
        f"requests   {info.running} running  {info.waiting} waiting",
        f"TTFT       {ttft}",
        f"hits       adapters {_share(c.adapter_hits, c.adapter_lookups)}  KV tokens {kv}",
        f"swapped    in {_bytes(came)}/s  out {_bytes(went)}/s{since}  in flight {c.in_flight} blocks",
        f"evictions  {c.clean_evictions} clean  {c.blocks_lost} blocks lost  {c.recomputed_tokens} tokens recomputed  "
        f"invalid KV {c.invalid_kv}",
    ]


def _rates(now: Reading, before: Reading | None) -> tuple[float, float]:
    """Bytes per second into and out of the device."""
    came, went, seconds = now.cache.bytes_swapped_in, now.cache.bytes_swapped_out, now.info.uptime_s
    if before is not None and came >= before.cache.bytes_swapped_in:  # else another server answers there now
        came, went = came - before.cache.bytes_swapped_in, went - before.cache.bytes_swapped_out
        seconds = now.at - before.at
    return came / max(seconds, 1e-3), went / max(seconds, 1e-3)


def _tier(name: str, tier: pb.TierState, width: int) -> str:
    parts = [("#", tier.adapters), ("=", tier.running_kv), ("-", tier.history_kv), (".", tier.free)]
    return f"{name:<5} [{bar(parts, width)}] {_held(tier)}"


def _held(tier: pb.TierState) -> str:
    running = f"{tier.running_kv} running KV, " if tier.running_kv else ""
    return f"{tier.total} blocks: {tier.adapters} adapters, {running}{tier.history_kv} history KV, {tier.free} free"


def bar(parts: Sequence[tuple[str, int]], width: int) -> str:
    """`width` characters in the proportions of the parts; what is there at all shows, if there is room."""
    total = sum(count for _, count in parts)
    if not total:
        return " " * width
    cells = [max(1, round(width * count / total)) if count else 0 for _, count in parts]
    while (excess := sum(cells) - width) != 0:  # rounding: the largest part gives or takes
        cells[cells.index(max(cells))] -= 1 if excess > 0 else -1
    return "".join(char * count for (char, _), count in zip(parts, cells, strict=True))


def _adapters(adapters: Sequence[pb.AdapterInfo], most: int) -> list[str]:
    """The table: those that requests asked for last come first, those that nobody did last."""
    tiers = Counter(pb.AdapterInfo.Tier.Name(a.tier) for a in adapters)
    counts = ", ".join(f"{tiers[tier]} {tier}" for tier in ("HBM", "LOADING", "HOST"))
    name = max([len("adapter"), *(len(a.name) for a in adapters)])
    name = min(name, 32)
    lines = [f"{len(adapters)} adapters: {counts}"]
    if not adapters:
        return lines
    header = f"{'adapter':<{name}}  {'tier':<11} {'running':>8} {'waiting':>8} {'hits':>10}"
    lines.append(f"{header} {'last use':>9} {'load cost':>10} {'blocks':>7}")
    recent = sorted(adapters, key=lambda a: (a.last_used_s < 0, a.last_used_s, a.name))
    for a in recent[:most]:
        tier = pb.AdapterInfo.Tier.Name(a.tier) + (" pin" if a.pinned else "")
        used = _age(a.last_used_s) if a.last_used_s >= 0 else "never"
        row = f"{a.name[:name]:<{name}}  {tier:<11} {a.running:>8} {a.waiting:>8} {a.hits:>10}"
        lines.append(f"{row} {used:>9} {_seconds(a.load_cost_s):>10} {a.blocks:>7}")
    if len(recent) > most:
        lines.append(f"and {len(recent) - most} more")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    for limit, unit, size in ((60, "s", 1), (3600, "min", 60), (86400, "h", 3600)):
        if seconds < limit:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds // 86400)} d"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
