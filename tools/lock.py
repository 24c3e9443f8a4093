"""Pins every package that jlora needs, with its hashes, for each supported Python: `python -m tools.lock`.

The files are `requirements/python3.X.txt`. The first line of each has a hash of what pyproject.toml asks for, so a
test finds a file that is out of step without a package index.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
STAMP = "# of pyproject.toml's dependencies: sha256 "


def asked() -> list[str]:
    """What pyproject.toml depends on."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def stamp(dependencies: list[str]) -> str:
    """The first line of a file that was made for these dependencies."""
    return STAMP + hashlib.sha256("\n".join(sorted(dependencies)).encode()).hexdigest()


def path_of(python: str) -> Path:
    return ROOT / "requirements" / f"python{python}.txt"


def pinned(text: str) -> dict[str, tuple[str, int]]:
    """Package -> its version, and how many hashes are allowed for it."""
    found = {}
    for entry in re.split(r"(?<!\\)\n", text):
        if match := re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", entry):
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = (
                match[2],
                len(re.findall(r"--hash=sha256:[0-9a-f]{64}", entry)),
            )
    return found


def main() -> int:
    """Resolves again for every Python; returns the exit code."""
    for python in PYTHONS:
        path = path_of(python)
        path.parent.mkdir(exist_ok=True)
        command = [
            sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--python-version", python,
            "--python-platform", "linux", "--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url",
            "--quiet",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        path.write_text(f"{stamp(asked())}\n{done.stdout}")
        print(f"wrote {path.relative_to(ROOT)}: {len(pinned(done.stdout))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
