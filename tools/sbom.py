"""Writes what jlora is installed with as bills of materials, CycloneDX in JSON, into dist/: `python -m tools.sbom`.

One for each lock file, with the hashes of it. The same lock file gives the same bytes.
"""

from __future__ import annotations

import subprocess
import sys

from tools.lock import PYTHONS, ROOT, path_of


def main() -> int:
    """Writes a file for every Python; returns the exit code."""
    (out := ROOT / "dist").mkdir(exist_ok=True)
    for python in PYTHONS:
        path = out / f"jlora-python{python}.cdx.json"
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--of", "JSON"]
        subprocess.run([*command, "--output-file", str(path), str(path_of(python))], cwd=ROOT, check=True)
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
