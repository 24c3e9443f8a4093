"""The process of `jlora cluster`: the fleet of replicas, the controller of adapters, and the router with its fronts."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from pathlib import Path

import grpc

from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory_server import DirectoryServicer, Placed
from jlora.cluster.fleet import Fleet
from jlora.cluster.found import Found
from jlora.cluster.launcher import Parts, launch, login
from jlora.cluster.placing import Placing, Steps
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.cluster.registry import Registry
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.routing.policy import Policy
from jlora.cluster.routing.routes import policy_of
from jlora.cluster.routing.table import Table
from jlora.cluster.secret import Secret
from jlora.cluster.upkeep import Upkeep
from jlora.config import Config
from jlora.ports import DiskFiles, OsThreads, ServerGarbage, System, Threads
from jlora.serve.backend import Backend
from jlora.serve.server import Service
from jlora.step_model import FittedSteps


def run(config: Config, fleet: Fleet, threads: Threads | None = None) -> int:
    """Serves until a signal; returns the exit code. Raises JloraError for a bad registry, token or routing.

    The failure of one of the `threads`, of which the fleet's are some, ends the process.
    """
    secret, policy = Secret.read(config.cluster.token_file), policy_of(config)
    files = DiskFiles(config.adapters.roots)
    system = System(files=files, threads=threads or OsThreads(), garbage=ServerGarbage())
    with ExitStack() as opened:
        if config.cluster.controller:
            directory, services = followed(config, secret, system, opened, policy), ()
        else:
            directory, placed = controller(config, secret, system, opened, policy)
            # Not without a token, whoever reaches the port.
            services = (_serves(directory, secret, placed),) if secret.token else ()
        return launch(config, Parts(fleet, directory, policy, system.threads, secret.token, services))


def controller(
    config: Config, secret: Secret, system: System, opened: ExitStack, policy: Policy
) -> tuple[Controller, Placed]:
    """The adapters of the service, in this process, and where they are if the policy routes by a table.

    Raises ConfigError.
    """
    registry = Registry(config.adapters.registry, system.threads)
    opened.callback(registry.close)
    found = Found(config, system)
    made = Controller(registry, found, Calls(login(config, secret.token)), system)
    opened.callback(made.close)
    upkeep = Upkeep(made, found, system)
    opened.callback(upkeep.close)
    upkeep.start()
    if not isinstance(policy, Table):
        return made, lambda: None
    fitted = FittedSteps.read(Path(config.engine.step_model))
    placing = Placing(made, found, policy, Steps(fitted, config.cluster.placement_s, config.cluster.slo_s), system)
    opened.callback(placing.close)
    placing.start()
    return made, placing.places


def followed(config: Config, secret: Secret, system: System, opened: ExitStack, policy: Policy) -> RemoteDirectory:
    """Those that the controller at `cluster.controller` has, and where it has placed them."""
    router = f"router-{uuid.uuid4().hex[:12]}"
    made = RemoteDirectory(config.cluster.controller, router, login(config, secret.token), system.threads)
    if isinstance(policy, Table):
        made.placed = policy.place
    opened.callback(made.close)
    made.start()
    return made


def _serves(controller: Controller, secret: Secret, placed: Placed) -> Service:
    """Lets further routers follow the controller, on this router's port."""

    def add(backend: Backend, server: grpc.aio.Server) -> None:
        rpc.add_DirectoryServicer_to_server(DirectoryServicer(controller, secret, placed), server)

    return add
