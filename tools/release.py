"""Builds the release: the wheel, twice and with the same bytes, its sha256 and its bill of materials.

    python -m tools.release        # into dist/, from the last commit

Each build has a directory and a umask of its own, and the time stamp of the commit. So whoever builds the commit
again gets the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import sbom

ROOT = Path(__file__).resolve().parents[1]
UMASKS = (0o022, 0o077)


def main() -> int:
    """Writes dist/; returns the exit code, which is 1 if two builds differ."""
    with tempfile.TemporaryDirectory() as scratch:
        one, other = (wheel(Path(scratch) / str(umask), umask) for umask in UMASKS)
        digest = hashlib.sha256(one.read_bytes()).hexdigest()
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            print(f"release: two builds of {one.name} differ", file=sys.stderr)
            return 1
        (out := ROOT / "dist").mkdir(exist_ok=True)
        shutil.copy(one, out)
    (out / f"{one.name}.sha256").write_text(f"{digest}  {one.name}\n")
    sbom.main()
    print(f"release: {out / one.name} sha256 {digest}, built twice")
    return 0


def wheel(folder: Path, umask: int) -> Path:
    """Builds the last commit in a folder of its own."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "--no-same-permissions"], cwd=folder, check=True, input=archive.stdout, umask=umask)
    git = ["git", "log", "-1", "--format=%ct"]
    committed = subprocess.run(git, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "made"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": committed}
    subprocess.run(build, cwd=folder, check=True, env=environment, umask=umask, stdout=subprocess.DEVNULL)
    (made,) = (folder / "made").glob("*.whl")
    return made


if __name__ == "__main__":
    sys.exit(main())
