"""Builds the release: the wheel, twice and with the same bytes, its sha256 and its bills of materials.

    python -m tools.release        # into dist/, from the last commit

The two builds differ in what a build should not depend on: the directory, the time zone, and the order of Python's
sets. Files have the time stamp of the commit and the modes of one umask. So whoever builds the commit again, with
the same setuptools, gets the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools import sbom
from tools.lock import ROOT

UMASK = 0o022
BUILDS: Mapping[str, Mapping[str, str]] = {
    "one": {"TZ": "UTC", "PYTHONHASHSEED": "1"},
    "another": {"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "2"},
}


def main() -> int:
    """Writes dist/; returns the exit code, which is 1 if two builds differ."""
    with tempfile.TemporaryDirectory() as scratch:
        one, other = (wheel(Path(scratch) / name, environment) for name, environment in BUILDS.items())
        data = one.read_bytes()
        if (one.name, data) != (other.name, other.read_bytes()):
            print(f"release: two builds of {one.name} differ", file=sys.stderr)
            return 1
        (out := ROOT / "dist").mkdir(exist_ok=True)
        shutil.copy(one, out)
    digest = hashlib.sha256(data).hexdigest()
    (out / f"{one.name}.sha256").write_text(f"{digest}  {one.name}\n")
    print(f"release: dist/{one.name}: sha256 {digest}, built twice")
    return sbom.main()


def wheel(folder: Path, environment: Mapping[str, str]) -> Path:
    """Builds the last commit in a folder of its own."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    unpack = ["tar", "-x", "--no-same-permissions"]
    subprocess.run(unpack, cwd=folder, check=True, input=archive.stdout, umask=UMASK)
    git = ["git", "log", "-1", "--format=%ct"]
    committed = subprocess.run(git, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "made"]
    given = {**os.environ, **environment, "SOURCE_DATE_EPOCH": committed}
    done = subprocess.run(build, cwd=folder, env=given, umask=UMASK, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"release: cannot build: {done.stderr or done.stdout}")
    (made,) = (folder / "made").glob("*.whl")
    return made


if __name__ == "__main__":
    sys.exit(main())
