"""Asks the vulnerability service about every pinned package: `python -m tools.audit`.

Exits with 1 if it knows of a vulnerability, or if pip-audit itself fails; with 3 (`NOT_AUDITED`) if the service cannot
be reached, or knows none of the packages of a lock file. `.ci/run` goes on after a 3, because it also runs where there
is no internet.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

from tools.lock import PYTHONS, ROOT, path_of

NOT_AUDITED = 3  # the exit code
# pip-audit catches only a connection that times out. Any other ends it, with this as the trace's last line.
UNREACHED = re.compile(r"requests\.exceptions\.(ConnectionError|ConnectTimeout|ReadTimeout|ProxyError): ")
TIMED_OUT = "Could not connect to "


def main() -> int:
    """Audits the lock file of every Python; returns the exit code: 1, if there is one, before `NOT_AUDITED`."""
    codes = set()
    for python in PYTHONS:
        path = str(path_of(python).relative_to(ROOT))
        code, said = verdict(*asked(path))
        print(f"audit: {path}: {said}", flush=True)
        codes.add(code)
        if code == NOT_AUDITED:  # the others would wait for the same answer
            break
    return 1 if 1 in codes else max(codes)


def asked(path: str) -> tuple[str, str]:
    """What pip-audit says of a lock file, as JSON, and what it complains of."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", path, "--require-hashes", "--disable-pip"]
    options = ["--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    return run.stdout, run.stderr


def verdict(answer: str, complaint: str = "") -> tuple[int, str]:
    """The exit code, and a line about a lock file. A package that the service does not know is no clean one."""
    try:
        found = json.loads(answer)["dependencies"]
    except (ValueError, KeyError):
        last = complaint.strip().rpartition("\n")[2]
        if UNREACHED.match(last) or (TIMED_OUT in complaint and "Traceback" not in complaint):
            return NOT_AUDITED, "NOT AUDITED: the vulnerability service cannot be reached"
        return 1, f"FAILED: pip-audit has given no answer: {last or 'it says nothing'}"
    known = [one for one in found if "skip_reason" not in one]
    if not known:
        return NOT_AUDITED, f"NOT AUDITED: the vulnerability service knows none of {len(found)} packages"
    bad = [f"{one['name']} {one['version']}: {flaw['id']}" for one in known for flaw in one["vulns"]]
    unknown = f", {len(found) - len(known)} not known to the service" if len(known) < len(found) else ""
    return int(bool(bad)), f"{len(known)} packages checked{unknown}; {', '.join(bad) or 'no known vulnerability'}"


if __name__ == "__main__":
    sys.exit(main())
