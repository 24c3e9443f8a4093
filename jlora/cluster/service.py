"""The process of `jlora cluster`: the fleet of replicas, the controller of adapters, and the router with its fronts."""

from __future__ import annotations

from contextlib import ExitStack

from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.fleet import Fleet
from jlora.cluster.found import Found
from jlora.cluster.launcher import Parts, launch, login
from jlora.cluster.registry import Registry
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.secret import Secret
from jlora.cluster.upkeep import Upkeep
from jlora.config import Config
from jlora.ports import DiskFiles, ServerGarbage, System


def run(config: Config, fleet: Fleet) -> int:
    """Serves until a signal; returns the exit code. Raises JloraError for a registry or a token of no use."""
    token = Secret.read(config.cluster.token_file).token
    system = System(files=DiskFiles(config.adapters.roots), garbage=ServerGarbage())
    with ExitStack() as opened:
        registry = Registry(config.adapters.registry, system.threads)
        opened.callback(registry.close)
        found = Found(config, system)
        controller = Controller(registry, found, Calls(login(config, token)), system)
        opened.callback(controller.close)
        upkeep = Upkeep(controller, found, system)
        opened.callback(upkeep.close)
        upkeep.start()
        return launch(config, Parts(fleet, controller, SessionSticky, token))
