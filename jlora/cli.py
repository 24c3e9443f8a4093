"""The `jlora` command: a table of subcommands, each with its own flags and imports.

jlora serve --model DIR --adapter sql=PATH
jlora generate --model sql "How many users are there?"
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jlora import __version__
from jlora.config import unknown
from jlora.errors import FailedPrecondition, JloraError
from jlora.serve.flags import Parser

# Command -> its summary and its function, `module:name`, imported when it runs.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("serve a model and its adapters over gRPC", "jlora.serve.launcher:main"),
    "cluster": ("serve from many replicas behind one router", "jlora.cluster.cli:main"),
    "generate": ("one text from a running server, streamed", "jlora.serve.console:generate"),
    "chat": ("talk to a running server", "jlora.serve.console:chat"),
    "health": ("whether a server is ready, as an exit code", "jlora.serve.console:health"),
    "top": ("watch a running server: tiers, adapters, requests", "jlora.serve.top:main"),
    "keys": ("make API keys for a server", "jlora.serve.access.cli:main"),
    "convert": ("write a model in the form that loads fastest", "jlora.cli:convert"),
    "compile": ("prepare a directory of compiled programs for an image", "jlora.serve.compile:main"),
    "bench": ("measure servers under load; from a checkout, run a study", "jlora.cli:bench"),
    "doctor": ("check and measure this accelerator", "jlora.doctor.cli:main"),
    "sim": ("simulate cache policies on hardware that you name, or faults", "jlora.cli:simulate"),
    "demo": ("start the built-in model with its adapters and show them at work", "jlora.demo.run:main"),
}
USAGE = """usage: jlora COMMAND [flags]

One Llama, many LoRA adapters, one process.

commands:
{commands}

jlora COMMAND --help shows a command's flags; jlora --version the version."""

# What `jlora bench` can do without a checkout.
BENCH: Mapping[str, str] = {"serve": "jlora.loadgen.cli:main", "workloads": "jlora.loadgen.workloads:main"}
BENCH_USAGE = """usage: jlora bench COMMAND [flags]

  serve      play a workload to servers, in turn
  workloads  print what the workloads are like

The studies behind docs/results (throughput, latency, policies, ...) are no part of the package.
Clone the repository, run `make setup`, then `.venv/bin/jlora bench STUDY` there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jlora COMMAND ...`; returns the exit code (2: the command line is wrong)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        lines = (f"  {name:<10} {summary}" for name, (summary, _) in COMMANDS.items())
        print(USAGE.format(commands="\n".join(lines)))
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"jlora {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        print(f"jlora: {unknown('command', name, [*COMMANDS, '--version'])} (see jlora --help)", file=sys.stderr)
        return 2
    try:
        code = _run(COMMANDS[name][1], rest)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `jlora sim | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 141  # as of a process that SIGPIPE ends
    except JloraError as e:
        print(f"jlora {name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _run(target: str, argv: Sequence[str]) -> int:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(argv) or 0


def convert(argv: Sequence[str]) -> int:
    """`jlora convert`; returns the exit code."""
    parser = Parser("jlora convert", "Writes a Hugging Face model as Orbax, which loads sharded and faster.")
    parser.add_argument("source", metavar="SRC", help="model directory or hub id")
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist, or be empty")
    parser.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS", help="longest context to serve later")
    args = parser.parse(argv)

    from jlora.model import checkpoint  # this imports jax: only after the flags are checked

    checkpoint.convert(args.source, args.target, max_model_len=args.max_model_len)
    print(f"wrote {args.target}: serve it with `jlora serve --model {args.target}`")
    return 0


def bench(argv: Sequence[str]) -> int:
    """`jlora bench`: a command of the load generator, or a study of the checkout; returns the exit code."""
    if argv and argv[0] in BENCH:
        return _run(BENCH[argv[0]], argv[1:])
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks").is_dir():
        print(BENCH_USAGE)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    sys.path.insert(0, str(checkout))  # the studies lie beside the package
    try:
        return _run("benchmarks.__main__:main", argv)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] in ("", "jlora", "benchmarks"):  # a fault of ours
            raise
        raise FailedPrecondition(f"needs {e.name}: run `pip install -e '.[bench]'` in {checkout}") from e


def simulate(argv: Sequence[str]) -> int:
    """`jlora sim`; returns the exit code."""
    if argv and argv[0] == "faults":
        return faults(argv[1:])

    from jlora import machine
    from jlora.sim import cli

    parser = Parser("jlora sim", cli.DESCRIPTION)
    cli.add_flags(parser)
    return cli.run(parser.parse(argv), machine.commit)


def faults(argv: Sequence[str]) -> int:
    """`jlora sim faults`; returns the exit code."""
    from jlora.sim.world import cli

    parser = Parser("jlora sim faults", cli.DESCRIPTION)
    cli.add_flags(parser)
    return cli.run(parser.parse(argv))


if __name__ == "__main__":
    sys.exit(main())
