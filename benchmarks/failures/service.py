"""`jlora cluster` with paced replicas (`replica`): python -m benchmarks.failures.service [flags of `jlora cluster`]"""

from __future__ import annotations

import sys

from benchmarks.failures import replica
from jlora.cluster import cli, service
from jlora.cluster.fleet import LocalFleet


def main(argv: list[str]) -> int:
    """Runs until a signal; returns the exit code."""
    with cli.secret(cli.parse(argv)) as config:
        return service.run(config, LocalFleet(config, replica.__name__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
