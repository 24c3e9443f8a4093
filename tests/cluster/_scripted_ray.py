"""Ray's driver over a Ray that is a script: run as a process, it says at its end what it has done and asked for.

The script is JSON: `there`, the actors that run already; `actors`, what each one says, look after look (the last word
stays; "silent" is no answer, "dead" no actor); `state` of the placement group, or null where there is none; `breaks`,
after how many looks Ray itself fails, or null; `short`, what Ray has and what of it is free, where it finds no room.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from jlora.config import Config


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class Ray:
    """What the driver uses of it."""

    def __init__(self, script: Mapping[str, Any]):
        self.actors: dict[str, list[tuple[str, ...]]] = script["actors"]
        self.state, self.breaks = script["state"], script["breaks"]
        self.there = set(script["there"])
        self.short: list[dict[str, float]] = script.get("short", [])
        self.done: list[str] = []
        self.bundles: list[dict[str, float]] = []
        self.took: dict[str, Any] = {}  # by actor: its bundle, and what it takes of it
        self.env: dict[str, Any] = {}  # by actor: what Ray sees of its environment, and what its replica gets

    def tell(self, name: str) -> Any:
        words = self.actors[name]
        stage, text, *keys = words.pop(0) if len(words) > 1 else words[0]
        return SimpleNamespace(stage=stage, text=text, keys=keys)

    def wait(self, *_: Any, **__: Any) -> None:
        if self.breaks is not None:
            self.breaks -= 1
            if self.breaks < 0:
                raise RayError("the head is lost")

    def get(self, told: Any, timeout: float) -> Any:
        if told.stage in ("silent", "dead"):
            raise (RayError if told.stage == "silent" else ActorDiedError)(told.stage)
        return told

    def get_actor(self, name: str, namespace: str) -> None:
        if name not in self.there:
            raise ValueError(name)

    def actor(self, name: str) -> Any:
        stop = SimpleNamespace(remote=lambda: self.stop(name))
        return SimpleNamespace(name=name, tell=SimpleNamespace(remote=lambda: self.tell(name)), stop=stop)

    def stop(self, name: str) -> None:
        self.done.append(f"stop {name}")
        self.actors[name] = [("ended", "")]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self.options)

    def options(self, name: str, num_cpus: float, num_gpus: float, resources: dict[str, float], **more: Any) -> Any:
        self.took[name] = [more["scheduling_strategy"], {"CPU": num_cpus, "GPU": num_gpus, **resources}]

        def made(config: Config, *_: Any) -> Any:
            self.env[name] = [more["runtime_env"]["env_vars"], dict(config.cluster.env)]
            return self.actor(name)

        return SimpleNamespace(remote=made)

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.done.append(f"kill {actor.name}")

    def get_group(self, name: str) -> Any:
        if self.state is None:
            raise ValueError(name)
        return SimpleNamespace(bundle_specs=[{"CPU": 1.0}] * len(self.actors))

    def group(self, bundles: list[dict[str, float]], *_: Any, **__: Any) -> Any:
        self.bundles = bundles
        return SimpleNamespace(wait=self.room)

    def room(self, timeout: float) -> bool:
        time.sleep(timeout if self.short else 0)
        return not self.short

    def module(self) -> ModuleType:
        made: Any = ModuleType("ray")
        made.init, made.shutdown, made.is_initialized = (lambda **_: None), (lambda: None), (lambda: True)
        made.wait, made.get, made.kill, made.get_actor = (
            self.wait,
            self.get,
            self.kill,
            self.get_actor,
        )
        made.remote = self.remote
        made.cluster_resources, made.available_resources = (lambda: self.short[0]), (lambda: self.short[1])
        return made

    def util(self) -> ModuleType:
        made: Any = ModuleType("ray.util")
        made.get_placement_group = self.get_group
        made.placement_group_table = lambda group: {"state": self.state}
        made.remove_placement_group = lambda group: self.done.append("remove the group")
        made.placement_group = self.group
        return made


def main(script: str, flags: list[str]) -> int:
    ray = Ray(json.loads(script))
    exceptions, strategies = ModuleType("ray.exceptions"), ModuleType("ray.util.scheduling_strategies")
    vars(exceptions).update(RayError=RayError, ActorDiedError=ActorDiedError)
    vars(strategies)["PlacementGroupSchedulingStrategy"] = lambda _, placement_group_bundle_index: (
        placement_group_bundle_index
    )
    module, util = ray.module(), ray.util()
    vars(module)["util"] = util
    sys.modules.update({m.__name__: m for m in (module, util, exceptions, strategies)})

    from jlora.cluster import ray_fleet  # over this Ray

    code = ray_fleet.main(["", "m", *flags])
    print(json.dumps({"done": ray.done, "bundles": ray.bundles, "took": ray.took, "env": ray.env}), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
