"""Ten thousand names that try to be a path: each is refused, or is a single harmless part of one."""

from __future__ import annotations

import os
import random
import unicodedata

import pytest

from jlora.adapters.names import MAX_CHARS, check_key, check_name
from jlora.errors import InvalidArgument

PARTS = (
    "..", ".", "/",
    "\\", "%2e%2e", "%2f", "%00", "\0", "\n", "\t", " ", "~", "$HOME", "`id`", ";", "|", "*", "C:", "//host/",
    "\\\\host\\", "file:", "http://", "..;", "．．", "․․", "／", "\u2025", "\u202e", "\ufeff", "\ud800", "é", "𝄞",
    "a", "B7", "_x", "-y", "v1.0", "con", "nul", "x" * 60, "@1", "@", "-", "--set", ":", "#", "?",
)  # fmt: skip


def names(count: int) -> list[str]:
    draw = random.Random(25)
    return ["".join(draw.choices(PARTS, k=draw.randrange(6))) for _ in range(count)]


def accepted(name: str, check=check_name) -> bool:
    try:
        assert check(name) == name
    except InvalidArgument as e:
        str(e).encode("utf-8", "backslashreplace")
        return False
    return True


@pytest.mark.parametrize("check", [check_name, check_key], ids=["name", "key"])
def test_no_odd_name_is_accepted(check):
    good = [name for name in names(10_000) if accepted(name, check)]
    for name in good:
        assert name.isascii() and unicodedata.normalize("NFKC", name) == name
        assert os.path.normpath(os.path.join("/root", name)) == f"/root/{name}" and os.path.basename(name) == name
        assert name[0].isalnum() and not set(name) - set("._-@") - set(filter(str.isalnum, name))
        assert len(name) <= MAX_CHARS + len("@") + 19
    assert 100 < len(good) < 5000  # both sides


def test_ordinary_names_are_accepted():
    for name in ("sql", "fr-2", "a.b_c-d", "7b", "x" * MAX_CHARS, "V1.0.final"):
        assert accepted(name) and accepted(f"{name}@12", check_key)
    for name in ("", ".hidden", "-flag", "a..b", "a/b", "a b", "x" * (MAX_CHARS + 1), "sql@12", "é"):
        assert not accepted(name)
