"""`/metrics` at a router: its replicas, and what it has done with their requests; a single server has none of it."""

from __future__ import annotations

import httpx

from benchmarks.micro.stand_in import StandIn
from jlora.cluster.balance import Move
from jlora.serve.backend import Backend
from tests.cluster import _port as port
from tests.cluster._links import FakeReplica, Service, request, service, submit, wait_for
from tests.serve import _server
from tests.serve.http.test_metrics import Samples, scrape, value

FAMILIES = ("jlora_replica_", "jlora_router_", "jlora_placement_", "jlora_balance_")


def of_router(samples: Samples) -> dict[str, dict[str, float]]:
    """Family -> replica, with its health if that is told, or "" -> value."""
    found: dict[str, dict[str, float]] = {}
    for (name, labels), sample in samples.items():
        if name.startswith(FAMILIES):
            known = dict(labels)
            found.setdefault(name, {})[" ".join(filter(None, (known.get("replica"), known.get("health"))))] = sample
    return found


def test_a_router_tells_its_replicas_and_what_it_has_done():
    with (
        service(2) as made,
        _server.serving(Backend(made.router)) as served,
        httpx.Client(base_url=served.http) as http,
    ):
        for one in made.replicas:
            one.paused = True
        client = submit(made, request("one"))
        source, target = sides(made)
        moved = move(made, target.name)
        target.draining = True  # from where the request goes back
        wait_for(lambda: source.running and not target.running)
        books = port.dispatcher(made.router).books
        wait_for(lambda: books.view[target.name].health == "draining")
        wait_for(lambda: [books.view[one.name].running for one in (source, target)] == [1, 0])
        made.router.balancing.solve_s, made.router.balancing.candidates = 0.125, 40
        made.directory.fetches, seen = 3, dict(books.view)
        found = of_router(scrape(http))
        assert found.pop("jlora_replica_up") == {f"{source.name} up": 1, f"{target.name} draining": 0}
        assert found.pop("jlora_replica_sent") == {source.name: 1, target.name: 0}
        for name in ("running", "waiting", "free_blocks"):
            assert found.pop(f"jlora_replica_{name}") == {one: getattr(seen[one], name) for one in seen}, name
        assert moved == 1 and found == {
            "jlora_router_moves_total": {"": 1},
            "jlora_router_resumed_total": {"": 1},
            "jlora_balance_longest_solve_seconds": {"": 0.125},
            "jlora_balance_most_candidates": {"": 40},
            "jlora_placement_fetches_total": {"": 3},
        }
        made.router.abort_named("one")
        client.wait()


def test_a_routers_health_counts_the_programs_that_its_replicas_still_compile():
    with (
        service(2) as made,
        _server.serving(Backend(made.router)) as served,
        httpx.Client(base_url=served.http) as http,
    ):
        one, other = made.replicas
        one.programs_left, other.programs_left = 1, 2
        wait_for(lambda: http.get("/health").json().get("programs_left") == 3)
        made.kill(one)
        wait_for(lambda: http.get("/health").json().get("programs_left") == 2)


def test_requests_that_no_replica_takes_are_demand_and_a_pool_that_is_gone_is_not_told():
    with (
        service(1) as made,
        _server.serving(Backend(made.router)) as served,
        httpx.Client(base_url=served.http) as http,
    ):
        only = made.replicas[0]
        assert of_router(scrape(http))["jlora_replica_free_blocks"] == {only.name: 90}
        made.kill(only)
        wait_for(lambda: not made.router.replicas)
        waiting = [made.router.submit(request(f"r{n}", n=n), lambda _: None) for n in (1, 3)]
        samples = scrape(http)
        assert "jlora_replica_free_blocks" not in of_router(samples)
        demand = {name: value(samples, f"jlora_{name}") for name in ("waiting_sequences", "live_requests")}
        assert demand == {"waiting_sequences": 4, "live_requests": 2}
        assert not any(one.done() for one in waiting)


def sides(made: Service) -> list[FakeReplica]:
    """The replica that has the request, and the other one."""
    wait_for(lambda: any(one.running for one in made.replicas))
    return sorted(made.replicas, key=lambda one: not one.running)


def move(made: Service, target: str) -> int:
    """Moves the request there; how many have moved."""
    balancing = made.router.balancing
    (live,) = port.dispatcher(made.router).table.all()

    async def begin() -> None:
        balancing.begin([Move(live.handle, live.replica, target, None)])

    made.loop.run(begin())
    wait_for(lambda: live.replica == target and next(one for one in made.replicas if one.name == target).running)
    return balancing.moved


def test_one_server_has_none_of_it():
    with _server.serving(Backend(StandIn(1.0, lambda count: 1))) as served, httpx.Client(base_url=served.http) as http:
        assert not of_router(scrape(http))
