"""Results: one raw JSON file per benchmark and dtype, and a page of tables made from all of them."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import growth, rounds
from jlora import machine

PAGE = "cpu.md"
NAMES = {
    "throughput": "R1",
    "latency": "R1b",
    "llama": "R2",
    "host": "host time",
    "lora": "LoRA",
    "load": "load",
    "cache": "R7",
}


def save(out: Path, name: str, dtype: str, result: Mapping[str, Any]) -> Path:
    """Writes OUT/NAME-DTYPE.json with machine, versions, commit, date and command, then the page."""
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "dtype": dtype,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        **result,
    }
    path = out / f"{name}-{dtype}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    if name in NAMES:  # the others have pages of their own
        (out / PAGE).write_text(page([json.loads(p.read_text()) for p in sorted(out.glob("*-*.json"))]))
    return path


def command() -> str:
    """The command line, without folders of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    words = words[1:] if words[:1] == ["bench"] else words  # `jlora bench NAME`, `python -m jlora.bench NAME`
    return " ".join(["jlora bench", *words])


def commits(studies: Sequence[Mapping[str, Any]]) -> str:
    """Of the code that made their runs, as each run's journal has it."""
    known = sorted({commit for study in studies for commit in study["commits"] if commit})
    return ", ".join(known) or "an unknown commit"


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: what was run, on what, and the medians with their spread."""
    parts = [
        "# CPU results\n\nMade by `jlora bench`; the JSON files beside this page hold every round. "
        "A control outside 0.97–1.03 voids the numbers of its row.\n"
    ]
    sections = {
        "throughput": throughput,
        "latency": latency,
        "llama": llama,
        "host": host,
        "lora": lora,
        "load": load,
        "cache": cache,
    }
    for name, section in sections.items():
        chosen = [r for r in records if r["benchmark"] == name]
        if chosen:
            parts.append(section(chosen))
            parts += [origin(r) for r in chosen]
    return "\n".join(parts)


def throughput(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of R1."""
    work = records[0]["settings"]["workload"]
    rows = []
    for r in records:
        s = r["summary"]
        rows.append(
            [
                r["dtype"],
                f"{s['jlora_tokens_per_s']:.1f}",
                f"{s['grpc_tokens_per_s']:.1f}" if "grpc_tokens_per_s" in s else "",
                f"{s['peft_tokens_per_s']:.1f}" if "peft_tokens_per_s" in s else "",
                ratio(s["ratio"]) if "ratio" in s else "",
                f"{s['ratio_to_clairvoyant']:.2f}" if "ratio" in s else "",
                controls(s, "jlora_control", "peft_control"),
                str(s["rounds"]),
                outputs(r),
            ]
        )
    head = [
        "dtype",
        "jlora tok/s",
        "over gRPC",
        "PEFT tok/s",
        "ratio",
        "to clairvoyant PEFT",
        "control",
        "rounds",
        "outputs",
    ]
    text = f"""## R1: many requests at once

{work["parameters"] / 1e6:.1f}M parameters, {work["requests"]} requests, prompts {span(work["prompt_tokens"])}
and outputs {span(work["output_tokens"])} tokens (uniform), {work["adapters"]} adapters of rank {work["rank"]} on \
{", ".join(work["adapted"])}. Output tokens per second, greedy.
PEFT runs its best static batches (`adapter_names`), found by probing; requests are batched in order of
prompt length. *Clairvoyant* batches them by output length, which no server knows. The ratio is the
median of the rounds (lowest–highest); the control is each side against itself a round later.
"""
    return text + "\n" + table(head, rows)


def latency(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of R1b."""
    rows = []
    for r in records:
        for s in r["summary"]:
            rows.append(
                [
                    r["dtype"],
                    s["case"],
                    {"prefill_s": "prefill", "step_s": "decode, per token"}[s["metric"]],
                    f"{s['jlora_s'] * 1e3:.1f}",
                    f"{s['peer_s'] * 1e3:.1f} ({s['peer_way']})" if "peer_s" in s else "",
                    ratio(s["ratio"]) if "ratio" in s else "",
                    controls(s, "jlora_control", "peer_control"),
                    str(s["rounds"]),
                ]
            )
    head = ["dtype", "case, prompt", "what", "jlora ms", "PyTorch ms", "ratio", "control", "rounds"]
    text = (
        "## R1b: one request alone\n\nThe same model. PyTorch is transformers (base) or PEFT (one adapter), through "
        "`generate` or a bare loop, whichever is faster. A ratio above 1 means that jlora is faster.\n"
    )
    return text + "\n" + table(head, rows)


def llama(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of R2."""
    work, threads = records[0]["settings"]["workload"], records[0]["settings"]["threads"]
    rows = [
        [
            s["case"],
            f"{s['jlora_tokens_per_s']:.1f}",
            f"{s['llama_tokens_per_s']:.1f}",
            ratio(s["ratio"]),
            controls(s, "jlora_control", "llama_control"),
            str(s["rounds"]),
            outputs(s),
        ]
        for r in records
        for s in r["summary"]
    ]
    text = f"""## R2: against a llama.cpp server

{work["parameters"] / 1e6:.1f}M parameters, float32, {work["requests"]} requests, prompts {span(work["prompt_tokens"])}
and outputs {span(work["output_tokens"])} tokens, {work["adapters"]} adapters of rank {work["rank"]}; {threads}
threads each. Both are servers; a client asks for one thing after the other. Output tokens per second, greedy.
"""
    head = ["clients", "jlora tok/s", "llama.cpp tok/s", "ratio", "control", "rounds", "outputs"]
    return text + "\n" + table(head, rows)


def host(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of host time per step."""
    rows, fits = [], []
    for r in records:
        s = r["summary"]
        rows += [[str(x["running"]), str(x["queued"]), f"{x['step_s'] * 1e6:.0f}"] for x in s["loads"]]
        fits.append(f"{s['fixed_us']:.0f} µs + {s['per_sequence_us']:.1f} µs per running sequence")
    text = (
        "## Host time per step\n\nPython's part of a decode step: planning, packing, dispatch, commit. "
        f"Without a queue: {'; '.join(fits)}.\n"
    )
    return text + "\n" + table(["running", "queued", "µs per step"], rows)


def lora(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of the adapters' product by blocks and by dense slots."""
    plan = records[0]["settings"]["plan"]
    rows = [
        [
            r["dtype"],
            s["batch"],
            str(s["in_batch"]),
            str(s["registered"]),
            *(f"{s[key] * 1e3:.2f}" for key in ("base_s", "blocks_s", "dense_s")),
            ratio(s["ratio"]),
            controls(s, "blocks_control", "dense_control"),
        ]
        for r in records
        for s in r["summary"]
    ]
    text = f"""## Adapters by active blocks, and dense over all slots

Rank {plan["rank"]} on q, k, v, o of one layer of the same model (width {plan["spec"]["width"]}); milliseconds.
*Base* is the layer's own four products.
*Blocks* is our op: its work follows the adapters in the batch. *Dense* multiplies by all registered adapters and
masks by a one-hot of each token's slot, as servers with a fixed number of slots do. Both give the same result.
"""
    head = ["dtype", "tokens", "in the batch", "registered", "base", "blocks", "dense", "ratio", "control"]
    return text + "\n" + table(head, rows)


def load(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of what it takes to load a model in both forms."""
    settings = records[0]["settings"]
    rows = [
        [
            r["dtype"],
            str(s["tp"]),
            which,
            *(f"{s[which][key]:.2f}" for key in ("safetensors_s", "orbax_s")),
            ratio(s[which]["ratio"]),
            controls(s[which], "safetensors_control", "orbax_control"),
            str(s["rounds"]),
        ]
        for r in records
        for s in r["summary"]
        for which in ("first", "again")
    ]
    libraries = ", ".join(f"{name} {version}" for name, version in settings["libraries"].items())
    text = f"""## Loading a model

{settings["parameters"] / 1e6:.1f}M parameters from float32 files in the page cache to the devices, in seconds;
{libraries}. *First* is the first load of a process, which compiles what it needs, *again* the next one. A ratio
above 1 means that the converted model (Orbax) is faster. Both give the same weights.
"""
    head = ["dtype", "tp", "load", "safetensors", "Orbax", "ratio", "control", "rounds"]
    return text + "\n" + table(head, rows)


def cache(records: Sequence[Mapping[str, Any]]) -> str:
    """The tables of R7, with its figure."""
    return growth.section(records[0])


def origin(record: Mapping[str, Any]) -> str:
    """Machine, versions, date and command under a table."""
    m, versions = record["machine"], {**record["versions"]}
    peer = record.get("peer", {}).get("versions", {})
    sides = ", ".join(f"{k} {v}" for k, v in versions.items())
    other = "; the other side: " + ", ".join(f"{k} {v}" for k, v in peer.items()) if peer else ""
    chosen = record.get("peer_batching", {}).get("prompt")
    batches = f" PEFT's best batch: {chosen['batch']}, {chosen['cache']} cache." if chosen else ""
    return (
        f"- {NAMES[record['benchmark']]} {record['dtype']}: `{record['command']}`, {record['date']}, {m['processor']}, "
        f"{m['cores']} cores, {m['memory_gib']:.0f} GiB; {sides}{other}.{batches}\n"
    )


def outputs(record: Mapping[str, Any]) -> str:
    """How many outputs were equal."""
    if "outputs" not in record:
        return ""
    o = record["outputs"]
    ties = f", {o['ties']} ties" if o["ties"] else ""
    other = f", {o['different']} different" if o["different"] else ""
    return f"{o['equal']} of {o['requests']} equal{ties}{other}"


def controls(summary: Mapping[str, Any], *keys: str) -> str:
    """Both sides' controls, and whether they void the numbers beside them."""
    values = [summary[key] for key in keys if key in summary]
    void = "" if all(rounds.is_steady(value) for value in values) else " void"
    return " / ".join(f"{value:.3f}" for value in values) + void


def ratio(value: Mapping[str, float]) -> str:
    """Median and range."""
    return f"**{value['median']:.2f}** ({value['low']:.2f}–{value['high']:.2f})"


def span(bounds: Sequence[int]) -> str:
    """16–512"""
    return f"{bounds[0]}–{bounds[1]}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
