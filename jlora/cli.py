"""The `jlora` command: a table of subcommands, each with its own flags and imports.

jlora serve --model DIR --adapter sql=PATH
jlora generate --model sql "How many users are there?"
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jlora import __version__
from jlora.config import nearest
from jlora.errors import JloraError
from jlora.serve.flags import Parser


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its summary and its function, `module:name`, imported when it runs."""

    summary: str
    target: str

    def run(self, argv: Sequence[str]) -> int | None:
        """Runs it; returns the exit code, None for 0."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jlora COMMAND ...`; returns the exit code (2: the command line is wrong)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"jlora {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        print(f"jlora: unknown command {name!r}: the nearest valid one is {near!r} (see jlora --help)", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name].run(rest) or 0
    except JloraError as e:
        print(f"jlora {name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def usage() -> str:
    """The text of `jlora --help`."""
    lines = [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: jlora COMMAND [flags]", "", "One Llama, many LoRA adapters, one process.", "", "commands:"]
        + lines
        + ["", "jlora COMMAND --help shows a command's flags; jlora --version the version."]
    )


def convert(argv: Sequence[str]) -> int:
    """`jlora convert`; returns the exit code."""
    parser = Parser("jlora convert", "Writes a Hugging Face model as Orbax, which loads sharded and faster.")
    parser.add_argument("source", metavar="SRC", help="model directory or hub id")
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist, or be empty")
    args = parser.parse(argv)

    from jlora.model import checkpoint  # this imports jax: only after the flags are checked

    checkpoint.convert(args.source, args.target)
    print(f"wrote {args.target}: serve it with `jlora serve --model {args.target}`")
    return 0


def bench(argv: Sequence[str]) -> int | None:
    """`jlora bench`: a command of the load generator, or a study of the checkout; returns the exit code."""
    from jlora.loadgen import commands

    if argv and argv[0] in commands.COMMANDS:
        return commands.COMMANDS[argv[0]](argv[1:])
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks").is_dir():
        print(commands.usage())
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    sys.path.insert(0, str(checkout))  # the studies lie beside the package
    return importlib.import_module("benchmarks.__main__").main(argv)


def simulate(argv: Sequence[str]) -> int:
    """`jlora sim`; returns the exit code."""
    from jlora import machine
    from jlora.sim import cli

    parser = Parser("jlora sim", cli.DESCRIPTION)
    cli.add_flags(parser)
    return cli.run(parser.parse(argv), machine.commit)


COMMANDS: Mapping[str, Command] = {
    "serve": Command("serve a model and its adapters over gRPC", "jlora.serve.__main__:main"),
    "generate": Command("one text from a running server, streamed", "jlora.serve.console:generate"),
    "chat": Command("talk to a running server", "jlora.serve.console:chat"),
    "top": Command("watch a running server: tiers, adapters, requests", "jlora.serve.top:main"),
    "convert": Command("write a model in the form that loads fastest", "jlora.cli:convert"),
    "bench": Command("measure a running server; from a checkout, run a study", "jlora.cli:bench"),
    "doctor": Command("check and measure this accelerator", "jlora.doctor.cli:main"),
    "sim": Command("simulate cache policies on hardware that you name", "jlora.cli:simulate"),
    "demo": Command("start the built-in model with its adapters and show them at work", "jlora.demo.run:main"),
}

if __name__ == "__main__":
    sys.exit(main())
