"""The page of `jlora bench alora`: its head and the real engine's part, with its figure.

what somebody has written      stays
MARK                           the real engine, this module
SIMULATED                      the simulator, `pipelines_page`
"""

from __future__ import annotations

import datetime
import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rounds
from benchmarks.alora import ALONE, SHARED
from jlora import machine

PAGE = "alora.md"
FIGURE = "alora.png"
TITLE = "# Activated LoRA against LoRA\n\n"
MARK = "<!-- below: written by jlora bench alora -->"
SIMULATED = "<!-- below: simulated, written by jlora bench alora -->"

# What the paper reports against LoRA (arXiv 2512.17910, abstract), in words and as a number.
PAPER = {"check_end_to_end_s": ("up to 58", 58.0), "check_ttft_s": ("over 100", 100.0)}

# Column -> (key of a sample, factor, digits).
COLUMNS: Mapping[str, tuple[str, float, int]] = {
    "pipeline s": ("seconds", 1, 2),
    "check: end to end ms": ("check_end_to_end_s", 1e3, 1),
    "TTFT ms": ("check_ttft_s", 1e3, 1),
    "queue ms": ("check_queue_s", 1e3, 1),
    "prefill ms": ("check_prefill_s", 1e3, 1),
    "decode ms": ("check_decode_s", 1e3, 1),
    "hit rate": ("check_hit_rate", 1, 3),
    "base: cold TTFT ms": ("cold_ttft_s", 1e3, 1),
    "next turn's": ("hit_ttft_s", 1e3, 1),
    "base hit rate": ("base_hit_rate", 1, 3),
    "KV MB": ("kv_bytes", 1e-6, 1),
}
RATIOS: Mapping[str, str] = {
    "pipeline": "seconds",
    "check, end to end": "check_end_to_end_s",
    "TTFT": "check_ttft_s",
    "queue": "check_queue_s",
    "prefill": "check_prefill_s",
    "decode": "check_decode_s",
}


def write(out: Path, result: Mapping[str, Any]) -> None:
    """Writes its part of the page and the figure into `out`; what stands above it, and the simulated part, stay."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    page, mark, simulated = path.read_text().partition(SIMULATED) if path.exists() else (TITLE, "", "")
    text = page.partition(MARK)[0]
    figure = f"![gain by length of context]({FIGURE})\n\n" if draw(result, out / FIGURE) else ""
    ours = f"{MARK}\n\n{origin(result)}\n{figure}{tables(result)}"
    path.write_text(f"{text.rstrip()}\n\n{ours}" + (f"\n{mark}{simulated}" if mark else ""))


def origin(result: Mapping[str, Any]) -> str:
    """Command, date, machine, versions, model and pipeline."""
    m, s = machine.describe(), result["settings"]
    versions = ", ".join(f"{k} {v}" for k, v in s["versions"].items())
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    where = f"{day}, {m['processor']}, {m['cores']} cores, {m['memory_gib']:.0f} GiB; {versions}"
    return (
        f"`{report.command()}`, {where}.\n\nA random Llama of {s['model']['parameters'] / 1e6:.1f}M parameters in "
        f"float32, adapters of rank {s['rank']} on {', '.join(s['adapted'])}; answers of {s['base_tokens']} tokens of "
        f"the base, {s['check_tokens']} of an adapter.\n"
    )


def tables(result: Mapping[str, Any]) -> str:
    """The gains of all cells beside the paper's, then both sides of each cell."""
    cells = result["cells"]
    rows = [[_name(cell), *_gains(cell), _controls(cell)] for cell in cells]
    paper = [PAPER.get(key, ("", 0.0))[0] for key in RATIOS.values()]
    rows.append(["*paper, vLLM on GPUs*", *paper, ""])
    parts = [
        "## Times as fast as the same adapters as plain LoRAs\n\n"
        f"Median of {len(cells[0]['rounds'])} interleaved rounds of the ratio inside a round (lowest–highest). "
        "*Control*: activated and plain pipelines against themselves a round later; outside 0.97–1.03 the row is "
        "void.\n\n" + report.table(["context, adapters", *RATIOS, "control"], rows)
    ]
    for cell in cells:
        body = [[side, *_row(cell["median"][side])] for side in (SHARED, ALONE)]
        different = sum(r[side]["different"] for r in cell["rounds"] for side in (SHARED, ALONE))
        parts.append(
            f"## {_name(cell)}\n\nMedians of {len(cell['rounds'])} rounds; means over a pipeline's requests. "
            f"Answers that differ from the first run's: {different:.0f}. The base's second turn, which finds the "
            f"first in the cache, has {_hit(cell):.3f} of its TTFT.\n\n" + report.table(["", *COLUMNS], body)
        )
    return "\n".join(parts)


def draw(result: Mapping[str, Any], path: Path) -> bool:
    """The figure: gains by context; False, and a line on stderr, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    gains, memory = figure.subplots(1, 2)
    cells = _sweep(result["cells"])
    at = [cell["context"] for cell in cells]
    for i, (name, key) in enumerate(RATIOS.items()):
        if name == "queue":
            continue  # nearly nothing with one pipeline at a time
        found = [cell["ratios"][key] for cell in cells]
        gains.plot(at, [r["median"] for r in found], marker="o", markersize=4, color=f"C{i}", label=name)
        gains.fill_between(at, [r["low"] for r in found], [r["high"] for r in found], color=f"C{i}", alpha=0.12)
        if key in PAPER:
            gains.axhline(PAPER[key][1], color=f"C{i}", linestyle=":", linewidth=1)
    gains.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="times as fast as plain LoRA")
    for side in (SHARED, ALONE):
        memory.plot(at, [cell["median"][side]["kv_bytes"] / 1e6 for cell in cells], marker="o", label=side)
    memory.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="KV kept after the pipeline, MB")
    for axes in (gains, memory):
        axes.set_xticks(at, list(map(str, at)), minor=False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    gains.set_title("dotted: the paper's best", fontsize=9)
    figure.savefig(path, dpi=110)
    return True


def _sweep(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells that differ from the first in their context alone, shortest first."""
    first = cells[0]
    same = [c for c in cells if (c["adapters"], c["sessions"]) == (first["adapters"], first["sessions"])]
    return sorted(same, key=lambda cell: cell["context"])


def _name(cell: Mapping[str, Any]) -> str:
    at_once = f", {cell['sessions']} pipelines at once" if cell["sessions"] > 1 else ""
    return f"{cell['context']}, {cell['adapters']}{at_once}"


def _gains(cell: Mapping[str, Any]) -> list[str]:
    return [str(rounds.Ratio(**cell["ratios"][key])) if key in cell["ratios"] else "" for key in RATIOS.values()]


def _controls(cell: Mapping[str, Any]) -> str:
    found = [cell["controls"][side] for side in (SHARED, ALONE)]
    void = "" if all(rounds.is_steady(value) for value in found) else " **void**"
    return " / ".join(f"{value:.2f}" for value in found) + void


def _hit(cell: Mapping[str, Any]) -> float:
    """TTFT with the prefix cached over TTFT without, of the base beside activated LoRAs; median of the rounds."""
    return statistics.median(r[SHARED]["hit_ttft_s"] / r[SHARED]["cold_ttft_s"] for r in cell["rounds"])


def _row(sample: Mapping[str, float]) -> list[str]:
    return [f"{sample[key] * factor:.{digits}f}" for key, factor, digits in COLUMNS.values()]
