"""Builds the release: the wheel, twice and with the same bytes, its sha256 and its bills of materials.

    python -m tools.release        # into dist/, from this checkout

The two builds differ in what a build should not depend on: the directory, the time zone, and the order of Python's
sets. Files have the time stamp of the last commit and the modes of one umask. So whoever builds the commit again,
with the same setuptools, gets the same bytes. A checkout with changes of its own is refused.
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

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "jlora")
UMASK = 0o022
EARLIEST = "315619200"  # 1980-01-02
BUILDS: Mapping[str, Mapping[str, str]] = {
    "one": {"TZ": "UTC", "PYTHONHASHSEED": "1"},
    "another": {"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "2"},
}


def main() -> int:
    """Writes dist/; returns the exit code, which is 1 if two builds differ, or the checkout is not the last commit."""
    if changes := changed():
        print(f"release: commit these first, or take them back:\n{changes}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        one, other = (wheel(Path(scratch) / name, environment, stamp()) for name, environment in BUILDS.items())
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


def wheel(folder: Path, environment: Mapping[str, str], epoch: str) -> Path:
    """Builds a copy of the package in a folder of its own."""
    os.umask(UMASK)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=leave, copy_function=shutil.copyfile)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "made"]
    given = {**os.environ, **environment, "SOURCE_DATE_EPOCH": epoch}
    done = subprocess.run(build, cwd=folder, env=given, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"release: cannot build: {done.stderr or done.stdout}")
    (made,) = (folder / "made").glob("*.whl")
    return made


def changed() -> str:
    """Files that are not as in the last commit, and those that it lacks and a wheel would have; "" without git."""
    own = git("status", "--porcelain", "--untracked-files=no")
    return "\n".join(filter(None, (own, git("ls-files", "--others", "--exclude-standard", "--", *SOURCES))))


def stamp() -> str:
    """Seconds of the last commit; where there is no git, those of $SOURCE_DATE_EPOCH, or zip's earliest day."""
    return git("log", "-1", "--format=%ct") or os.environ.get("SOURCE_DATE_EPOCH", EARLIEST)


def git(*command: str) -> str:
    """What git says; "" where there is no checkout. Where git does not look at one, nobody knows what is built."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    except OSError as e:
        raise SystemExit(f"release: git {command[0]}: {e.strerror}") from e
    if done.returncode:
        raise SystemExit(f"release: git {command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
