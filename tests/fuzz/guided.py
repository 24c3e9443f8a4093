"""The same targets under Atheris, that is libFuzzer: slower for each input, and better at what comparisons ask for.

    pip install atheris                                   # wheels for Linux on x86-64, Python 3.11 to 3.13
    python -m tests.fuzz.guided config --inputs 100000 --seed 1

It takes one target, and prints and records what `python -m tests.fuzz` does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]

with atheris.instrument_imports(include=["jlora"]):  # before anything else imports jlora
    from tests.fuzz import _corpus
    from tests.fuzz.__main__ import ended, parsed
    from tests.fuzz._engine import MOST, Report, name_of
    from tests.fuzz._targets import TARGETS


def main() -> None:
    args = parsed()
    (name,) = args.targets
    target, began = TARGETS[name](), time.monotonic()
    report = Report(name, args.seed, engine="atheris")

    def one(data: bytes) -> None:
        report.take(target, data)
        report.seconds = time.monotonic() - began
        if report.inputs >= args.inputs or report.seconds > args.seconds:
            code = ended(report, args)
            sys.stdout.flush()
            os._exit(code)  # libFuzzer has no other end

    seeds = Path(tempfile.mkdtemp(prefix="jlora-seeds-"))
    for data in (*target.seeds, *_corpus.load(name)):
        (seeds / name_of(data)).write_bytes(data)
    atheris.Setup([sys.argv[0], str(seeds), f"-seed={args.seed}", f"-max_len={MOST}", "-verbosity=0"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
