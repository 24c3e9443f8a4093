"""Ray's driver: places replicas on a Ray cluster and says where they are.

`ray_process` starts it in a process of its own.

Each replica is a detached actor in a placement group: Ray decides where it runs, starts it again when it ends, and
finds it by name. No token goes through Ray. The actor runs the replica in a process of its own, because a replica
wants the main thread, for signals and for jax.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jlora import config as configuration
from jlora.cluster.child import ENV, STOP_S, Child, flags_of
from jlora.cluster.fleet import replica_config
from jlora.config import Config
from jlora.errors import JloraError, Unavailable
from jlora.serve import flags

# All services of one Ray cluster; `cluster.name` tells them apart.
NAMESPACE = "jlora"
# Seconds between two looks at the actors, and until an actor that does not answer is passed over.
LOOK_S = 0.5
ANSWER_S = 5.0
# Seconds until a replica starts again after it has served, and after it has failed to. Meanwhile its actor tells why.
AGAIN_S, BACKOFF_S = 1.0, 10.0
ORPHAN_S = 30.0  # for the driver's own end, beyond the replicas' drain, once the router is gone
OBJECT_STORE_BYTES = 200 << 20  # no adapter and no token goes through it

Stage = Literal["loading", "up", "ended"]


@dataclass(frozen=True, slots=True)
class Told:
    """What an actor says of its replica; `text` is the address while it is up, the reason once it has ended.

    `keys`: its configuration, as `flags_of` writes it.
    """

    stage: Stage
    text: str = ""
    keys: tuple[str, ...] = ()


class ReplicaActor:
    """Keeps one replica's process. When that ends, so does the actor, and Ray starts both again."""

    def __init__(self, config: Config, secret: str, module: str):
        """`secret`: what `cluster.token_file` holds on the router's machine."""
        values = {"serve.host": ray.util.get_node_ip_address()}
        if secret:
            values["cluster.token_file"] = _in_memory(secret)
        self._told, self._keys = Told("loading"), tuple(flags_of(config, env=True))
        self._child: Child | None = None
        self._stopping = False
        live = configuration.replace(config, values), module
        threading.Thread(target=self._live, args=live, daemon=True).start()

    def tell(self) -> Told:
        """Where the replica is; answers at once."""
        return replace(self._told, keys=self._keys)

    def stop(self) -> None:
        """Asks the replica to drain and end."""
        self._stopping = True
        if self._child is not None:
            self._child.terminate()

    def _live(self, config: Config, module: str) -> None:
        wait_s = BACKOFF_S
        try:
            self._child = Child(config, module)  # it dies with this thread, so with the actor
            self._told = Told("up", self._child.ready())
            wait_s = AGAIN_S
            reason = self._child.wait().reason
        except (Unavailable, OSError) as e:
            reason = str(e)
        self._told = Told("ended", reason)
        time.sleep(wait_s)
        if not self._stopping:
            os._exit(1)


class Replicas:
    """The actors of one service, from `start` to `end`."""

    def __init__(self, config: Config, folder: str, module: str):
        self._config, self._folder, self._module = config, folder, module
        self._resources = dict(config.cluster.resources) or {"CPU": 1.0}
        self._actors: dict[str, Any] = {}
        self._made: set[str] = set()  # those that did not run before; the others may serve another router
        self._group: Any = None
        self._joined = False  # the group was there before
        self._known: dict[str, str] = {}  # where they were at the last look
        self.connected = threading.Event()

    def start(self, stopping: threading.Event) -> None:
        """Connects, places, starts what does not run yet, and waits for that. Raises Unavailable, also if stopped."""
        self._connect()
        self.connected.set()
        self._place(stopping)
        for i in range(self._config.cluster.replicas):
            self._actors[f"r{i}"] = self._actor(i)
        for name, told in self._await_all(stopping).items():
            self._compare(name, told)

    def addresses(self) -> dict[str, str]:
        """Of the replicas that serve now. While an actor does not answer, its replica stays where it was."""
        told = {name: Told("up", self._known.get(name, "")) if t is None else t for name, t in self._ask().items()}
        self._known = {name: t.text for name, t in told.items() if t.stage == "up" and t.text}
        return self._known

    def end(self, made: bool = False) -> None:
        """Lets the replicas drain; then they and their place are gone. `made`: only what this driver has made."""
        ends = {name: actor for name, actor in self._actors.items() if name in self._made or not made}
        for actor in ends.values():
            actor.stop.remote()
        limit = time.monotonic() + self._config.serve.drain_s + STOP_S
        while time.monotonic() < limit and ends.keys() & self.addresses().keys():
            time.sleep(LOOK_S)
        for actor in ends.values():
            ray.kill(actor, no_restart=True)
        if self._group is not None and not (made and self._joined):
            remove_placement_group(self._group)

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

    def _place(self, stopping: threading.Event) -> None:
        """Sets the resources of all replicas aside. Raises Unavailable: Ray itself would wait in silence."""
        section = self._config.cluster
        bundles = [self._resources] * section.replicas
        name = f"{section.name}-replicas"
        self._group = _existing(name, bundles)
        self._joined = self._group is not None
        if self._joined:
            return
        self._group = placement_group(bundles, "SPREAD", name=name, lifetime="detached")
        end = time.monotonic() + section.place_s
        while time.monotonic() < end and not stopping.is_set():
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
        name = f"{section.name}-r{i}"
        if not (self._joined and _runs(name)):
            self._made.add(f"r{i}")
        secret = Path(section.token_file).read_text(encoding="ascii") if section.token_file else ""
        kind = ray.remote(ReplicaActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=rest.pop("CPU", 0),
            num_gpus=rest.pop("GPU", 0),
            resources=rest,
            runtime_env={"env_vars": _rays(section.env)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i),
        )
        # The actor knows its host.
        return kind.remote(replica_config(self._config, f"r{i}", "127.0.0.1"), secret, self._module)

    def _await_all(self, stopping: threading.Event) -> Mapping[str, Told | None]:
        """What the actors say once enough replicas are up."""
        limit = self._config.cluster.start_timeout_s
        end = time.monotonic() + limit + ANSWER_S  # the child itself keeps to the limit
        while not stopping.wait(LOOK_S):
            told = self._ask()
            ended = [t for n, t in told.items() if n in self._made and t is not None and t.stage == "ended"]
            if ended:
                raise Unavailable(ended[0].text)
            late = [name for name, t in told.items() if t is None or t.stage != "up"]
            if len(late) < len(told) and not self._made & set(late):  # those that ran before start again by themselves
                return told
            if time.monotonic() > end:
                raise Unavailable(f"replicas {', '.join(late)}: not ready after cluster.start_timeout_s = {limit:g} s")
        raise Unavailable("the fleet stops")

    def _compare(self, name: str, told: Told | None) -> None:
        """Says so where a replica that ran before has another configuration: it keeps that, whatever is set here."""
        keys = getattr(told, "keys", ())  # an actor of an earlier version does not tell
        wanted = flags_of(replica_config(self._config, name, "127.0.0.1"), env=True)
        differ = {word.partition("=")[0] for word in set(keys) ^ set(wanted)}  # values may be secrets
        if keys and differ:
            print(
                f"jlora cluster: replica {name} runs on with the configuration of its start, which differs in "
                f"{', '.join(sorted(differ))}; end the service (SIGTERM to its router) to change it",
                file=sys.stderr,
            )

    def _ask(self) -> Mapping[str, Told | None]:
        """What each actor says; None: it does not answer."""
        calls = {name: actor.tell.remote() for name, actor in self._actors.items()}
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
        return {name: _answer(call) for name, call in calls.items()}


def _rays(env: Mapping[str, str]) -> dict[str, str]:
    """What an actor itself reads of `cluster.env`; the replica's process has all of it from its `Child`.

    Ray shows these values on command lines and in its lists, so it gets no others.
    """
    return {name: value for name, value in env.items() if name == "PYTHONPATH" or name.startswith("RAY_")}


def _existing(name: str, bundles: list[dict[str, float]]) -> Any:
    """The placement group that an earlier router left, if it is still the wanted one; another one is removed.

    While Ray looks for room for a lost node's part, the replicas of the others serve on.
    """
    try:
        group = ray.util.get_placement_group(name)
    except ValueError:  # there is none
        return None
    if group.bundle_specs == bundles and placement_group_table(group)["state"] in ("CREATED", "RESCHEDULING"):
        return group
    remove_placement_group(group)
    return None


def _runs(name: str) -> bool:
    """Whether there is an actor of that name."""
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def _answer(call: Any) -> Told | None:
    try:
        return ray.get(call, timeout=0)
    except ActorDiedError:  # Ray starts it again
        return Told("loading")
    except RayError:  # it hangs, or Ray does not reach it
        return None


def _in_memory(secret: str) -> str:
    """The path of a file on no disk, which ends with this process."""
    number = os.memfd_create("jlora-token")
    os.write(number, secret.encode("ascii"))
    return f"/proc/{os.getpid()}/fd/{number}"


def _say(out: TextIO, **words: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # then stdin has ended too
        print(json.dumps(words), file=out)


def main(argv: Sequence[str]) -> int:
    """Runs the driver until stdin ends; returns the exit code.

    `argv`: the folder of a Ray of our own, the module of the replicas, and flags of a configuration, whose
    `cluster.env` is in the environment. Each line on stdout is JSON: {"addresses": ...} at each change, or
    {"error": ...}.
    """
    env = json.loads(os.environ.pop(ENV, "{}"))  # here alone, not in Ray's own processes
    folder, module, config = argv[0], argv[1], configuration.replace(flags.parse(argv[2:]), {"cluster.env": env})
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what replicas print comes on stdout
    stopping, asked = threading.Event(), threading.Event()
    replicas, code = Replicas(config, folder, module), 0
    told: Mapping[str, str] = {}

    def listen() -> None:
        if sys.stdin.readline():
            asked.set()
        stopping.set()
        if not asked.is_set():  # the router is gone, and Ray's own end would wait for a head that may be, too
            if replicas.connected.is_set() and not folder:
                time.sleep(config.serve.drain_s + STOP_S + ORPHAN_S)  # for what has begun
            _end(folder)

    def bound() -> None:
        section = config.cluster
        if section.ray_address and not replicas.connected.wait(section.place_s):
            why = f"Ray has not answered within cluster.place_s = {section.place_s:g} s"
            _say(out, error=f"cluster.ray_address = {section.ray_address}: {why}")
            _end(folder)

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=bound, daemon=True).start()
    try:
        replicas.start(stopping)
        while not stopping.wait(LOOK_S if told else 0):
            if (now := replicas.addresses()) != told:
                _say(out, addresses=now)
                told = now
    except (JloraError, RayError) as e:
        _say(out, error=str(e))
        code = 1
        if not told and not asked.is_set() and ray.is_initialized():
            replicas.end(made=True)  # what has begun must not be left; what ran before may serve another router
    if ray.is_initialized():
        if asked.is_set():
            replicas.end()
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    return code


def _end(folder: str) -> NoReturn:
    """Ends this process now, whatever its main thread waits for, and a Ray of its own."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
