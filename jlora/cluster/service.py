"""The process of `jlora cluster`: the fleet of replicas, the controller of adapters, and the router with its fronts."""

from __future__ import annotations

import uuid
from contextlib import ExitStack

import grpc

from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory_server import DirectoryServicer
from jlora.cluster.fleet import Fleet
from jlora.cluster.found import Found
from jlora.cluster.launcher import Parts, launch, login
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.cluster.registry import Registry
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.routing.routes import policy_of
from jlora.cluster.secret import Secret
from jlora.cluster.upkeep import Upkeep
from jlora.config import Config
from jlora.ports import DiskFiles, ServerGarbage, System
from jlora.serve.backend import Backend
from jlora.serve.server import Service


def run(config: Config, fleet: Fleet) -> int:
    """Serves until a signal; returns the exit code. Raises JloraError for a bad registry, token or routing."""
    secret, policy = Secret.read(config.cluster.token_file), policy_of(config)
    system = System(files=DiskFiles(config.adapters.roots), garbage=ServerGarbage())
    with ExitStack() as opened:
        if config.cluster.controller:
            directory, services = followed(config, secret, system, opened), ()
        else:
            directory = controller(config, secret, system, opened)
            services = (_serves(directory, secret),) if secret.token else ()  # without one, whoever reaches the port
        return launch(config, Parts(fleet, directory, policy, secret.token, services))


def controller(config: Config, secret: Secret, system: System, opened: ExitStack) -> Controller:
    """The adapters of the service, in this process. Raises ConfigError."""
    registry = Registry(config.adapters.registry, system.threads)
    opened.callback(registry.close)
    found = Found(config, system)
    made = Controller(registry, found, Calls(login(config, secret.token)), system)
    opened.callback(made.close)
    upkeep = Upkeep(made, found, system)
    opened.callback(upkeep.close)
    upkeep.start()
    return made


def followed(config: Config, secret: Secret, system: System, opened: ExitStack) -> RemoteDirectory:
    """Those that the controller at `cluster.controller` has."""
    router = f"router-{uuid.uuid4().hex[:12]}"
    made = RemoteDirectory(config.cluster.controller, router, login(config, secret.token), system.threads)
    opened.callback(made.close)
    made.start()
    return made


def _serves(controller: Controller, secret: Secret) -> Service:
    """Lets further routers follow the controller, on this router's port."""

    def add(backend: Backend, server: grpc.aio.Server) -> None:
        rpc.add_DirectoryServicer_to_server(DirectoryServicer(controller, secret), server)

    return add
