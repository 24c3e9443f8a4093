"""Where a server looks for adapters when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from jlora.adapters.names import at_start
from jlora.errors import ConfigError
from jlora.ports import DiskFiles


def test_a_directory_of_adapters_is_no_adapter_itself(tmp_path: Path):
    one = tmp_path / "sql"
    one.mkdir()
    (one / "adapter_config.json").write_text("{}")
    assert at_start({}, str(tmp_path), DiskFiles()) == {"sql": str(one)}
    with pytest.raises(ConfigError, match=r"adapters\.dir = .*sql.*: is an adapter itself.*--adapter NAME=PATH"):
        at_start({}, str(one), DiskFiles())
