"""`jlora top` against a real server: its picture, how it leaves, and its message when no server answers."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from jlora import cli
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.recent import MOST, WINDOW_S, Recent
from jlora.serve.top import FILE_COLUMNS, Reading, bar, picture
from tests.serve._server import Served, request, wait_until

ROOT = Path(__file__).resolve().parents[2]
OTHER_SCREEN, MAIN_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def reading(at: float = 0.0, adapters: tuple[pb.AdapterInfo, ...] = (), **cache: int) -> Reading:
    tier = pb.TierState(total=100, free=40, adapters=20, history_kv=30, running_kv=10)
    info = pb.ServerInfo(version="1", model="base", platform="cpu", tp=1, dtype="float32", uptime_s=100.0)
    return Reading(info, pb.CacheState(policy="jlora", hbm=tier, host=tier, **cache), adapters, at)


def render(now: Reading, before: Reading | None, columns: int = 160, rows: int = 50) -> list[str]:
    console = Console(width=columns, highlight=False, color_system=None)
    with console.capture() as drawn:
        console.print(picture(now, before, rows))
    return [text.rstrip() for text in drawn.get().splitlines()]


def line(lines: list[str], start: str) -> str:
    return next(text for text in lines if text.startswith(start))


# -- against a server ---------------------------------------------------------------------------


def recent_times(served: Served) -> dict[str, list[float]]:
    info = served.control.GetServerInfo(pb.GetServerInfoRequest())
    kinds = ("p50", "p90", "p99", "mean")
    return {name: [getattr(info, f"recent_{name}_{kind}_s") for kind in kinds] for name in ("ttft", "tpot")}


def test_one_picture_of_a_real_server(served: Served, capsys: pytest.CaptureFixture[str]):
    message = request(range(5, 45), 4)
    message.model = "upper"
    for _ in range(2):
        served.generate(message)
    recent = recent_times(served)
    for _ in range(10):
        assert cli.main(["top", served.address, "--once"]) == 0
        lines = capsys.readouterr().out.splitlines()
        last, recent = recent, recent_times(served)
        if last == recent:  # no request has left the last minute meanwhile
            break
    state = served.control.GetCacheState(pb.GetCacheStateRequest(with_kv=True))
    assert "policy jlora" in lines[0] and served.replica.info.model in lines[0]
    for name, tier in (("HBM", state.hbm), ("host", state.host)):
        counts = [tier.total, tier.adapters, tier.running_kv, tier.history_kv, tier.free]
        assert line(lines, name).split()[2:] == [str(count) for count in counts]
    info = served.control.GetServerInfo(pb.GetServerInfoRequest())
    assert info.recent_requests >= info.recent_tpot_requests >= 2
    for name, spread in recent.items():
        assert 0 < spread[0] <= spread[1] <= spread[2] and 0 < spread[3]
        shown = re.findall(r"(p\d\d|mean) ([\d.]+) (ms|s)", line(lines, name.upper()))
        assert [kind for kind, _, _ in shown] == ["p50", "p90", "p99", "mean"]
        values = [float(value) / (1000 if unit == "ms" else 1) for _, value, unit in shown]
        assert values == pytest.approx(spread, rel=0.01, abs=6e-5)
    assert "longest in the last minute" in line(lines, "gaps")
    assert "invalid KV 0" in line(lines, "evictions")
    assert line(lines, "3 adapters")
    assert line(lines, "upper").split()[1] == "HBM"
    uid = served.adapters.GetAdapter(pb.GetAdapterRequest(name="upper")).uid
    assert state.kv_whole and state.kv[uid] > 0 and line(lines, "upper").split()[-1] == str(state.kv[uid])
    names = [text.split()[0] for text in lines if text.split() and text.split()[0] in ("upper", "lower", "wide")]
    assert names[0] == "upper", "the adapter used last comes first"


def test_the_cache_state_names_its_policy_and_counts_host_hits(served: Served):
    """The client reads every field as the engine has it."""
    served.generate(request(range(50, 90), 2))
    wait_until(lambda: not served.stats().running)
    # A copy to the host may still be landing, or a round of the monitor start one.
    wait_until(lambda: served.cache().in_flight == 0)
    names = {field.name for field in pb.CacheState.DESCRIPTOR.fields} - {
        "hbm",
        "host",
        "in_flight",
        "merge",
        "bytes_swapped_out",
        "kv",
        "kv_whole",
    }
    theirs, ours = served.control.GetCacheState(pb.GetCacheStateRequest()), served.cache()
    assert {name: getattr(theirs, name) for name in names} == {name: getattr(ours, name) for name in names}


@pytest.mark.parametrize("leave", ["q", "ctrl-c"])
def test_live_in_a_terminal_it_redraws_and_puts_the_terminal_back(served: Served, leave: str):
    main, side = pty.openpty()
    try:
        before = termios.tcgetattr(side)
        command = [sys.executable, "-m", "jlora.cli", "top", served.address, "--interval", "0.1"]
        process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        screen = Screen(main)
        seen = screen.until(lambda text: text.count("policy jlora") >= 3)
        assert OTHER_SCREEN in seen
        if leave == "q":
            os.write(main, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        rest = screen.until(lambda text: MAIN_SCREEN in text)
        assert process.wait(20) == 0 and "Traceback" not in rest
        assert termios.tcgetattr(side) == before
    finally:
        os.close(main)
        os.close(side)


def test_a_terminal_that_cannot_move_its_cursor_gets_one_picture(served: Served):
    main, side = pty.openpty()
    try:
        command = [sys.executable, "-m", "jlora.cli", "top", served.address]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, cwd=ROOT, env=environment)
        seen = Screen(main).until(lambda text: "adapters: " in text)
        assert process.wait(20) == 0 and "policy jlora" in seen and "\x1b" not in seen
    finally:
        os.close(main)
        os.close(side)


class Screen:
    """What a program writes to a terminal. One decoder reads it all: a read may end inside a character.

    A signal may end a write inside one, too.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def until(self, enough: Callable[[str], bool]) -> str:
        """What came since the last call, up to a read after which `enough` holds."""
        text, end = "", time.monotonic() + 60
        while not enough(text):
            assert time.monotonic() < end, f"only saw {text[-400:]!r}"
            if select.select([self.descriptor], [], [], 0.2)[0]:
                text += self.decoder.decode(os.read(self.descriptor, 65536))
        return text


def test_no_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as probe:  # bound and not listening: nobody else can answer there
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        assert cli.main(["top", address]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        f"jlora top: no server answers at {address}: give HOST:PORT of its gRPC port (50051 by default), or "
        "start one with `jlora serve` or `jlora cluster`\n"
    )
    with pytest.raises(SystemExit, match="2"):
        cli.main(["top", "--interval", "0"])
    assert "--interval" in capsys.readouterr().err


# -- the picture ----------------------------------------------------------------------------------


def test_rates_are_differences_of_two_readings():
    before = reading(at=10.0, bytes_swapped_in=1_000_000, bytes_swapped_out=0)
    now = reading(at=12.0, bytes_swapped_in=5_000_000, bytes_swapped_out=3_000, in_flight=7)
    swapped = line(render(now, before), "swapped")
    assert "in 2.0 MB/s" in swapped and "out 1.5 kB/s" in swapped and "in flight 7 blocks" in swapped
    assert "in 50.0 kB/s  out 30 bytes/s (mean since start)" in line(render(now, None), "swapped")
    assert "in 50.0 kB/s" in line(render(now, reading(at=10.0, bytes_swapped_in=9_000_000)), "swapped")  # started again


def test_hit_rates_tell_device_from_host():
    now = reading(adapter_hits=3, adapter_lookups=4, kv_hit_tokens=70, kv_host_hit_tokens=20, kv_lookup_tokens=100)
    expected = "hits         adapters 75.0 %  KV tokens device 50.0 %, host 20.0 %"
    assert line(render(now, None), "hits") == expected
    now.cache.kv_base_hit_tokens = 40
    assert line(render(now, None), "hits") == f"{expected}, base's 40.0 %"


def test_cold_starts_are_told_by_kind_and_the_disk_below_them():
    now = reading(
        cold_waited=12, cold_streamed=3, cold_helped=5, adapters_dropped=4, adapter_reads=8, adapter_reads_failed=2,
        adapters_reading=7,
    )  # fmt: skip
    now.cache.adapter_read_s = 0.1
    lines = render(now, None)
    assert line(lines, "cold starts") == "cold starts  12 waited, 3 streamed, 5 helped by the host"
    now.cache.cold_predicted, now.cache.cold_predicted_s, now.cache.cold_measured_s = 4, 0.1, 0.2
    now.cache.cold_error_s = 0.12
    compared = "  first token 50.0 ms, predicted 25.0 ms, mean error 30.0 ms"
    assert line(render(now, None), "cold starts").endswith(f"helped by the host{compared}")
    expected = "disk         7 on their way  8 adapters read (12.5 ms each)  2 reads failed  4 adapters dropped"
    assert line(lines, "disk") == expected
    assert "0 adapters read  0 reads failed" in line(render(reading(), None), "disk")


def test_what_decides_a_merge_is_told_before_anything_is_merged():
    now = reading()
    assert not any(text.startswith("merging") for text in render(now, None)), "nothing decides"
    now.info.merge.adapters_cost, now.info.merge.alpha, now.info.merge.beta = 0.125, 0.9, 0.45
    expected = "merging      adapters cost 12.5 % of a step  in above 0.90, out below 0.45 of the batch"
    assert line(render(now, None), "merging") == expected


def test_bars_are_as_wide_as_asked_and_show_every_class_with_a_block():
    def drawn(*counts: int, width: int = 20) -> str:
        adapters, running, history, free = counts
        return bar(pb.TierState(adapters=adapters, running_kv=running, history_kv=history, free=free), width).plain

    assert drawn(20, 10, 30, 40, width=10) == "##=---...."
    for counts in ((1, 0, 0, 100_000), (1, 1, 1, 1), (7, 11, 13, 0), (3, 5, 1000, 1)):
        made = drawn(*counts)
        assert len(made) == 20
        assert all((char in made) == bool(count) for char, count in zip("#=-.", counts, strict=True))


def test_the_picture_fits_the_screen_and_says_what_it_left_out():
    adapters = tuple(pb.AdapterInfo(name=f"a{i:03}", tier="HOST", last_used_s=-1) for i in range(300))
    adapters += (pb.AdapterInfo(name="hot", tier="HBM", last_used_s=2.0, waiting=5, pinned=True),)
    merging = reading(adapters=adapters)
    merging.info.merge.switches, merging.info.merge.alpha = 1, 1.0
    assert len(render(merging, None, 80, 24)) <= 24
    lines = render(reading(adapters=adapters), None, 80, 24)
    assert len(lines) <= 24 and all(len(text) <= 80 for text in lines)
    assert "301 adapters: 1 HBM, 0 LOADING, 300 HOST, 0 DISK" in lines
    table = lines[lines.index("301 adapters: 1 HBM, 0 LOADING, 300 HOST, 0 DISK") + 3 :]
    assert table[0].split()[:3] == ["hot", "HBM", "pin"]
    assert table[-1] == f"and {301 - (len(table) - 1)} more"


def test_a_file_has_whole_names(capsys: pytest.CaptureFixture[str]):
    name = "n" * 128
    now = reading(adapters=(pb.AdapterInfo(name=name, tier="HBM", last_used_s=2.0),))
    now.info.replicas.add(name=name, address=f"{name}:1", health="up")
    console = Console(width=FILE_COLUMNS)
    console.print(picture(now, None, 50, None))
    said = capsys.readouterr().out
    assert re.findall(rf"^{name} .*", said, re.MULTILINE) and f" {name}:1 " in said and "…" not in said
    assert name not in "\n".join(render(now, None))


# -- recent times -----------------------------------------------------------------------------------


def test_recent_times_are_of_the_last_minute_only():
    now = [0.0]
    recent = Recent(lambda: now[0])
    assert recent.summary() == ((0, 0.0, 0.0, 0.0, 0.0),) * 2
    recent.add(9.0, 0.0)  # an answer of one token has no time per token
    now[0] = WINDOW_S - 1
    for i in range(1, 101):
        recent.add(i / 100, i / 1000)
    assert recent.summary().ttft.count == 101 and recent.summary().ttft.p99_s == 1.0
    assert recent.summary().tpot == (100, pytest.approx(0.0505), 0.05, 0.09, 0.099)
    now[0] = WINDOW_S + 1
    assert recent.summary().ttft == (100, pytest.approx(0.505), 0.5, 0.9, 0.99)
    now[0] = 10 * WINDOW_S
    assert recent.summary().ttft.count == 0
    for _ in range(MOST + 5):
        recent.add(1.0, 0.0)
    assert recent.summary() == ((MOST, 1.0, 1.0, 1.0, 1.0), (0, 0.0, 0.0, 0.0, 0.0))


def test_kv_that_nobody_has_counted_is_not_shown():
    now = reading(0.0, (pb.AdapterInfo(name="seen", uid=1), pb.AdapterInfo(name="unseen", uid=2, blocks=3)))
    now.cache.kv[1] = 7
    assert line(render(now, None), "seen").split()[-1] == "7+"
    assert line(render(now, None), "unseen").split()[-1] == "3"


def test_a_router_shows_its_replicas():
    now = reading()
    for name, health in (("r0", "up"), ("r1", "suspect")):
        now.info.replicas.add(name=name, address="10.0.0.1:1", health=health, running=3, free_blocks=7, step_s=0.02)
    lines = render(now, None)
    assert line(lines, "r0").split()[:5] == ["r0", "10.0.0.1:1", "up", "0", "3"]
    assert "suspect" in line(lines, "r1") and "20.0 ms" in line(lines, "r1")


def test_a_router_shows_no_uses_that_it_does_not_know_and_the_busiest_adapters_first():
    made = {"a": ("DISK", 0, 9), "b": ("HBM", 0, 1), "c": ("HBM", 0, 4), "d": ("HOST", 2, 1), "e": ("HBM", 7, 1)}
    now = reading(adapters=tuple(
        pb.AdapterInfo(name=name, tier=tier, rank=8, running=running, blocks=blocks, last_used_s=-1.0)
        for name, (tier, running, blocks) in made.items()
    ))  # fmt: skip
    now.info.replicas.add(name="r0", address="10.0.0.1:1", health="up")
    now.cache.kv_whole = True
    lines = render(now, None)
    rows = [text.split() for text in lines if text.split() and text.split()[0] in made]
    assert [row[0] for row in rows] == ["e", "d", "c", "b", "a"]
    assert rows[0] == ["e", "HBM", "8", "7", "-", "-", "-", "-", "1", "0"]
    assert "never" not in "\n".join(lines)
