"""The token that the processes of one service share."""

from __future__ import annotations

from pathlib import Path

import pytest

from jlora.cluster.secret import Secret
from jlora.errors import ConfigError


def test_the_first_line_of_the_file_is_the_token(tmp_path: Path):
    (tmp_path / "token").write_text("0123456789abcdef\nmore\n")
    assert Secret.read(str(tmp_path / "token")).metadata == (("authorization", "Bearer 0123456789abcdef"),)
    assert Secret.read("").metadata == ()


@pytest.mark.parametrize("content", [b"", b"short\n", b"has a space inside it", "schlüssel-schlüssel".encode()])
def test_a_file_without_a_good_token_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match="cluster.token_file"):
        Secret.read(str(tmp_path / "token"))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="none: No such file"):
        Secret.read(str(tmp_path / "none"))
