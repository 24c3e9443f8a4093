"""Flags of `jlora sim` for many replicas behind a router, and the table of its routing policies."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jlora.cluster.homes import KINDS
from jlora.cluster.routing.routes import LORASERVE, ROUTES
from jlora.config import one_of
from jlora.errors import ConfigError
from jlora.sim import losses
from jlora.sim import service as simulated
from jlora.sim.kernels import KERNELS
from jlora.sim.service import TABLES, Service
from jlora.sim.wires import Balance
from jlora.sim.workloads import flags

# Column of the table -> (part of a result, key, factor, digits).
TABLE: Mapping[str, tuple[str, str, float, int]] = {
    "TTFT ms": ("summary", "ttft_s", 1e3, 0),
    "p50": ("summary", "ttft_p50_s", 1e3, 0),
    "p99": ("summary", "ttft_p99_s", 1e3, 0),
    "TPOT ms": ("summary", "tpot_s", 1e3, 1),
    "per token ms": ("service", "per_token_s", 1e3, 1),
    "attained": ("service", "attainment", 1, 3),
    "goodput/s": ("service", "goodput", 1, 2),
    "busiest": ("service", "imbalance", 1, 2),
    "adapter hits": ("cache", "adapter_hits", 1, 2),
    "KV device": ("cache", "kv_device_hits", 1, 2),
    "adapters": ("service", "adapters_most", 1, 0),
    "at once": ("service", "adapters_peak", 1, 0),
    "GB fetched": ("service", "bytes_fetched", 1e-9, 1),
    "moved": ("service", "moved", 1, 0),
    "resumed": ("service", "resumed", 1, 0),
    "unfinished": ("summary", "unfinished", 1, 0),
    "unsent": ("summary", "unsent", 1, 0),
    "refused": ("summary", "refused", 1, 0),
}


# Flags that mean nothing without a router, with their defaults.
ROUTED: Mapping[str, object] = {
    "route": None,
    "kernel": "own",
    "slo_ms": 0.0,
    "delay_ms": 0.5,
    "fetch_gbps": 0.0,
    "path_gbps": 0.0,
    "place": "",
    "place_s": 60.0,
    "late": False,
    "migrate": False,
    "migrate_s": 1.0,
}
MOVING = ("loraserve", "dlora")  # placements that follow the demand


def add_flags(many: argparse._ActionsContainer) -> None:
    """The flags."""
    many.add_argument("--replicas", type=int, default=1, metavar="N", help="(default: 1, without a router)")
    routes = f"{', '.join(ROUTES)}; table, turns: with --place; {LORASERVE}: table with its own placement"
    many.add_argument("--route", nargs="+", metavar="NAME", help=routes)
    many.add_argument("--kernel", choices=KERNELS, help="how ranks cost time (default: own)")
    many.add_argument("--slo-ms", type=float, help="objective: per output token of a whole answer")
    many.add_argument("--delay-ms", type=float, help="of a message, each way (default: 0.5)")
    many.add_argument("--fetch-gbps", type=float, help="between hosts (default: every host has all)")
    many.add_argument("--path-gbps", type=float, help="to those in no other host's memory (default: same)")
    many.add_argument("--place", choices=KINDS, help="place adapters; requests follow its table unless --route")
    many.add_argument("--place-s", type=float, help="a time step of the placement (default: 60)")
    many.add_argument(
        "--late",
        action="store_true",
        help="place anew every step, and move an adapter with its first request, as in LoRAServe",
    )
    many.add_argument("--migrate", action="store_true", help="move requests to other replicas (dLoRA's balance)")
    many.add_argument("--fail", nargs="+", default=[], metavar="T:REPLICA[:DOWN_S]", help="kill replicas: 30:r1:10")
    many.add_argument("--migrate-s", type=float, help="between two plans of moves (default: 1)")
    many.set_defaults(**ROUTED)


def check_alone(args: argparse.Namespace) -> None:
    """Raises ConfigError for what only a router does, if there is none."""
    for name, default in ROUTED.items():
        if args.replicas == 1 and getattr(args, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')}: needs a router: set --replicas to 2 or more")


def check(args: argparse.Namespace) -> None:
    """Checks the numbers and names. Raises ConfigError."""
    flags.at_least(args, 1, "replicas")
    flags.at_least(args, 0, "slo_ms", "delay_ms", "fetch_gbps", "path_gbps")
    flags.above_0(args, "place_s", "migrate_s")
    for route in args.route:
        if route == LORASERVE:
            if args.place not in ("", LORASERVE):
                raise ConfigError(f"--place {args.place}: --route {route} needs {LORASERVE}'s placement")
            continue
        if route not in ROUTES and route not in TABLES:
            raise ConfigError(f"--route {route}: {one_of(route, (*ROUTES, LORASERVE, *TABLES))}")
        if route in TABLES and not args.place:
            raise ConfigError(f"--route {route}: needs a placement (--place)")
    check_unused(args)
    if args.fail and args.replicas == 1:
        raise ConfigError("--fail: needs --replicas: nothing goes on without a second one")
    losses.parse(args.fail, args.replicas)
    if args.replicas > 1 and args.hint_s:
        raise ConfigError(f"--hint-s {args.hint_s:g}: must be 0 with --replicas {args.replicas}")


def check_unused(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag of the placement or of the balance that no run would heed."""
    moves, placement = args.place in MOVING or LORASERVE in args.route, f"--place {' or '.join(MOVING)}"
    needs = {"place_s": (moves, placement), "late": (moves, placement), "migrate_s": (args.migrate, "--migrate")}
    for name, (used, flag) in needs.items():
        if not used and getattr(args, name) != ROUTED[name]:
            raise ConfigError(f"--{name.replace('_', '-')}: means nothing without {flag}")


def played(args: argparse.Namespace, ranks: Sequence[int], route: str) -> tuple[Service, str]:
    """The service that the flags ask for, and the route: `loraserve` is the table of its own placement."""
    service = service_of(args, ranks)
    return (replace(service, place=LORASERVE), simulated.TABLE) if route == LORASERVE else (service, route)


def service_of(args: argparse.Namespace, ranks: Sequence[int]) -> Service:
    """The service that the flags ask for."""
    return Service(
        args.replicas, tuple(ranks), args.kernel, delay_s=1e-3 * args.delay_ms, fetch_gbps=args.fetch_gbps,
        slo_s=1e-3 * args.slo_ms, seed=args.seed, place=args.place, place_s=args.place_s, ahead=not args.late,
        balance=Balance(every_s=args.migrate_s) if args.migrate else None,
        losses=losses.parse(args.fail, args.replicas), path_gbps=args.path_gbps,
    )  # fmt: skip
