"""The simulator's results as digests: a change of engine, cache or simulator that alters one request shows.

    python -m tests.sim.digests --write     # renews digests.json; one to three minutes

A change that alters results on purpose renews the digests in the same commit, and the CHANGELOG says what changes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jlora import cli
from jlora.cluster.routing.routes import LORASERVE, ROUTES

FILE = Path(__file__).with_name("digests.json")
ALL = "jlora fastlibra fastlibra-wom fastlibra-wos fastlibra-wol lru vllm vllm-fair:0.3 slora clairvoyant"
MANY = "--workload W1 --gap 3 --adapters 12 --shrink 4 --replicas 3 --hbm-gb 3 --host-gb 6 --fetch-gbps 10 --slo-ms 60"
# Flags of `jlora sim` by name: workloads under pressure, clients that send hints, and a closed loop without overlap;
# three replicas under every route and LoRAServe's placement, and with dLoRA's balance.
FLAGS: Mapping[str, str] = {
    "W1": f"--workload W1 --hbm-share 0.35 --link-gbps 10 --policy {ALL}",
    "W3": f"--workload W3 --hbm-share 0.25 --link-gbps 5 --policy {ALL}",
    "W6a": f"--workload W6a --hbm-share 0.35 --link-gbps 5 --policy {ALL}",
    "W8": f"--workload W8 --shrink 32 --hbm-share 0.35 --link-gbps 5 --policy {ALL}",
    "hints": "--workload W3 --hint-s 1 --link-gbps 2 --policy jlora fastlibra",
    "users": "--workload W8 --shrink 16 --users 20 --policy jlora lru --set engine.overlap=false",
    "routes": f"{MANY} --path-gbps 2 --place-s 4 --route {' '.join(ROUTES)} {LORASERVE}",
    "balance": f"{MANY} --kernel padded --route first-fit --migrate --migrate-s 0.5 --set engine.max_seqs=4",
}
# Requests per second, and seconds.
LONG = {"W1": (4, 120), "W3": (3, 120), "W6a": (2, 120), "W8": (2, 120), "hints": (8, 60), "users": (2, 100)}
SHORT = {"W1": (1, 30), "W3": (3, 40), "W6a": (2, 30), "W8": (2, 60), "hints": (8, 20), "users": (2, 30)}
SHORT |= {"routes": (4, 20), "balance": (8, 20)}


def runs(sizes: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """The flags of each simulation, by its name."""
    return {f"{name} {s} s": f"{FLAGS[name]} --rate {rate} --seconds {s}" for name, (rate, s) in sizes.items()}


def digests(flags: str) -> dict[str, str]:
    """By policy, or by route: of all that a simulation with these flags returns, with a row for each request."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert cli.main(["sim", *flags.split(), "--json", str(out)]) == 0
        runs = json.loads(out.read_text())["runs"]
    return {run.get("route", run["policy"]): _digest(run) for run in runs}


def _digest(run: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]


def known() -> dict[str, dict[str, str]]:
    """The digests of the repository, by name, and policy or route."""
    return json.loads(FILE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write them into the repository")
    args = parser.parse_args()
    found = {name: digests(flags) for name, flags in (runs(SHORT) | runs(LONG)).items()}
    if args.write:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
