"""Files that an operator points a server to: its configuration, its keys, the registry of its adapters."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

from jlora import config
from jlora.adapters.catalogue import Catalogue, Row
from jlora.cluster.registry import Registry
from jlora.ports import OsThreads
from jlora.serve.access import keys as access_keys
from tests.fuzz._engine import Target, status

KEYS = b"""[[keys]]
id = "1f2e3d4c"
sha256 = "%s"
tenant = "acme"
role = "user"
adapters = ["sql", "fr-*", "[a-c]?"]
max_priority = 0
[[keys]]
id = "00000000"
sha256 = "%s"
tenant = "b"
role = "admin"
[tenants.acme]
concurrent = 8
queued_tokens = 100000
requests_per_s = 20.0
""" % (b"0" * 64, b"f" * 64)
TOML = b"""[model]
path = "models/x"
max_model_len = 4096
[adapters]
dir = "adapters"
roots = ["/srv/a", "/srv/b"]
paths = {sql = "adapters/sql"}
[cache]
hbm_blocks = 512
host_gib = 1.5
lower = 0.1
[engine]
max_seqs = 8
cold_start = "auto"
[serve]
port = 50051
stall_s = 30
insecure = false
[cluster]
fleet = "static"
addresses = ["a:1", "b:2"]
resources = {TPU = 4}
"""


@cache
def _folder() -> Path:
    """Files in memory where the machine has such a file system."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="jlora-fuzz-", dir=shm if os.access(shm, os.W_OK) else None))


def _reading(name: str, read: Callable[[str], object]) -> Callable[[bytes], str]:
    path = _folder() / name

    def run(data: bytes) -> str:
        path.write_bytes(data)
        return status(lambda: read(str(path)))

    return run


def toml() -> Target:
    """The file of `--config`."""
    words = [key.encode() for key in config.keys()] + [b"[serve]\n", b"= 1\n", b'= "x"\n', b"[[a]]\n", b"nan", b"inf"]
    return Target("toml", _reading("config.toml", config.load), [TOML, b"[model]\npath = 'x'\n"], words)


def keys() -> Target:
    """The file of `serve.keys`."""

    def read(path: str) -> None:
        known = access_keys.read(path)
        for _, caller in known.known.values():
            caller.sees("sql")

    words = [b"[[keys]]\n", b"[tenants.x]\n", b'role = "viewer"\n', b'"*"', b'"[!a"', b'"**?*?*?*x"', b"nan", b"inf"]
    return Target("keys", _reading("keys.toml", read), [KEYS], words)


def registry() -> Target:
    """The SQLite file of `adapters.registry`, as a controller opens it."""
    path = _folder() / "registry.db"
    files = [path.with_name(path.name + end) for end in ("", "-wal", "-shm", "-journal", ".lock")]

    def run(data: bytes) -> str:
        for file in files:
            file.unlink(missing_ok=True)
        path.write_bytes(data)
        return status(_opened)

    def _opened() -> None:
        registry = Registry(str(path), OsThreads())
        try:
            for version in registry.versions():
                assert registry.get(version.name).uid == version.number
            registry.number()
        finally:
            registry.close()

    words = [b"sql", b'["q"]', b"SQLite format 3\x00", b"strict", b"\x00\x00\x00\x02", b"insert", b"-1"]
    return Target("registry", run, [_rows(0), _rows(2)], words)


def _rows(count: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.db"
        catalogue = Catalogue(str(path), OsThreads())
        ranks = {"layers.0.self_attn.q_proj": 4}
        rows = [
            Row(f"a{i}", i, "d" * 64, "e" * 64, "base", "f", ranks, ("q",), 10, 1, "/a", (1, 2), False, (5,), 1.5, 2.5)
            for i in range(1, 1 + count)
        ]
        catalogue.put(rows).result()
        catalogue.close()
        with closing(sqlite3.connect(path, isolation_level=None)) as table:
            for statement in ("pragma journal_mode = delete", "pragma page_size = 512", "vacuum"):
                table.execute(statement)  # a small file: every byte means something
        return path.read_bytes()
