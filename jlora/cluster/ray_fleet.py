"""Replicas on a Ray cluster: Ray decides where each runs, starts it again when it ends, and finds it by name.

Each replica is a detached actor in a placement group; no token goes through Ray. The actor runs the replica in a
process of its own, because a replica wants the main thread, for signals and for jax.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jlora import config as configuration
from jlora.cluster.child import REPLICA, STOP_S, Child
from jlora.cluster.fleet import Places, Watch, replica_config
from jlora.cluster.ray_settings import write
from jlora.config import Config
from jlora.errors import Unavailable

log = logging.getLogger(__name__)

# All services of one Ray cluster; `cluster.name` tells them apart.
NAMESPACE = "jlora"
# Seconds between two looks at the actors, and until an actor that does not answer is passed over.
LOOK_S = 0.5
ANSWER_S = 5.0
# Seconds until a replica starts again after it has served, and after it has failed to. Meanwhile its actor tells why.
AGAIN_S, BACKOFF_S = 1.0, 10.0
OBJECT_STORE_BYTES = 200 << 20  # no adapter and no token goes through it
Stage = Literal["loading", "up", "ended"]


@dataclass(frozen=True, slots=True)
class Told:
    """What an actor says of its replica; `text` is the address while it is up, the reason once it has ended."""

    stage: Stage
    text: str = ""
    pid: int = 0


class ReplicaActor:
    """Keeps one replica's process. When that ends, so does the actor, and Ray starts both again."""

    def __init__(self, config: Config, secret: str, module: str):
        """`secret`: what `cluster.token_file` holds on the router's machine."""
        if secret:
            path = write(Path(tempfile.mkdtemp(prefix="jlora-")), secret)
            config = configuration.replace(config, {"cluster.token_file": path})
        config = configuration.replace(config, {"serve.host": ray.util.get_node_ip_address()})
        self._told = Told("loading")
        self._child: Child | None = None
        self._stopping = False
        threading.Thread(target=self._live, args=(config, module), daemon=True).start()

    def tell(self) -> Told:
        """Where the replica is; answers at once."""
        return self._told

    def stop(self) -> None:
        """Asks the replica to drain and end."""
        self._stopping = True
        if self._child is not None:
            self._child.terminate()

    def _live(self, config: Config, module: str) -> None:
        wait_s = BACKOFF_S
        try:
            self._child = Child(config, module)  # it dies with this thread, so with the actor
            self._told = Told("loading", pid=self._child.pid)
            self._told = Told("up", self._child.ready(), self._child.pid)
            wait_s = AGAIN_S
            reason = self._child.wait().reason
        except (Unavailable, OSError) as e:
            reason = str(e)
        self._told = Told("ended", reason)
        time.sleep(wait_s)
        if not self._stopping:
            os._exit(1)


class RayFleet:
    """Replicas r0, r1, ... on the Ray cluster of the configuration, or on a Ray of this process's own.

    `ray_settings.prepare` comes before the import of this module.
    """

    def __init__(self, config: Config, folder: str, module: str = REPLICA):
        """`folder`: where a Ray of our own keeps its files; `module`: what each process runs, see `child`."""
        section = config.cluster
        self._config, self._module = config, module
        self._resources = dict(section.resources) or {"CPU": 1.0}
        self._folder = folder
        self._actors: dict[str, Any] = {}
        self._group: Any = None
        self._places = Places(lambda addresses: None)
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="jlora-ray", daemon=True)

    def start(self, watch: Watch) -> None:
        """Connects to Ray, places the replicas, starts those that do not run yet, and waits for all."""
        self._places = Places(watch)
        with self._starting:
            try:
                self._connect()
                self._place()
                for i in range(self._config.cluster.replicas):
                    self._actors[f"r{i}"] = self._actor(i)
                self._await_all()
            except BaseException:
                self._end()
                raise
            self._thread.start()

    def stop(self) -> None:
        """Drains and ends the replicas and their placement group; a Ray of our own ends too."""
        self._places.close()
        self._stopping.set()
        with self._starting:
            if self._thread.is_alive():
                self._thread.join()
            self._end()

    def _end(self) -> None:
        if ray.is_initialized():
            self._end_actors()
            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pids(self) -> Mapping[str, int]:
        """The replicas' processes that run now, by the replica's name."""
        return {name: told.pid for name, told in self._ask().items() if told is not None and told.pid}

    def _connect(self) -> None:
        address = self._config.cluster.ray_address
        own: dict[str, Any] = {
            "_temp_dir": self._folder,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
        try:
            ray.init(
                address=address or "local",  # never the one that an address file names
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
                **({} if address else own),
            )
        except (RayError, OSError, RuntimeError, ValueError) as e:
            reason = str(e).partition("\n")[0]
            raise Unavailable(f"cluster.ray_address = {address or 'local'}: {reason}") from e

    def _place(self) -> None:
        """Sets the resources of all replicas aside. Raises Unavailable: Ray itself would wait in silence."""
        section = self._config.cluster
        bundles = [self._resources] * section.replicas
        name = f"{section.name}-replicas"
        self._group = _existing(name, bundles) or placement_group(bundles, "SPREAD", name=name, lifetime="detached")
        end = time.monotonic() + section.place_s
        while time.monotonic() < end and not self._stopping.is_set():
            if self._group.wait(min(LOOK_S, section.place_s)):
                return
        have, free = ray.cluster_resources(), ray.available_resources()
        kinds = sorted({*self._resources, *(kind for kind in have if kind in ("CPU", "GPU", "TPU"))})
        found = ", ".join(f"{kind} {have.get(kind, 0):g} ({free.get(kind, 0):g} free)" for kind in kinds)
        want = ", ".join(f"{kind} {amount:g}" for kind, amount in self._resources.items())
        raise Unavailable(
            f"cluster.replicas = {section.replicas}: Ray finds no room for so many with {want} each within "
            f"cluster.place_s = {section.place_s:g} s; it has {found}"
        )

    def _actor(self, i: int) -> Any:
        """The replica's actor: the one that runs already, or a new one."""
        section, rest = self._config.cluster, dict(self._resources)
        secret = Path(section.token_file).read_text() if section.token_file else ""
        kind = ray.remote(ReplicaActor).options(
            name=f"{section.name}-r{i}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=rest.pop("CPU", 0),
            num_gpus=rest.pop("GPU", 0),
            resources=rest,
            runtime_env={"env_vars": dict(section.env)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i),
        )
        # The actor knows its host.
        return kind.remote(replica_config(self._config, f"r{i}", "127.0.0.1"), secret, self._module)

    def _await_all(self) -> None:
        limit = self._config.cluster.start_timeout_s
        end = time.monotonic() + limit + ANSWER_S  # the child itself keeps to the limit
        while True:
            told = self._ask()
            self._tell(told)
            if ended := next((t for t in told.values() if t is not None and t.stage == "ended"), None):
                raise Unavailable(ended.text)
            late = [name for name, t in told.items() if t is None or t.stage != "up"]
            if not late:
                return
            if self._stopping.is_set():
                raise Unavailable("the fleet stops")
            if time.monotonic() > end:
                raise Unavailable(f"replicas {', '.join(late)}: not ready after cluster.start_timeout_s = {limit:g} s")
            time.sleep(LOOK_S)

    def _look(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self._tell(self._ask())

    def _ask(self) -> dict[str, Told | None]:
        """What each actor says; None: it does not answer."""
        calls = {name: actor.tell.remote() for name, actor in self._actors.items()}
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
        return {name: _answer(call) for name, call in calls.items()}

    def _tell(self, told: Mapping[str, Told | None]) -> None:
        for name, one in told.items():
            self._places.put(name, one.text if one is not None and one.stage == "up" else None)

    def _end_actors(self) -> None:
        """Lets the replicas drain; then they may not start again."""
        for actor in self._actors.values():
            actor.stop.remote()
        end = time.monotonic() + self._config.serve.drain_s + STOP_S
        while time.monotonic() < end and any(t is not None and t.stage == "up" for t in self._ask().values()):
            time.sleep(LOOK_S)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()


def _existing(name: str, bundles: list[dict[str, float]]) -> Any:
    """The placement group that an earlier router left, if it is still the wanted one; another one is removed."""
    try:
        group = ray.util.get_placement_group(name)
    except ValueError:  # there is none
        return None
    if group.bundle_specs == bundles and placement_group_table(group)["state"] == "CREATED":
        return group
    remove_placement_group(group)
    return None


def _answer(call: Any) -> Told | None:
    try:
        return ray.get(call, timeout=0)
    except RayError:  # it starts again, or hangs
        return None
