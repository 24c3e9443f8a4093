"""Past the paper: `jlora` against every fair baseline and against who knows the future, in the simulator.

    {W1, W3, W1 with drift} x pool of {25, 50, 75 %} of the working set x link of {2, 10, 50 GB/s}
    {W1, W3} x 50 ms, 4.4 s more for every load of an adapter          a software path, a remote tier
    {W1, W3} x link of {2, 10 GB/s} x `Prefetch` given 1 s, 10 s ahead

With drift, other adapters are popular every five minutes. Each cell is run at five rates
up to the peak of `jlora` in that cell; a load of 4.4 s is what fetching an adapter from remote
storage takes in the mean (GenTD26). The bound evicts with knowledge of the trace and fetches
nothing ahead (`jlora.sim.clairvoyant`).
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jlora.bench import machine, report
from jlora.bench.paper import Case, Curves, Plan, Runs, run_all
from jlora.bench.paper_numbers import Curve, Table
from jlora.sim.clairvoyant import Clairvoyant

PAGE = "beyond.md"
MARK = "<!-- below: written by jlora bench beyond -->"
OURS, BOUND = "jlora", Clairvoyant.name
POLICIES = (OURS, "fastlibra", "lru", "vllm-fair:0.2", BOUND)
FAIR = ("fastlibra", "lru", "vllm-fair:0.2", "best")
LEVELS = (0.3, 0.6, 0.8, 0.9, 1.0)  # of the peak
SHARES, LINKS = (0.25, 0.5, 0.75), (2.0, 10.0, 50.0)
TRAFFIC = (("W1", ""), ("W3", ""), ("W1", "drift:300"))
LOADS_S = (0.05, 4.4)
HINTS_S = (1.0, 10.0)

CELLS = (
    *(Case(w, "7B", 100, law, hbm_share=s, link_gbps=g) for s in SHARES for g in LINKS for w, law in TRAFFIC),
    *(Case(w, "7B", 100, hbm_share=0.5, adapter_load_s=load) for load in LOADS_S for w in ("W1", "W3")),
)
HINTED = tuple(
    Case(w, "7B", 100, hbm_share=0.5, link_gbps=g, hint_s=hint)
    for w in ("W1", "W3")
    for g in (2.0, 10.0)
    for hint in HINTS_S
)


class Cell(Curves):
    """One cell: rates up to the peak of `jlora` there."""

    kind = "cell"
    reference = OURS
    near = (0.9,)

    @property
    def policies(self) -> tuple[str, ...]:
        """With the bound."""
        return POLICIES


class Hint(Cell):
    """At the rates of the cell without hints: what the hint gains there."""

    kind = "hint"

    def anchors(self, runs: Runs) -> tuple[float, str]:
        """The peak of the cell without hints."""
        plain = Cell(self.plan, replace(self.case, hint_s=0.0))
        return plain.anchors(Runs(plain, runs.deadline))[0], OURS

    @property
    def policies(self) -> tuple[str, ...]:
        """The product alone."""
        return (OURS,)


def full(work: Path, data: Path | None) -> Plan:
    """Every cell."""
    return Plan((), CELLS, HINTED, 60.0, LEVELS, work, 60.0, data)


def quick(work: Path, data: Path | None) -> Plan:
    """Two short cells: whether it works at all."""
    cells = (Case("W3", "7B", 20, hbm_share=0.5, link_gbps=2.0),)
    hinted = (Case("W3", "7B", 20, hbm_share=0.5, link_gbps=2.0, hint_s=1.0),)
    return Plan((), cells, hinted, 5.0, LEVELS, work, 5.0, data, close=1.5)


def run(plan: Plan) -> dict[str, Any]:
    """Runs what is not in the journals yet; everything the journals hold, as plain values."""
    return run_all(plan, [*(Cell(plan, case) for case in plan.cases), *(Hint(plan, case) for case in plan.many)])


def write(out: Path, result: Mapping[str, Any]) -> None:
    """Writes the page into `out`; what stands above the mark on the page stays."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    text = path.read_text().partition(MARK)[0] if path.exists() else "# Beyond the paper\n\n"
    cells, hinted = (Table([s for s in result["studies"] if s["kind"] == kind], OURS) for kind in ("cell", "hint"))
    m, s = machine.describe(), result["settings"]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    origin = (
        f"`{report.command()}`, {day}, {m['processor']}, {m['cores']} cores; python {sys.version.split()[0]}. "
        f"Simulated: Llama-2-7B on the paper's card, 100 adapters, "
        f"{s['seconds']:g} s of traffic per run ({'public traces' if s['data'] else 'synthetic'}, seed {s['seed']}).\n"
    )
    path.write_text("\n".join([f"{text}{MARK}\n", origin, *sections(cells, hinted)]))


def sections(cells: Table, hinted: Table) -> list[str]:
    """The tables there are runs for."""
    parts = []
    if cells.cases:
        parts += [_against(cells), _hits(cells)]
    if hinted.cases:
        parts.append(_hints(cells, hinted))
    return parts


def _against(table: Table) -> str:
    """Each cell: milliseconds of `jlora`, the others as ratios to it, at its levels."""
    policies = (*FAIR, "vllm-fair's share", BOUND)
    rows = []
    for name, study in table.cases.items():
        ours = _curve(table, name, OURS)
        low, high = study["rates"][1], study["rates"][3]
        taken = [f"{1e3 * ours.mean('ttft_s', [rate]):.0f}" for rate in (low, high)]
        cells = [name, f"{ours.peak:.2f}", ", ".join(taken)]
        for policy in policies:
            curve = table.curve(name, policy)
            if policy == "vllm-fair's share":
                cells.append(study["best"].partition(":")[2])
            elif curve is None:
                cells.append("")
            else:
                ratios = [curve.mean("ttft_s", [rate]) / ours.mean("ttft_s", [rate]) for rate in (low, high)]
                cells.append(f"{ratios[0]:.2f}, {ratios[1]:.2f}; {curve.peak / ours.peak:.2f}")
        rows.append(cells)
    head = ["cell", "peak /s", "TTFT ms", *(f"{p}" if p != "best" else "vllm-fair, best" for p in policies)]
    return (
        f"## Every cell\n\nMean TTFT of `{OURS}` at 0.6 and 0.9 of its peak; the others' TTFT there as a multiple of "
        f"it, and their peak as a multiple of its peak. Below 1 in the first two: faster than `{OURS}`.\n\n"
        + report.table(head, rows)
        + f"\n{_worst(table)}\n"
    )  # fmt: skip


def _worst(table: Table) -> str:
    """One line on where `jlora` stands overall."""
    lines = []
    for policy in (*FAIR, BOUND):
        found = [
            (curve.mean("ttft_s", [rate]) / _curve(table, name, OURS).mean("ttft_s", [rate]), name, rate)
            for name, study in table.cases.items()
            if (curve := table.curve(name, policy)) is not None
            for rate in study["rates"][:-1]
        ]
        if found:
            mean = math.exp(sum(math.log(ratio) for ratio, _, _ in found) / len(found))
            ratio, name, rate = min(found)
            lines.append(f"- `{policy}`: {mean:.2f} times `{OURS}`'s TTFT (geometric mean of cells and rates below the "
                         f"peak); at best {ratio:.2f}, in {name} at {rate:g}/s")  # fmt: skip
    return "\n".join(lines)


def _hits(table: Table) -> str:
    """What the bound does otherwise: hits and swapped bytes at 0.9 of the peak."""
    rows = []
    for name, study in table.cases.items():
        for policy in (OURS, BOUND):
            curve = table.curve(name, policy)
            if curve is not None:
                at = [study["rates"][3]]
                shares = [f"{curve.mean(key, at):.2f}" for key in ("adapter_hits", "kv_device_hits", "kv_host_hits")]
                sizes = [f"{curve.mean('bytes_in', at) / 1e9:.0f}", f"{curve.mean('recomputed_tokens', at):.0f}"]
                rows.append([name, policy, *shares, *sizes, f"{1e3 * curve.mean('swap_s', at):.0f}"])
    head = ["cell", "policy", "adapter hits", "KV device", "KV host", "GB in", "recomputed tokens", "swap-in ms"]
    return f"## `{OURS}` and the bound at 0.9 of the peak\n\n" + report.table(head, rows)


def _hints(cells: Table, hinted: Table) -> str:
    """TTFT and swap-in without and with hints."""
    rows = []
    for name, study in hinted.cases.items():
        plain = name.partition("-hint")[0]
        if plain not in cells.cases:
            continue
        before, after = _curve(cells, plain, OURS), _curve(hinted, name, OURS)
        for level, rate in zip(LEVELS, study["rates"], strict=True):
            pairs = [f"{1e3 * curve.mean(k, [rate]):.0f}" for k in ("ttft_s", "swap_s") for curve in (before, after)]
            rows.append([name, f"{level:g}", f"{rate:g}", *pairs])
    head = ["cell", "of the peak", "/s", "TTFT ms", "with hints", "swap-in ms", "with hints"]
    return "## `Prefetch` before the next turn\n\n" + report.table(head, rows)


def _curve(table: Table, name: str, policy: str) -> Curve:
    found = table.curve(name, policy)
    assert found is not None, "a case of a table has its reference's runs"
    return found
