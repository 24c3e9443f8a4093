"""`jlora bench compare OLD NEW`: two commits of jlora, study by study, in interleaved rounds.

OLD and NEW are commits of this repository, checked out for the time of the measurement, or directories
with a checkout. Each side runs its own studies in a process of its own, without peers, on the same
weights:

    throughput (R1), latency (R1b), llama (R2), host, startup

A study without llama.cpp or PEFT measures jlora alone. Prints, for everything that a study times, both
medians, the ratio inside a round, and each side's control; --out keeps the rounds as JSON lines.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import tables
from benchmarks.records import read
from benchmarks.report import markdown
from benchmarks.runner import Options
from jlora.errors import ConfigError
from jlora.loadgen.rounds import Sample, Side

ROOT = Path(__file__).resolve().parents[1]
STUDIES: Mapping[str, int] = {"throughput": 1, "latency": 3, "llama": 1, "host": 3, "startup": 1}  # rounds in a process


def run(options: Options) -> None:
    """Measures all studies asked for, and prints a table. Raises ConfigError, RuntimeError."""
    if len(options.commits) != 2:
        raise ConfigError("compare: give two commits or directories, OLD and NEW")
    if unknown := [name for name in options.studies if name not in STUDIES]:
        raise ConfigError(f"--studies {unknown[0]}: must be of {', '.join(STUDIES)}")
    with checkout(options.commits[0]) as old, checkout(options.commits[1]) as new:
        trees = {"old": old, "new": new}
        settings = {"old": commit(old), "new": commit(new), "quick": options.quick}
        name = "-".join(("compare", *options.studies, options.dtype))
        records = options.records(name, settings)
        for study in options.studies or STUDIES:
            sides = [Side(side, lambda t=tree, s=study: measured(options, t, s)) for side, tree in trees.items()]
            records.measure(study, sides, options.budget(5), alternate=True)
    print(markdown(tables.compare(read(options.out / f"{name}.jsonl"))))


@contextmanager
def checkout(what: str) -> Iterator[Path]:
    """A directory, or a commit in a worktree of its own; with bytecode, which a study's process may not write."""
    if Path(what).is_dir():
        yield _compiled(Path(what).resolve())
        return
    with TemporaryDirectory() as home:
        tree = Path(home) / "jlora"
        _git(ROOT, "worktree", "add", "--detach", str(tree), what)
        try:
            yield _compiled(tree)
        finally:
            _git(ROOT, "worktree", "remove", "--force", str(tree))


def _compiled(tree: Path) -> Path:
    for package in ("jlora", "benchmarks"):
        compileall.compile_dir(tree / package, quiet=2)
    return tree


def measured(options: Options, tree: Path, study: str) -> Sample:
    """One process of a study in a checkout: medians of everything it times, by side and name."""
    with TemporaryDirectory() as out:
        words = [study, "--rounds", str(STUDIES[study]), "--dtype", options.dtype, "--no-grpc", "--out", out]
        words += ["--work", str(options.work.resolve()), *(["--quick"] if options.quick else [])]
        words += [word for key, value in options.settings.items() for word in ("--set", f"{key}={value}")]
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks", *words]
        done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(f"{study} in {tree}: ended with code {done.returncode}: {last}")
        (file,) = Path(out).glob("*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    found: dict[str, list[float]] = {}
    for line in (line for line in lines if line["cell"] == "rounds"):
        for key in (key for key in line if key == "seconds" or key.endswith("_s")):
            found.setdefault(f"{line['side']} {key}", []).append(line[key])
    return {name: statistics.median(values) for name, values in found.items()}


def commit(tree: Path) -> str:
    """The commit of a checkout; where files were changed, a plus sign and what the changes are.

    A measurement goes on with its earlier rounds only if both trees are the same.
    """
    found = _git(tree, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    new = _git(tree, "ls-files", "--others", "--exclude-standard", "--", "jlora/*.py", "benchmarks/*.py").split("\n")
    changes = _git(tree, "diff", "HEAD") + "".join(f"{name}\n{(tree / name).read_text()}" for name in new if name)
    return f"{found.removesuffix('+')}+{sha256(changes.encode()).hexdigest()[:8]}" if changes else found


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
