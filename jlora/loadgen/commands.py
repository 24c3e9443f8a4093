"""`jlora bench COMMAND` of an installed package: the load generator and the facts of its workloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def _serve(argv: Sequence[str]) -> int:
    from jlora.loadgen.cli import main

    return main(argv)


def _workloads(argv: Sequence[str]) -> int:
    from jlora.loadgen.workloads import main

    return main(argv)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"serve": _serve, "workloads": _workloads}


def usage() -> str:
    """What `jlora bench` can do without a checkout."""
    return """usage: jlora bench COMMAND [flags]

  serve      play a workload to running servers, or to several configurations in turn
  workloads  print what the workloads are like

The studies behind docs/results (throughput, latency, policies, ...) are no part of the package.
Clone the repository, run `make setup`, then `.venv/bin/jlora bench STUDY` there."""
