"""A Ray cluster of two nodes on this machine, each with its own raylet: run as a process, it obeys its stdin.

Prints the head's address once both nodes are up. The line "kill" kills the second node with all that runs on it; the
end of stdin ends the cluster.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 100 << 20


def main(folder: str) -> None:
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second, allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
