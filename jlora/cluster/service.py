"""The process of `jlora cluster`: the fleet of replicas, the controller of adapters, and the router with its fronts."""

from __future__ import annotations

import logging
import uuid
from contextlib import ExitStack
from pathlib import Path

import grpc

from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory_server import DirectoryServicer, Placed
from jlora.cluster.fleet import Fleet
from jlora.cluster.found import Found
from jlora.cluster.homes import Rule
from jlora.cluster.launcher import Parts, launch, login
from jlora.cluster.placing import Placing, Steps
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.cluster.registry import Registry
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.routing.policy import Policy
from jlora.cluster.routing.routes import LORASERVE, UNFITTED, policy_of
from jlora.cluster.routing.table import Table
from jlora.cluster.secret import Secret
from jlora.cluster.upkeep import Upkeep
from jlora.config import Config
from jlora.engine.futures import done
from jlora.errors import ConfigError
from jlora.ports import DiskFiles, OsThreads, ServerGarbage, System, Threads
from jlora.serve.backend import Backend
from jlora.serve.server import Service
from jlora.step_model import FittedSteps

log = logging.getLogger(__name__)


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
            known = directory.known
        else:
            directory, found = controller(config, secret, system, opened)
            places = placed(config, directory, found, system, opened, policy)
            # Not without a token, whoever reaches the port.
            services = (_serves(directory, secret, places),) if secret.token else ()
            known = done(None)
        return launch(config, Parts(fleet, directory, policy, system.threads, secret.token, services, known))


def placed(
    config: Config, controller: Controller, found: Found, system: System, opened: ExitStack, policy: Policy
) -> Placed:
    """Begins the placement that the configuration asks for; where requests go by it. Raises ConfigError."""
    steps = steps_of(config)
    if steps is None:
        return lambda: None
    table = policy if isinstance(policy, Table) else Table({})  # another policy finds adapters by their tiers
    placing = Placing(controller, found, table, steps, system)
    opened.callback(placing.close)
    placing.start()
    return placing.places if steps.rule.routed else lambda: None


def steps_of(config: Config) -> Steps | None:
    """How adapters are placed; None: they come with their requests. Raises ConfigError."""
    cluster, routed = config.cluster, config.cluster.routing == LORASERVE
    if cluster.placement == "off" and not routed:
        return None
    if cluster.placement == "dlora":
        return Steps(None, Rule("dlora", routed=False), cluster.placement_s)
    if not config.engine.step_model:
        raise ConfigError(f"cluster.placement = loraserve: {UNFITTED}")
    costs = FittedSteps.read(Path(config.engine.step_model))
    return Steps(costs, Rule("loraserve", routed=routed), cluster.placement_s, cluster.slo_s)


def controller(config: Config, secret: Secret, system: System, opened: ExitStack) -> tuple[Controller, Found]:
    """The adapters of the service, in this process. Raises ConfigError."""
    outlived = config.cluster.fleet == "static" or bool(config.cluster.ray_address)
    if outlived and not config.adapters.registry:
        log.warning(
            "adapters.registry is unset: replicas outlive this process, which takes loaded adapters and pins with it; "
            "those of adapters.dir become new versions, and replicas read them anew"
        )
    # Replicas may live on behind a table that began anew: no key that they know may come again for another version.
    registry = Registry(config.adapters.registry, system.threads, above=int(1e3 * system.wall()))
    opened.callback(registry.close)
    found = Found(config, system)
    made = Controller(registry, found, Calls(login(config, secret.token)), system)
    opened.callback(made.close)
    upkeep = Upkeep(made, found, system)
    opened.callback(upkeep.close)
    upkeep.start()
    return made, found


def followed(config: Config, secret: Secret, system: System, opened: ExitStack, policy: Policy) -> RemoteDirectory:
    """Those that the controller at `cluster.controller` has, and where it has placed them."""
    if config.cluster.placement != "off":
        log.warning(
            "cluster.placement = %s has no effect here: only the controller's router, %s, places adapters",
            config.cluster.placement,
            config.cluster.controller,
        )
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
        servicer = DirectoryServicer(controller, secret, placed)
        backend.at_stop.append(servicer.end)
        rpc.add_DirectoryServicer_to_server(servicer, server)

    return add
