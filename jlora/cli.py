"""The `jlora` command: a table of subcommands, each with its own flags and imports.

jlora serve --model DIR --adapter sql=PATH
jlora generate --model sql "How many users are there?"
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jlora import __version__
from jlora.config import nearest
from jlora.errors import JloraError
from jlora.serve.flags import Parser


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its summary and its function (arguments -> exit code)."""

    summary: str
    run: Callable[[Sequence[str]], int | None]


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


def _serve(argv: Sequence[str]) -> int:
    from jlora.serve.__main__ import main as serve

    return serve(argv)


def _generate(argv: Sequence[str]) -> int:
    from jlora.serve.console import generate

    return generate(argv)


def _chat(argv: Sequence[str]) -> int:
    from jlora.serve.console import chat

    return chat(argv)


def _top(argv: Sequence[str]) -> int:
    from jlora.serve.top import main as top

    return top(argv)


def _convert(argv: Sequence[str]) -> int:
    parser = Parser("jlora convert", "Writes a Hugging Face model as Orbax, which loads sharded and faster.")
    parser.add_argument("source", metavar="SRC", help="model directory or hub id")
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist, or be empty")
    args = parser.parse(argv)

    from jlora.model import checkpoint  # this imports jax: only after the flags are checked

    checkpoint.convert(args.source, args.target)
    print(f"wrote {args.target}: serve it with `jlora serve --model {args.target}`")
    return 0


def _bench(argv: Sequence[str]) -> int | None:
    from jlora.loadgen import commands

    if argv and argv[0] in commands.COMMANDS:
        return commands.COMMANDS[argv[0]](argv[1:])
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks").is_dir():
        print(commands.usage())
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    sys.path.insert(0, str(checkout))  # the studies lie beside the package
    return importlib.import_module("benchmarks.__main__").main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from jlora.doctor.cli import main as doctor

    return doctor(argv)


def _sim(argv: Sequence[str]) -> int:
    from jlora import machine
    from jlora.sim import cli

    parser = Parser("jlora sim", cli.DESCRIPTION)
    cli.add_flags(parser)
    return cli.run(parser.parse(argv), machine.commit)


def _demo(argv: Sequence[str]) -> int | None:
    from jlora.demo.run import main as demo

    return demo(argv)


COMMANDS: Mapping[str, Command] = {
    "serve": Command("serve a model and its adapters over gRPC", _serve),
    "generate": Command("one text from a running server, streamed", _generate),
    "chat": Command("talk to a running server", _chat),
    "top": Command("watch a running server: tiers, adapters, requests", _top),
    "convert": Command("write a model in the form that loads fastest", _convert),
    "bench": Command("measure a running server; from a checkout, run a study", _bench),
    "doctor": Command("check and measure this accelerator", _doctor),
    "sim": Command("simulate cache policies on hardware that you name", _sim),
    "demo": Command("start the built-in model with its adapters and show them at work", _demo),
}

if __name__ == "__main__":
    sys.exit(main())
