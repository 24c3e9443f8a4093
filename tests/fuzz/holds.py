"""How long reading a hostile adapter keeps every other thread waiting, and how much memory it takes.

    python -m tests.fuzz.holds [--out FILE] [INPUT of the fuzzer `config` or `weights` ...]

Each file is read in a process of its own. A second thread ticks meanwhile. What the reader's processor clock goes on by
between two ticks is how long the reader held Python's lock; of several rounds the shortest counts, because on a busy
machine a tick may also wait for a processor. Python itself changes threads every 5 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jlora.adapters.peft import CONFIG, HEADER_BYTES, HEADER_BYTES_PER_MODULE, WEIGHTS
from jlora.adapters.peft_config import MAX_BYTES, MAX_ENTRIES, MAX_INVOCATION
from jlora.engine.sources import Reader, read_adapter
from jlora.errors import JloraError
from jlora.layout import PoolLayout, smallest_block_tokens
from jlora.model.hf_names import projections
from jlora.model.spec import ModelSpec
from jlora.ports import DiskFiles

ROUNDS = 3
TICK_S = 0.0005
# Llama-3.1-8B, 224 matrices.
SPEC = ModelSpec(
    vocab=128256, width=4096, mlp=14336, layers=32, heads=32, kv_heads=8, head_dim=128, max_len=8192,
    eos_ids=(2,), bos_id=1, name="8b", dtype="bfloat16",
)  # fmt: skip
RANK = 16
OPTIONS = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.holds", description=__doc__.splitlines()[0])
    parser.add_argument("inputs", nargs="*", type=Path, help="files of the fuzzers, config-... or weights-...")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add to")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one)))
        return
    with tempfile.TemporaryDirectory() as root:
        for name, path in files(Path(root), args.inputs):
            command = [sys.executable, "-m", "tests.fuzz.holds", "--one", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            line = json.dumps({"file": name, **json.loads(done.stdout)})
            print(line, flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(line + "\n")


def measured(path: Path) -> dict[str, object]:
    """What reading the adapter takes; the process must have done nothing else."""
    layout = PoolLayout.of(SPEC, 100_000, smallest_block_tokens(SPEC, 16))
    reader = Reader(SPEC, layout, 64, ("8b",), DiskFiles(), time.monotonic)
    before, holds, times, said = _peak_mib(), [], [], ""

    def read() -> None:
        nonlocal said
        try:
            read_adapter("a", str(path), reader)
            said = "served"
        except JloraError as e:
            said = type(e).__name__

    for _ in range(ROUNDS):
        hold, took = held(read)
        holds.append(hold)
        times.append(took)
    size = sum(file.stat().st_size for file in path.iterdir())
    return {
        "bytes": size, "answer": said, "cpu_s": round(min(times), 4), "hold_ms": round(1e3 * min(holds), 1),
        "peak_mib": _peak_mib() - before,
    }  # fmt: skip


def held(work: Callable[[], object]) -> tuple[float, float]:
    """The longest time on the processor between two ticks of another thread, and all of it, while `work` runs."""
    clock, ended, longest = time.pthread_getcpuclockid(threading.get_ident()), threading.Event(), 0.0

    def tick() -> None:
        nonlocal longest
        last = time.clock_gettime(clock)
        while not ended.is_set():
            time.sleep(TICK_S)
            now = time.clock_gettime(clock)
            longest, last = max(longest, now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.thread_time()
    try:
        work()
    finally:
        took = time.thread_time() - began
        ended.set()
        ticking.join()
    return longest, took


def files(root: Path, inputs: list[Path]) -> Iterator[tuple[str, Path]]:
    """The worst adapters: by what the limits let through, and the fuzzers' slowest inputs."""
    plain = json.dumps(OPTIONS).encode()
    most = HEADER_BYTES + HEADER_BYTES_PER_MODULE * len(projections(SPEC))
    weights = _weights()
    yield "an ordinary adapter of rank 16", write(root / "plain", plain, weights)
    yield "the same, with NaN at its end", write(root / "nan", plain, weights[:-2] + b"\xff\x7f")
    yield "the longest header, of empty entries", write(root / "header", plain, _padded(most))
    yield "the longest header, nested", write(root / "nested", plain, _headed(b'{"a":' + b"[" * (most - 40) + b"}"))
    yield "a header of 1 GB, declared", write(root / "declared", plain, (1 << 30).to_bytes(8, "little") + b"{}")
    yield "the longest configuration, nested", write(root / "deep", b"[" * MAX_BYTES, weights[:64])
    tokens = {**OPTIONS, "alora_invocation_tokens": [5] * MAX_INVOCATION}
    yield "the longest invocation", write(root / "tokens", json.dumps(tokens).encode(), weights)
    ranks = {rf"layers\.{i}\.(a|b)*{i}x{{1,40}}": 4 for i in range(MAX_ENTRIES)}
    yield "1,024 patterns", write(root / "patterns", json.dumps({**OPTIONS, "rank_pattern": ranks}).encode(), weights)
    regex = {**OPTIONS, "target_modules": r"((\w|\.)+)+(a{1,30}){1,30}!"}
    yield "a pattern that takes exponential time in Python", write(root / "regex", json.dumps(regex).encode(), weights)
    for file in inputs:
        data, kind = file.read_bytes(), file.name.partition("-")[0]
        pair = (data, weights[:64]) if kind == "config" else (plain, data[1:])
        yield f"the slowest input of `{kind}`", write(root / file.name, *pair)


def write(path: Path, config: bytes, weights: bytes) -> Path:
    """An adapter's directory."""
    path.mkdir()
    (path / CONFIG).write_bytes(config)
    (path / WEIGHTS).write_bytes(weights)
    return path


def _weights() -> bytes:
    """A whole safetensors file."""
    header, at, parts = {}, 0, []
    for module, (_, projection) in projections(SPEC).items():
        width_in, width_out = SPEC.projection_shapes[projection]
        for half, shape in (("A", [RANK, width_in]), ("B", [width_out, RANK])):
            size = 2 * shape[0] * shape[1]
            name = f"base_model.model.{module}.lora_{half}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            parts.append(np.full(size // 2, 0x3A00, np.uint16).tobytes())
            at += size
    return _headed(json.dumps(header).encode()) + b"".join(parts)


def _padded(most: int) -> bytes:
    entries = b",".join(
        b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range((most - 10) // 57)
    )
    return _headed(b"{" + entries + b"}")


def _headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def _peak_mib() -> int:
    """Of this process; `getrusage` also counts the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) >> 10


if __name__ == "__main__":
    main()
