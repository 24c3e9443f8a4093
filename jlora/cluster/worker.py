"""A replica's process: `jlora serve` with the services of the cluster on its port.

Whoever has the cluster's token may do everything at a replica, also by its public services. Without a token it
serves this machine alone.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from jlora import config as configuration
from jlora.cluster.fleet import ROUTERS
from jlora.cluster.launcher import login
from jlora.cluster.link import LinkServicer
from jlora.cluster.peer import Fetcher, PeerServicer
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.secret import Secret
from jlora.config import Config, ServeConfig
from jlora.errors import JloraError
from jlora.serve import flags, launcher
from jlora.serve.backend import Backend
from jlora.serve.launcher import Program

if TYPE_CHECKING:
    from jlora.engine.local import LocalReplica

COMMAND = "jlora cluster replica"
DESCRIPTION = """Serves one replica of a service of many, for the routers that have its token.

Takes the flags of `jlora serve`. Keys, the HTTP port and the names of adapters are the routers'."""
# A request that goes on carries its output, too: up to `jlora.validation.MAX_ENTRIES` tokens of three bytes.
OUTPUT_MIB = 8.0
MOST_MIB = 2047.0  # of a gRPC message


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a replica until a signal, with the flags of `jlora serve`; returns the process's exit code."""
    config = parse(argv)
    config = configuration.replace(config, {**ROUTERS, "serve.max_request_mib": largest_mib(config.serve)})
    try:
        return launcher.ended(launcher.run(config, program(config)))
    except JloraError as e:
        print(f"{COMMAND}: cannot start: {e}", file=sys.stderr, flush=True)
        return 1


def largest_mib(config: ServeConfig) -> float:
    """The largest message of a router, in MiB: its client's message, and what the request has delivered."""
    return min(config.max_request_mib + OUTPUT_MIB, MOST_MIB)


def parse(argv: Sequence[str] | None) -> Config:
    """The configuration of a command line. An error exits with code 2 and one line on stderr."""
    made = flags.parser(COMMAND, DESCRIPTION)
    made.add_argument(
        "--token-file", metavar="FILE", help="the secret that routers and replicas share [cluster.token_file]"
    )
    args = made.parse(sys.argv[1:] if argv is None else argv)
    if args.token_file is not None:
        args.set.append(f"cluster.token_file={args.token_file}")
    try:
        return flags.config_of(args)
    except JloraError as e:
        made.error(str(e))


def program(config: Config) -> Program:
    """What the process serves. Raises ConfigError for a token that cannot be read."""
    secret = Secret.read(config.cluster.token_file)
    name = config.cluster.replica or socket.gethostname()

    def add(backend: Backend, server: grpc.aio.Server) -> None:
        fetcher = Fetcher(lambda: engine(backend), login(config, secret.token))
        link = LinkServicer(backend, name, secret, fetcher.adopt, lambda: engine(backend).records(), fetcher)
        rpc.add_LinkServicer_to_server(link, server)
        rpc.add_PeerServicer_to_server(PeerServicer(lambda: engine(backend), secret, fetcher.adopt), server)

    return dataclasses.replace(launcher.ENGINE, name=COMMAND, services=(add,), token=secret.token)


def engine(backend: Backend) -> LocalReplica:
    """The replica of this process. Raises Unavailable while it loads."""
    from jlora.engine.local import LocalReplica  # it imports jax: only after the flags are checked

    replica = backend.loaded
    assert isinstance(replica, LocalReplica)
    return replica


if __name__ == "__main__":
    sys.exit(main())
