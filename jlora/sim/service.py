"""Runs one simulation of a service of many replicas under a routing policy. No jax."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jlora.cache import inspect
from jlora.cache.manager import Sizes
from jlora.cluster.asking import LOOK_S
from jlora.cluster.demand import points_of
from jlora.cluster.directory import lenders
from jlora.cluster.homes import Rule
from jlora.cluster.placement import SLACK
from jlora.cluster.routing.costs import Costs, RankCosts
from jlora.cluster.routing.routes import ROUTES, Known
from jlora.cluster.routing.table import Table, Turns
from jlora.cluster.routing.ways import LENDS, PATH_BPS, PEER_BPS, Ways, insists
from jlora.config import one_of
from jlora.errors import ConfigError
from jlora.sim import outcome
from jlora.sim.fleet import Fleet
from jlora.sim.kernels import Kernel, RankedKernel, costs_of, without_adapters
from jlora.sim.losses import Loss
from jlora.sim.member import Member
from jlora.sim.placing import Place, Placed, Placing
from jlora.sim.replay import Ask
from jlora.sim.scenario import Scenario, Work, cache_policy, describe, replica_spec
from jlora.sim.uplink import Arrival, Coming
from jlora.sim.wires import Balance, Wires
from jlora.step_model import FittedSteps

TABLE, TURNS = "table", "turns"  # routes by the parts of the placement: drawn, and in turn
TABLES: Mapping[str, type[Table]] = {TABLE: Table, TURNS: Turns}


@dataclass(frozen=True, slots=True)
class Service:
    """Many replicas of a scenario.

    Attributes:
        ranks: of the adapters, by index.
        delay_s: of a message between router and replica, each way.
        fetch_gbps: of a host's way to the adapters that it does not have, which several that fetch from it share; 0:
            every host has all of them.
        path_gbps: the same for an adapter that no other replica has in memory; 0: as `fetch_gbps`.
        fetch_latency_s: of each such fetch.
        slo_s: seconds per output token, from submit to the last one; 0: no objective.
        outputs: tokens of a mean answer, as the policies believe until the router has measured them.
        place: where adapters are ("": everywhere, or wherever requests went); requests then follow the placement's
            table, every `place_s` seconds a new one; `ahead`: see `jlora.cluster.homes.Rule`; without it LoRAServe's
            own rule, which has no slack.
        look_s: between two looks of the controller at where adapters are. A live one's, unless time steps are scaled.
        foreseen: dLoRA's preload begins with the trace's own demand; else with equal demand, and learns.
        balance: moves requests between the replicas; None: they stay where they were sent.
        losses: replicas that are killed, in the order of their times.
        warm_s: what was sent earlier is played and not counted.
    """

    replicas: int
    ranks: tuple[int, ...]
    kernel: Kernel = "own"
    delay_s: float = 0.0005
    fetch_gbps: float = 0.0
    fetch_latency_s: float = 0.002
    slo_s: float = 0.0
    outputs: float = 64.0
    seed: int = 0
    place: Place = ""
    place_s: float = 60.0
    look_s: float = LOOK_S
    ahead: bool = True
    foreseen: bool = True
    balance: Balance | None = None
    losses: tuple[Loss, ...] = ()
    path_gbps: float = 0.0
    warm_s: float = 0.0

    def fetch_s(self, size: int, held: bool) -> float:
        """Seconds of fetching so many bytes; `held`: another replica has them in memory."""
        gbps = self.fetch_gbps if held or not self.path_gbps else self.path_gbps
        return self.fetch_latency_s + size / (gbps * 1e9) if gbps else 0.0


def simulate_service(scenario: Scenario, service: Service, work: Work, policy: str, route: str) -> dict[str, Any]:
    """Plays the work once.

    Returns:
        As `scenario.simulate`, over all replicas, without "series", and "service". The same arguments give the same
        result, bit for bit. Raises ConfigError.
    """
    fleet = fleet_of(scenario, service, work, policy, route)
    block_bytes = scenario.hardware.layout.block_bytes
    new = inspect.state(fleet.members["r0"].manager, block_bytes)
    fleet.until(service.warm_s)
    members = list(fleet.members.values())
    before = {id(member): inspect.state(member.manager, block_bytes) for member in members}
    fetched, worked = sum(m.fetched for m in members), {id(m): m.device.counts.busy_s for m in members}
    fleet.run()
    for member in fleet.members.values():
        inspect.check_integrity(member.manager)
    members = [*fleet.members.values(), *fleet.dead]
    spans = [(before.get(id(m), new), inspect.state(m.manager, block_bytes)) for m in members]
    asks, end = [ask for ask in fleet.counted if ask.turn.at >= service.warm_s], fleet.now - service.warm_s
    busy = [(member.device.counts.busy_s - worked.get(id(member), 0.0)) / end for member in members]
    result = {
        "policy": policy,
        "route": f"{service.place}, {route}" if service.place and route != TABLE else service.place or route,
        "setting": describe(scenario, members[0].spec) | {"replicas": service.replicas, "kernel": service.kernel},
        "summary": outcome.summary(asks, end)
        | {"unsent": fleet.unsent, "preemptions": sum(member.scheduler.preemptions for member in members)},
        "cache": outcome.cache(*spans),
        "device": {"seconds": end, "steps": sum(m.device.counts.steps for m in members), "busy": busy},
        "service": told(asks, end, service)
        | {"missed": missed(asks, service)}
        | stored(members, block_bytes, fetched)
        | {"servers": servers(list(fleet.members.values()), asks)}
        | moved(fleet),
        "requests": {"columns": list(outcome.COLUMNS), "rows": outcome.rows(asks)},
    }
    return outcome.rounded(result)


def fleet_of(scenario: Scenario, service: Service, work: Work, policy: str, route: str) -> Fleet:
    """A fleet that has played nothing yet. Raises ConfigError."""
    if route not in TABLES and route not in ROUTES:
        raise ConfigError(f"route {route!r}: {one_of(route, (*ROUTES, *TABLES))}")
    step = scenario.step_model
    spec = replica_spec(scenario, work, policy)
    if isinstance(step, FittedSteps):
        if service.kernel != "own":
            raise ConfigError(f"--kernel {service.kernel}: must be own with the steps of {step.device}")
        costs = step
    else:
        costs = costs_of(scenario.hardware, step, service.kernel)
        spec = spec if service.kernel == "own" else replace(spec, model=without_adapters(step))
    block_bytes = scenario.hardware.layout.block_bytes
    sizes = [blocks * block_bytes for blocks in work.sizes]

    fetch_bps = 1e9 * service.fetch_gbps or math.inf
    path_bps = 1e9 * service.path_gbps or fetch_bps
    insist = insists(fetch_bps, path_bps)

    def way(to: str, adapter: int, now: float) -> Coming:
        """From a replica that has it, chosen as by a live one; else, or if that is faster, from its path.

        A path is each replica's own.
        """
        holders = [one for one in fleet.members.values() if fetch_bps >= path_bps and one.has(adapter)]
        free = [one for one in lenders(holders, f"{to} {adapter}") if insist or one.uplink.under_way(now) < LENDS]
        source = next(iter(free), None)
        seconds = service.fetch_s(sizes[adapter], source is not None)
        return source.uplink.begin(now, seconds) if source is not None and seconds else Arrival(now + seconds)

    def member(name: str) -> Member:
        made = Member(name, spec, cache_policy(policy, spec, work), partial(way, name))
        if isinstance(costs, RankCosts) and service.kernel != "own":
            made.device.kernel = RankedKernel(costs, made.ranks(service.ranks))
        return made

    per_rank = sum(sizes) / max(sum(service.ranks), 1)
    host_s = per_rank / block_bytes * spec.link.block_s
    # As in a live router: replicas tell how fast they fetch as soon as they have.
    peer_bps = PEER_BPS if service.fetch_gbps else math.inf
    ways = Ways(host_s, per_rank, peer_bps, PATH_BPS if service.fetch_gbps or service.path_gbps else math.inf)
    known = Known(costs, service.slo_s or math.inf, service.outputs, service.seed, ways, scenario.engine.max_seqs)
    members = [member(f"r{number}") for number in range(service.replicas)]
    wires = Wires(service.ranks, service.delay_s, balance=service.balance, losses=service.losses, again=member)
    wires = replace(wires, sizes=work.sizes, ways=ways)
    chosen = TABLES[route]({}) if route in TABLES else ROUTES[route](known)
    if service.place:
        rule = Rule(service.place, service.ahead, route in TABLES, service.seed, SLACK if service.ahead else 0.0)
        placing = Placing(placed_of(rule, service, work, costs, spec.sizes), members, TABLES.get(route, Table))
        wires = replace(wires, placing=placing, every_s=service.place_s, look_s=service.look_s)
        chosen = placing.table if route in TABLES else chosen
    fleet = Fleet(members, work.trace, chosen, wires)
    return fleet


def placed_of(rule: Rule, service: Service, work: Work, costs: Costs, room: Sizes) -> Placed:
    """What the placement needs to know. Operating points are the step model's, else of sequences like the trace's."""
    prompt, output = work.facts.prompt[0], max(work.facts.output[0], 1.0)
    context = round(prompt + output / 2)
    points = points_of(costs, service.ranks, service.slo_s, context, prompt / output)
    asked = work.trace.asked.items() if service.foreseen else ()
    loads = {adapter: count * work.facts.rate / work.facts.requests for adapter, count in asked}
    return Placed(rule, service.ranks, work.sizes, points, room.device, room.host, service.place_s, loads)


def told(asks: Sequence[Ask], end: float, service: Service) -> dict[str, float]:
    """What users of the whole service see; a request that has not ended misses its objective.

    "goodput": answers that meet the objective, for each second in which requests came. The last answers of a run end
    later, which says nothing of a service that goes on. If all requests came at once, until the last answer's end.
    """
    taken = [ask for ask in asks if not ask.refused]
    each = [per_token_s(ask) for ask in taken]
    done = [value for value in each if not math.isinf(value)]
    met = sum(value <= service.slo_s for value in each) if service.slo_s else len(done)
    seconds = max((ask.sent for ask in asks), default=0.0) - service.warm_s
    seconds = seconds if seconds > 0 else end
    return {
        "slo_s": service.slo_s,
        "attainment": met / max(len(asks), 1),
        "per_token_s": statistics.fmean(done) if done else 0.0,
        "per_token_p99_s": float(np.percentile(done, 99)) if done else 0.0,
        "goodput": met / seconds,
    }


def missed(asks: Sequence[Ask], service: Service) -> dict[str, float]:
    """The answers that miss the objective: their number, that of those that never ended, seconds of a token by part."""
    late = [ask for ask in asks if per_token_s(ask) > service.slo_s] if service.slo_s else []
    ended = [
        (ask.timing, ask.usage.completion_tokens) for ask in late if ask.timing is not None and ask.usage is not None
    ]
    tokens = max(sum(count for _, count in ended), 1)
    return {
        "answers": len(late),
        "unfinished": len(late) - len(ended),
        "queue_s": sum(timing.queue for timing, _ in ended) / tokens,
        "copies_s": sum(outcome.swap_s(timing) for timing, _ in ended) / tokens,
        "prefill_s": sum(timing.prefill for timing, _ in ended) / tokens,
        "decode_s": sum(timing.tpot * (count - 1) for timing, count in ended) / tokens,
    }


def per_token_s(ask: Ask) -> float:
    """Seconds of a whole answer over its tokens; infinity if it has not ended."""
    if ask.usage is None or ask.timing is None:
        return math.inf
    tokens = ask.usage.completion_tokens
    return (ask.first - ask.sent + ask.timing.tpot * (tokens - 1)) / max(tokens, 1)


def stored(members: Sequence[Member], block_bytes: int, before: int) -> dict[str, Any]:
    """Adapters at the replicas at the end, the most that one has held at once, and the bytes fetched for them.

    Args:
        before: blocks that were fetched before anything counted.
    """
    held = [member.stored for member in members]
    received = Counter[str]()
    for member in members:  # one that was killed has a successor of its name
        received[member.name] += member.received
    sent = list(received.values())
    return {
        "adapters_most": max(held),
        "adapters_mean": statistics.fmean(held),
        "adapters_peak": max(member.most for member in members),
        "bytes_peak": max(member.most_blocks for member in members) * block_bytes,
        "bytes_fetched": (sum(member.fetched for member in members) - before) * block_bytes,
        "requests": sent,
        "imbalance": max(sent) / max(statistics.fmean(sent), 1e-9),
    }


def servers(members: Sequence[Member], asks: Sequence[Ask]) -> list[dict[str, float]]:
    """Of each replica that runs at the end: adapters there, and answers that it has begun with their TTFT."""
    waits: dict[str, list[float]] = {member.name: [] for member in members}
    for ask in asks:
        if ask.replica in waits:
            waits[ask.replica].append(ask.first - ask.sent)
    return [
        {
            "adapters": member.stored,
            "answers": len(waits[member.name]),
            "ttft_p95_s": float(np.percentile(waits[member.name] or [0.0], 95)),
        }
        for member in members
    ]


def moved(fleet: Fleet) -> dict[str, int]:
    """What the balance has done: plans with moves, those of them that are the greedy ones, and requests moved.

    "candidates_most": of the largest program.
    "lost": replicas that were killed; "resumed": requests that went on elsewhere then.
    """
    plans = [plan for plan in fleet.plans if plan.moves]
    greedy = sum(not plan.solved for plan in plans)
    told = {"plans": len(plans), "greedy": greedy, "moved": fleet.moved}
    told |= {"candidates_most": max((plan.candidates for plan in fleet.plans), default=0)}
    return told | {"lost": len(fleet.dead), "resumed": fleet.resumed}
