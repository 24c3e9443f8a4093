"""The simulated part of the page on activated LoRA, and its figure."""

from __future__ import annotations

import datetime
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import alora_page, report
from benchmarks.alora import ALONE, SHARED
from benchmarks.alora_page import PAGE, PAPER, SIMULATED

FIGURE = "alora-simulated.png"
# Column -> key of a side.
RATIOS: Mapping[str, str] = {**alora_page.RATIOS, "pipeline": "pipeline_s"}
# Column, both sides in a cell -> (key of a side, factor, digits).
BOTH: Mapping[str, tuple[str, float, int]] = {
    "end to end ms": ("check_end_to_end_s", 1e3, 0),
    "TTFT ms": ("check_ttft_s", 1e3, 0),
    "hit rate": ("check_hit_rate", 1, 3),
    "KV GB": ("kv_bytes", 1e-9, 1),
    "prompt tokens computed, k": ("prompt_tokens", 1e-3, 1),
}
SWEEPS: Mapping[str, str] = {
    "context": "By context: one pipeline alone, {adapters} adapters",
    "adapters": "By number of adapters: one pipeline alone, {model}, {context} tokens",
    "batch": "By pipelines at once: all begin together, {adapters} adapters",
    "rate": "By rate: {pipelines} pipelines begin at random times, {model}, {adapters} adapters, {context} tokens",
}


def write(out: Path, result: Mapping[str, Any]) -> None:
    """Writes its part of the page and the figure into `out`; what stands above its mark stays."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    above = path.read_text().partition(SIMULATED)[0] if path.exists() else alora_page.TITLE
    figure = f"![gain by context and by rate, simulated]({FIGURE})\n\n" if draw(result["cells"], out / FIGURE) else ""
    path.write_text(f"{above.rstrip()}\n\n{SIMULATED}\n\n## Simulated\n\n{origin(result)}\n{figure}{tables(result)}")


def origin(result: Mapping[str, Any]) -> str:
    """Command, date, what is modelled and what is the same on both sides."""
    s = result["settings"]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    pools = ", ".join(f"{model} {size / 1e9:.0f} GB" for model, size in s["pool_bytes"].items())
    return (
        f"`{report.command()}`, {day}, python {s['python']}. The product's scheduler and cache (policy `jlora`) under "
        f"a virtual clock; steps take what a model of the {s['chip'].upper()} says ({s['chip_source']}; "
        f"[simulator.md](../simulator.md)). Pool: {pools}; host tier {s['host_bytes'] / 1e9:.0f} GB; adapters of rank "
        f"{s['rank']} on q, k, v and o; up to {s['max_step_tokens']} prompt tokens a step; answers of "
        f"{s['base_tokens']} tokens of the base, {s['check_tokens']} of an adapter, invoked by {s['invocation']}. "
        f"Times are means over all requests of adapters; *KV* is the most that was on the device at once.\n"
    )


def tables(result: Mapping[str, Any]) -> str:
    """A table per sweep; the paper's figures under the first."""
    parts = []
    for sweep, title in SWEEPS.items():
        cells = [cell for cell in result["cells"] if cell["sweep"] == sweep]
        if not cells:
            continue
        rows = [[_setting(cell), *_gains(cell["ratios"]), *_both(cell)] for cell in cells]
        if not parts:
            paper = [PAPER.get(key, ("", 0.0))[0] for key in RATIOS.values()]
            rows.append(["*paper, vLLM on GPUs*", *paper, *("" for _ in BOTH)])
        names = {key: f"{value:,}" if key == "context" else value for key, value in cells[0].items()}
        head = ["", *RATIOS, *(f"{name}: activated / LoRA" for name in BOTH)]
        parts.append(f"### {title.format(**names)}\n\n{report.table(head, rows)}")
    return (
        "How many times as fast a check is as an activated LoRA than as a plain one (a check's end to end, TTFT, "
        "queue, prefill, decode; and the pipeline as a whole), then both sides.\n\n" + "\n".join(parts)
    )


def draw(cells: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """The figure: gains by context and by rate; False, and a line on stderr, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for sweep, at, ax in (("context", "context", axes[0]), ("rate", "rate", axes[1])):
        found = [cell for cell in cells if cell["sweep"] == sweep]
        for i, model in enumerate(dict.fromkeys(cell["model"] for cell in found)):
            mine = [cell for cell in found if cell["model"] == model]
            for key, style in (("check_ttft_s", "-"), ("check_end_to_end_s", "--")):
                name = "TTFT" if key == "check_ttft_s" else "end to end"
                gains = [cell["ratios"][key] for cell in mine]
                ax.plot([c[at] for c in mine], gains, style, marker="o", markersize=4, color=f"C{i}",
                        label=f"{name}, {model}")  # fmt: skip
        for _, best in PAPER.values():
            ax.axhline(best, color="gray", linestyle=":", linewidth=1)
        ax.set(xscale="log", yscale="log")
        ax.set_xticks([cell[at] for cell in found], [f"{cell[at]:g}" for cell in found], minor=False)
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize=8)
    axes[0].set(xlabel="tokens of context, one pipeline", ylabel="times as fast as plain LoRA (a check)")
    axes[1].set(xlabel="pipelines begun per second")
    figure.suptitle("dotted: the paper's best, 58 end to end and 100 TTFT", fontsize=9)
    figure.savefig(path, dpi=110)
    return True


def _setting(cell: Mapping[str, Any]) -> str:
    """What the cells of its sweep differ in."""
    if cell["sweep"] == "context":
        return f"{cell['model']}, {cell['context']:,}"
    if cell["sweep"] == "adapters":
        return str(cell["adapters"])
    if cell["sweep"] == "rate":
        return f"{cell['rate']:g}/s"
    return f"{cell['model']}, {cell['context']:,}, {cell['pipelines']} at once"


def _gains(ratios: Mapping[str, float]) -> list[str]:
    """Times as fast; empty where the activated side took no time."""
    found = (ratios.get(key) for key in RATIOS.values())
    return ["" if ratio is None else f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}" for ratio in found]


def _both(cell: Mapping[str, Any]) -> list[str]:
    return [
        " / ".join(f"{cell[side][key] * factor:,.{digits}f}" for side in (SHARED, ALONE))
        for key, factor, digits in BOTH.values()
    ]
