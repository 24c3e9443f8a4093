"""The package is found wherever Python runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_folder_named_like_the_package_does_not_hide_it(tmp_path: Path):
    """As in the directory that holds a clone."""
    (tmp_path / "jlora").mkdir()
    found = subprocess.run(
        [sys.executable, "-c", "import jlora; print(jlora.__version__)"], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 0 and found.stdout.strip(), found.stderr
