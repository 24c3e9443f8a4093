"""The sites of the world of many replicas. What strikes a process or a path is asked with every step."""

from __future__ import annotations

from collections.abc import Mapping

from jlora.sim.world.sites import Site

SITES: Mapping[str, Site] = {
    "net.slow": Site("messages between two processes take up to a second", 0.01),
    "net.cut": Site("two processes do not reach each other for a while", 0.01),
    "net.reset": Site("a stream breaks, and what was on its way is lost", 0.02),
    "net.half_open": Site("a stream breaks, and one end learns nothing of it", 0.01),
    "net.call_lost": Site("the controller's connection to a replica is gone, and it learns nothing of it", 0.1),
    "net.late_hello": Site("the first message of an earlier stream comes once more", 0.02),
    "replica.killed": Site("a replica's process is killed; it starts again", 0.01),
    "replica.lost": Site("a replica's machine is gone: nobody is told", 0.01),
    "replica.stopped": Site("a replica's process stands still for a while (SIGSTOP)", 0.01),
    "replica.drained": Site("a replica drains, ends and starts again", 0.01),
    "engine.hung": Site("an engine stands while its process speaks", 0.005),
    "engine.compiles": Site("a step compiles, and the process is silent", 0.01),
    "engine.fails": Site("a step ends a request with UNAVAILABLE", 0.02),
    "router.killed": Site("a router's process is killed; it starts again", 0.01),
    "router.lost": Site("a router's machine is gone: nobody is told", 0.006),
    "router.stopped": Site("a router's process stands still for a while (SIGSTOP)", 0.01),
    "fleet.removed": Site("a replica leaves the service and comes back", 0.015),
    "adapter.loaded": Site("an adapter gets a new version while requests run", 0.02),
    "adapter.unloaded": Site("an adapter is unloaded while requests run", 0.01),
    "adapter.pinned": Site("an adapter is pinned at all replicas, or not any more", 0.01),
    "adapter.changed": Site("an adapter's files are others for a while", 0.01),
    "controller.killed": Site("the controller's process is killed while it writes the registry", 0.6),
    "router.moves": Site("a router moves a request to a replica that has less to do", 0.0),
    "registry.locked": Site("another process holds the registry's file", 0.5),
    "registry.full": Site("the registry's disk is full", 0.3),
    "clients.burst": Site("many requests come at once", 0.01),
    "clients.flood": Site("many requests come and leave at once while a replica reads nothing", 0.01),
    "disk.slow": Site("an adapter takes seconds to read", 0.4),
    "load.memory": Site("host memory is short while an adapter loads", 0.36),
    "load.killed": Site("a replica is killed for want of memory while an adapter loads", 0.36),
}
