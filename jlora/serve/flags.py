"""The flags of `jlora serve`. Each flag is a name for a configuration key.

`parse(argv)` returns the `Config`: flags override `--set`, which overrides the file of `--config`.
This module never imports jax, so that an error in the command line takes no time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jlora import config as configuration
from jlora.adapters.names import at_start, check_base_name
from jlora.config import Config
from jlora.errors import ConfigError, JloraError
from jlora.ports import DiskFiles


class _Once(argparse.Action):
    """Stores a value. A second one is an error: it would silently replace the first."""

    given = False

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        if flag and self.given:  # positional arguments have no flag
            parser.error(f"{flag}: is given twice")
        self.given = True
        setattr(args, self.dest, values)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations and repeated flags; an error is one line and names the nearest valid flag."""

    def __init__(self, prog: str, description: str):
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.register("action", None, _Once)
        self.register("action", "store", _Once)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, rest = self.parse_known_intermixed_args(argv)
        if rest:
            flag = next((r.partition("=")[0] for r in rest if r.startswith("-")), None)
            if flag is None:
                self.error(f"unexpected argument {rest[0]!r}")
            self.error(self._unknown(flag))
        return args

    def _unknown(self, flag: str) -> str:
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        word = flag.lstrip("-").replace("-", "_")
        key = next((key for key in configuration.keys() if word in (key, key.partition(".")[2])), "")
        if key and "--set" in known and (word == key or not configuration.nearest(flag, known)):
            return f"unknown flag {flag!r}: give --set {key}=VALUE"
        return configuration.unknown("flag", flag, known)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


# Configuration key, names of its flag (the later ones are those of other servers), metavar, help.
FLAGS = (
    ("model.path", ("--model",), "DIR_OR_ID", "model directory (Hugging Face or converted), or hub id"),
    ("model.name", ("--served-model-name",), "NAME", "the base model's name for clients (default: from --model)"),
    ("model.dtype", ("--dtype",), "TYPE", "auto (the checkpoint's own), float32 or bfloat16 (default auto)"),
    ("model.tp", ("--tp", "--tensor-parallel-size"), "N", "devices that share the model (default 1)"),
    ("model.max_model_len", ("--max-model-len",), "TOKENS", "longest context (default: the model's own)"),
    ("model.seed", ("--seed",), "N", "seed of requests without one (default 0)"),
    ("adapters.dir", ("--adapter-dir",), "DIR", "serve every subdirectory with an adapter, in place of adapters.dir"),
    ("adapters.max_rank", ("--max-lora-rank",), "N", "refuse adapters of a higher rank (default 256)"),
    ("serve.host", ("--host",), "HOST", "address to listen on (default 127.0.0.1)"),
    ("serve.port", ("--port",), "PORT", "gRPC port, 0 takes a free one (default 50051)"),
    ("serve.keys", ("--keys",), "FILE.toml", "file of API keys; `jlora keys new` makes them (default: none)"),
    ("serve.http_port", ("--http-port",), "PORT", "port of OpenAI's HTTP, 0 takes a free one (default: none)"),
)

DESCRIPTION = """Serves one Llama with many LoRA adapters over gRPC and HTTP.

Prints `jlora ready grpc=HOST:PORT [http=HOST:PORT] model=... adapters=N blocks=N` when it is ready. SIGTERM or
Ctrl-C lets running requests end within serve.drain_s seconds (default 30); a second one exits at once."""


def parser(prog: str, description: str) -> Parser:
    """A parser of these flags; `config_of` reads what it returns."""
    made = Parser(prog, description)
    for key, names, metavar, help in FLAGS:
        made.add_argument(*names, dest=key, metavar=metavar, help=f"{help} [{key}]")
    made.add_argument(
        "--insecure",
        dest="serve.insecure",
        action="store_const",
        const="true",
        help="without keys, serve other machines too [serve.insecure]",
    )
    made.add_argument(
        "--adapter",
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help="PEFT directories to load at start; may be repeated [adapters.paths]",
    )
    made.add_argument("--config", metavar="FILE.toml", help="configuration file; flags and --set override it")
    made.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="section.key=value",
        help="any configuration key; may be repeated. Keys: " + ", ".join(configuration.keys()),
    )
    return made


def parse(argv: Sequence[str] | None = None) -> Config:
    """The configuration of a command line. An error exits with code 2 and one line on stderr."""
    made = parser("jlora serve", DESCRIPTION)
    args = made.parse(sys.argv[1:] if argv is None else argv)
    try:
        return config_of(args)
    except JloraError as e:
        made.error(str(e))


def config_of(args: argparse.Namespace) -> Config:
    """The configuration of parsed flags. Raises JloraError, which names the flag or the key."""
    given = vars(args)
    config = configuration.load(given["config"], _overrides(given))
    if not config.model.path:
        raise ConfigError("model.path is not set: give --model DIR_OR_ID")
    if config.model.name:  # otherwise it is the directory's, unknown so far
        check_base_name(config.model.name)
    adapters, files = config.adapters, DiskFiles(config.adapters.roots)
    at_start(adapters.paths, adapters.dir, files, adapters.lazy)  # a wrong directory or name shows at once
    return config


def _overrides(args: dict[str, Any]) -> dict[str, str]:
    """`section.key` -> value; flags win over --set."""
    overrides: dict[str, str] = {}
    for flag, form, prefix in (("--set", "section.key=value", ""), ("--adapter", "NAME=PATH", "adapters.paths.")):
        for text in args[flag[2:]]:
            name, equals, value = text.partition("=")
            if not (name and equals and (value or not prefix)):
                raise ConfigError(f"{flag} {text}: must be {form}")
            if prefix + name in overrides:
                raise ConfigError(f"{flag} {name}: is given twice")
            overrides[prefix + name] = value
    given = (*(key for key, *_ in FLAGS), "serve.insecure")
    return overrides | {key: args[key] for key in given if args[key] is not None}
