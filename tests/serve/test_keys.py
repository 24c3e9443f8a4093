"""The file of keys: what is wrong with it, its changes, and the command that makes keys."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from jlora import cli
from jlora.config import ServeConfig
from jlora.errors import ConfigError, Unauthenticated
from jlora.serve.access import keys, watched
from jlora.serve.access.access import Access
from jlora.serve.access.caller import Caller, Need
from tests.serve._server import wait_until


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; .*keys = ..` is for none"),
        ("\n", "is empty"),
        ("# none", "keys"),
        ("keys = [", "serve.keys"),
        ("keys = " + "9" * 5000, "serve.keys"),
        ('[[keys]]\nid = "00000000"\nsha256 = "12"\ntenant = "a"', r"sha256|\$.keys"),
        ('[[keys]]\nid = "00000000"\nsha256 = "' + "0" * 64 + '"\ntenant = "a b"', "tenant"),
        ('[[keys]]\nid = "00000000"\nsha256 = "' + "0" * 64 + '"\ntenant = "a"\nrole = "root"', "root"),
        ('[[keys]]\nid = "00000000"\nsha256 = "' + "0" * 64 + '"\ntenant = "a"\nlimit = 3', "limit"),
        (('[[keys]]\nid = "00000000"\nsha256 = "' + "0" * 64 + '"\ntenant = "a"\n') * 2, "same id"),
        ("[tenants.a]\nconcurrent = 0", "keys|concurrent"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, text: str, said: str):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError, match=said) as e:
        keys.read(str(tmp_path / "keys.toml"))
    assert "\n" not in str(e.value)
    with pytest.raises(ConfigError, match="No such file"):
        keys.read(str(tmp_path / "none.toml"))


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(watched, "LOOK_S", 0.01)
    (old, first), (new, second) = (keys.new("a", "user", ["*"]) for _ in range(2))
    file = tmp_path / "keys.toml"
    file.write_text(first)
    guard = Access(ServeConfig(keys=str(file)))

    def who(key: str) -> Caller:
        return guard.admit(Need.KEY, [f"bearer {key}"], "a call")

    def known(key: str) -> bool:
        try:
            return who(key).tenant == "a"
        except Unauthenticated:
            return False

    assert known(old) and not known(new)
    for i, broken in enumerate(("[[keys", "", None), 1):
        file.unlink() if broken is None else file.write_text(broken)
        wait_until(lambda i=i: known(old) and caplog.text.count("what was read before stays in use") == i)
        assert not known(new)
    file.write_text(second)
    wait_until(lambda: known(new))
    assert not known(old)
    file.write_text("keys = []")
    wait_until(lambda: not known(new))


def test_a_file_that_fails_in_an_unknown_way_is_read_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watched, "LOOK_S", 0.01)
    file, tried = tmp_path / "file", list[str]()
    file.write_text("old")

    def read() -> str:
        tried.append(file.read_text())
        if tried[-1] == "bad":
            raise RuntimeError(tried[-1])
        return tried[-1]

    files = watched.Watched([str(file)], read)
    file.write_text("bad")
    wait_until(lambda: "bad" in tried)
    assert files.current() == "old"
    file.write_text("newest")
    wait_until(lambda: files.current() == "newest")


def test_a_file_that_cannot_be_read_for_a_while_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(watched, "LOOK_S", 60.0)
    file, errors = tmp_path / "file", list[OSError]()
    file.write_text("old")

    def read() -> str:
        if errors:
            raise errors[0]
        return file.read_text()

    files = watched.Watched([str(file)], read)
    file.write_text("newer")
    errors.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))  # of this process, not of the file
    for _ in range(3):
        files.look()
    assert files.current() == "old" and caplog.text.count("what was read before stays in use") == 1
    errors.clear()
    files.look()
    assert files.current() == "newer"


def test_the_command_makes_keys_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "keys.toml"
    made = []
    for argv in (["--tenant", "acme", "--role", "admin"], ["--tenant", "b", "--adapters", "fr-*", "sql"]):
        assert cli.main(["keys", "new", *argv, "--file", str(file)]) == 0
        made.append(capsys.readouterr().out.strip())
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(key in file.read_text() for key in made), "only hashes are kept"
    known = keys.read(str(file))
    admin, user = map(known.caller, made)
    assert (admin.tenant, admin.admin, admin.sees("x")) == ("acme", True, True)
    assert (user.tenant, user.admin) == ("b", False)
    assert [user.sees(name) for name in ("fr-1", "sql", "sql2", "x")] == [True, True, False, False]
    assert cli.main(["keys", "new", "--tenant", "a b"]) == 1
    assert "tenant = 'a b'" in capsys.readouterr().err
    assert cli.main(["keys", "new", "--tenant", "a"]) == 0
    assert capsys.readouterr().out.startswith("[[keys]]\nid = ")
