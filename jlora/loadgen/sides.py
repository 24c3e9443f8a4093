"""The servers of a load run: those that run already, and those started here, one per configuration."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jlora.errors import ConfigError
from jlora.loadgen.checkpoints import LLAMA_100M, SMALL, TINY, write_adapter, write_model
from jlora.loadgen.server import Server, ServerProcess, flags_of, look
from jlora.serve import client
from jlora.serve.client import Login
from jlora.serve.flags import Parser
from jlora.sim.trace import Trace
from jlora.sim.workloads import mixes

RANDOM = {spec.name: spec for spec in (TINY, SMALL, LLAMA_100M)}


def add_flags(made: Parser) -> None:
    """The flags that name servers and start them."""
    add = made.add_argument
    add("--target", nargs="+", action="extend", default=[], metavar="[NAME=]HOST:PORT", help="running servers")
    client.add_flags(add)
    add("--config", action="append", default=[], metavar="NAME=FILE|SETS", help="a server to start here")
    add("--model", default=SMALL.name, metavar="DIR", help=f"for --config: a directory or {', '.join(RANDOM)}")
    add("--set", nargs="+", action="extend", default=[], metavar="SECTION.KEY=VALUE", help="for every --config")
    add("--random-adapters", type=int, default=8, metavar="N", help="of a random model (default 8)")
    add("--ranks", default="4,8", metavar="MIX", help="of random adapters: 4,8 or hot:4,8 (default 4,8)")
    add("--work", type=Path, default=Path("build/bench"), help="random weights and unfinished runs")


@contextmanager
def servers(args: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """All sides by name; those started here end with the block.

    Raises:
        ConfigError: a flag is wrong, two sides have one name, or there is no side.
        RuntimeError: a server does not answer or does not start.
    """
    targets = dict(_target(text) for text in args.target)
    configs = dict(_config(text) for text in args.config)
    if len(targets.keys() | configs.keys()) < len(args.target) + len(args.config):
        raise ConfigError("--target, --config: two sides have one name")
    if not targets and not configs:
        raise ConfigError("nothing to measure: give --target HOST:PORT or --config NAME=...")
    with ExitStack() as stack:
        base = [*_weights(args), *flags_of({}, _pairs("--set", args.set))] if configs else []
        for name, flags in configs.items():
            print(f"starting {name}", flush=True)
            targets[name] = stack.enter_context(ServerProcess([*base, *flags])).address
        login = Login.of(args)
        yield {name: asyncio.run(look(address, login)) for name, address in targets.items()}


def _target(text: str) -> tuple[str, str]:
    name, equals, address = text.rpartition("=")
    if ":" not in address:
        raise ConfigError(f"--target {text}: must be HOST:PORT or NAME=HOST:PORT")
    return (name if equals else address), address


def _config(text: str) -> tuple[str, list[str]]:
    """A side's name, and the server's flags: a TOML file, or settings with commas between them."""
    name, equals, rest = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--config {text}: must be NAME=FILE.toml or NAME=section.key=value,...")
    if rest.endswith(".toml"):
        return name, ["--config", rest]
    return name, flags_of({}, _pairs(f"--config {text}", filter(None, rest.split(","))))


def _pairs(flag: str, items: Iterator[str] | Sequence[str]) -> Mapping[str, str]:
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"{flag}: setting {item!r} must be section.key=value")
        found[key] = value
    return found


def _weights(args: argparse.Namespace) -> list[str]:
    """`--model` and `--adapter` flags. Writes what is random, unless it is there."""
    if args.model not in RANDOM:
        return ["--model", args.model]
    spec, directory = RANDOM[args.model], args.work / args.model
    write_model(directory, spec, seed=0)
    names = [f"a{i}" for i in range(args.random_adapters)]
    paths = {}
    for i, rank in enumerate(mixes.ranks_of(args.ranks, Trace("", (), tuple(names)), args.seed)):
        paths[names[i]] = str(directory / "adapters" / f"{names[i]}-{rank}")
        write_adapter(Path(paths[names[i]]), spec, rank, seed=1000 + i)
    return ["--model", str(directory), "--served-model-name", args.model, *flags_of(paths, {})]
