"""`jlora keys new`: makes an API key."""

from __future__ import annotations

import os
from collections.abc import Sequence

from jlora.errors import ConfigError
from jlora.serve.access import keys
from jlora.serve.flags import Parser

DESCRIPTION = """Makes an API key for the file of `jlora serve --keys FILE.toml`, and prints it once.

The file holds only the key's hash. The server reads a changed file again within a second. To revoke a key, remove
its entry."""


def main(argv: Sequence[str]) -> int:
    """Runs `jlora keys new`; returns the exit code. Raises ConfigError for a file that cannot be written."""
    parser = Parser("jlora keys", DESCRIPTION)
    add = parser.add_argument
    add("command", choices=["new"], help="make a key")
    add("--tenant", required=True, metavar="NAME", help="whose key it is; tenants share no cached KV")
    add("--role", choices=["user", "viewer", "admin"], default="user",
        help="a viewer sees what all tenants do, an admin changes the server too (default user)")  # fmt: skip
    add("--adapters", nargs="+", default=["*"], metavar="NAME", help="names or patterns (fr-*) (default: all)")
    add("--file", metavar="FILE.toml", help="append the entry to this file (default: print it)")
    args = parser.parse(argv)
    key, entry = keys.new(args.tenant, args.role, args.adapters)
    if args.file is None:
        print(entry)
    else:
        _append(args.file, entry)
    print(key)
    return 0


def _append(path: str, entry: str) -> None:
    """Appends to the file in one write; makes one that only its owner may read."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"\n{entry}".encode())
        finally:
            os.close(fd)
    except OSError as e:
        raise ConfigError(f"--file {path}: {e.strerror}") from e
