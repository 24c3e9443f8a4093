"""Asks the vulnerability service about every pinned package: `python -m tools.audit`.

Exits with 1 if it knows of a vulnerability. Where the service does not answer, it says that nothing was checked, and
exits with 0: continuous integration also runs where there is no internet.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tools.lock import PYTHONS, ROOT, path_of


def main() -> int:
    """Audits the lock file of every Python; returns the exit code."""
    return max(audit(python) for python in PYTHONS)


def audit(python: str) -> int:
    """One lock file."""
    path = path_of(python).relative_to(ROOT)
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(path), "--require-hashes", "--disable-pip"]
    done = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off", "--timeout", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        why = done.stderr.strip().splitlines()[-1:] or ["no answer"]
        print(f"audit: SKIPPED {path}: the vulnerability service does not answer ({why[0][:200]})")
        return 0
    bad = [(one["name"], one["version"], flaw["id"]) for one in found for flaw in one.get("vulns", ())]
    for name, version, flaw in bad:
        print(f"audit: {path}: {name} {version}: {flaw}")
    print(f"audit: {path}: {len(found)} packages, {len(bad)} known vulnerabilities")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
