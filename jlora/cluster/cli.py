"""`jlora cluster`: a service of many replicas, one replica of it, and a look at it.

jlora cluster --config configs/cluster.toml
jlora cluster replica --model DIR --port 50052
jlora cluster status 127.0.0.1:50051
jlora cluster plan --trace mine.csv --slo-ms 50
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import grpc
from rich.console import Console

from jlora import config as configuration
from jlora.cluster.child import REPLICA
from jlora.cluster.fleet import Fleet, LocalFleet, StaticFleet
from jlora.cluster.ray_process import RayFleet, write
from jlora.cluster.scratch import Scratch
from jlora.config import Config
from jlora.errors import ConfigError, JloraError, Unavailable
from jlora.ports import OsThreads, Threads
from jlora.serve import client, flags, top
from jlora.serve.client import Login, connect
from jlora.serve.flags import Parser
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

DESCRIPTION = """Serves one Llama with many LoRA adapters from several replicas behind one router.

Starts the replicas, then prints `jlora cluster ready grpc=HOST:PORT ...`. Clients see no difference to `jlora serve`.
SIGTERM or Ctrl-C lets running requests end, and ends the replicas that this command started.

  jlora cluster replica ...        one replica, for a static fleet; flags of `jlora serve`
  jlora cluster status [ADDRESS]   the replicas behind a router
  jlora cluster plan ...           how many replicas a trace needs, by simulation"""

# Configuration key, flag, metavar, help.
FLAGS = (
    ("cluster.replicas", "--replicas", "N", "replicas to start (default 1)"),
    ("cluster.fleet", "--fleet", "KIND", "who runs them: local, ray or static (default local)"),
    ("cluster.routing", "--routing", "NAME", "how a request's replica is chosen (default sticky)"),
    ("cluster.placement", "--placement", "NAME", "who brings adapters ahead: off, loraserve or dlora (default off)"),
    ("cluster.addresses", "--addresses", "HOST:PORT,...", "of a static fleet; DNS names are followed"),
    ("cluster.ray_address", "--ray-address", "HOST:PORT", "Ray's head (default: a Ray of this machine alone)"),
    ("cluster.token_file", "--token-file", "FILE", "the secret that routers and replicas share"),
)
COMMANDS = ("replica", "status", "plan")
TIMEOUT_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Runs `jlora cluster`; returns the exit code."""
    if argv[:1] == ["replica"]:
        from jlora.cluster import worker  # only a replica imports jax

        return worker.main(argv[1:])
    if argv[:1] == ["plan"]:
        # By its name: the simulator stands on this room, not the other way round.
        return importlib.import_module("jlora.sim.plan").main(argv[1:])
    if argv[:1] == ["status"]:
        return status(argv[1:])
    if argv and not argv[0].startswith("-"):
        told = configuration.unknown("command", argv[0], COMMANDS)
        print(f"jlora cluster: {told} (see jlora cluster --help)", file=sys.stderr)
        return 2
    config = parse(argv)
    from jlora.cluster import service

    with secret(config) as config:
        threads = OsThreads()
        return service.run(config, fleet_of(config, threads), threads)


def parse(argv: Sequence[str]) -> Config:
    """The configuration of a command line. An error exits with code 2 and one line on stderr."""
    made = flags.parser("jlora cluster", DESCRIPTION)
    for key, name, metavar, help in FLAGS:
        made.add_argument(name, dest=key, metavar=metavar, help=f"{help} [{key}]")
    made.add_argument(
        "--resources",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=AMOUNT",
        help="what Ray sets aside for each replica, as in CPU=4 GPU=1 [cluster.resources]",
    )
    args = made.parse(argv)
    args.set += [f"{key}={getattr(args, key)}" for key, *_ in FLAGS if getattr(args, key) is not None]
    args.set += [f"cluster.resources.{entry}" for entry in args.resources]
    try:
        return _checked(flags.config_of(args))
    except JloraError as e:
        made.error(str(e))


def _checked(config: Config) -> Config:
    if config.cluster.fleet == "static" and not config.cluster.addresses:
        raise ConfigError("cluster.addresses is not set: a static fleet needs the addresses of its replicas")
    if config.cluster.replica:
        told = f"cluster.replica = {config.cluster.replica!r}: each replica gets a name of its own"
        raise ConfigError(f"{told}; their number is cluster.replicas")
    if config.engine.merge not in ("off", "auto"):
        told = f"engine.merge = {config.engine.merge!r}: names no adapter at replicas"
        raise ConfigError(f"{told}, which know versions of adapters; must be off or auto")
    return config


@contextmanager
def secret(config: Config) -> Iterator[Config]:
    """The configuration with a secret of the service; one that is made here ends with the context."""
    if config.cluster.token_file or config.cluster.fleet == "static":
        yield config
        return
    with closing(Scratch()) as scratch:
        path = write(scratch.path, secrets.token_urlsafe(32))
        yield configuration.replace(config, {"cluster.token_file": path})


def fleet_of(config: Config, threads: Threads | None = None, module: str = REPLICA) -> Fleet:
    """The fleet that the configuration asks for. Raises ConfigError without the extra that it needs.

    `module`: what each process that it starts runs, see `jlora.cluster.child`.
    """
    if config.cluster.fleet == "static":
        return StaticFleet(config.cluster, threads)
    if config.cluster.fleet == "local":
        return LocalFleet(config, module, threads)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("cluster.fleet = ray: needs Ray: pip install 'jlora[ray]'")
    return RayFleet(config, module, threads)


def status(argv: Sequence[str]) -> int:
    """Prints the replicas behind a router; 1 if none is up."""
    parser = Parser("jlora cluster status", "Shows the replicas behind a router. The exit code is 1 if none is up.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", metavar="ADDRESS", help="HOST:PORT")
    client.add_flags(parser.add_argument)
    args = parser.parse(argv)
    with connect(args.address, Login.of(args)) as channel:
        info = _info(channel, args.address)
    width = None if sys.stdout.isatty() else top.FILE_COLUMNS
    Console(highlight=False, width=width).print(top.members_table(info.replicas))
    return 0 if any(replica.health == "up" for replica in info.replicas) else 1


def _info(channel: grpc.Channel, address: str) -> pb.ServerInfo:
    info = rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    if not info.replicas:
        raise Unavailable(f"{address}: has no replicas, or does not show them to a key that is not of the role viewer")
    return info
