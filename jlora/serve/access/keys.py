"""API keys: a TOML file with the hash of each, and the limits of each tenant.

    [[keys]]
    id = "1f2e3d4c"
    sha256 = "..."             # of the whole key
    tenant = "acme"
    role = "user"              # or "viewer", "admin"
    adapters = ["sql", "fr-*"] # names and patterns; default: all
    max_priority = 0           # of its requests; default: 0, and none for an admin

    [tenants.acme]             # for all keys of the tenant together; what is not set has no limit
    concurrent = 8
    queued_tokens = 100000
    requests_per_s = 20.0

A key is `jlora-ID-SECRET`. Its secret has 256 random bits, so one round of sha256 protects it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from jlora.errors import ConfigError, Unauthenticated
from jlora.serve.access.caller import Caller

MAX_BYTES = 4 << 20  # of the file
MAX_KEY = 256  # characters of what a client sends
PREFIX = "jlora"

Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
Role = Literal["user", "viewer", "admin"]


class Key(Struct, forbid_unknown_fields=True, frozen=True):
    """One entry of the file."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Tenant
    role: Role = "user"
    adapters: list[Annotated[str, Meta(min_length=1, max_length=256)]] = msgspec.field(default_factory=lambda: ["*"])
    max_priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None

    def caller(self) -> Caller:
        """Who calls with this key. An admin sees every adapter."""
        allowed = None
        if self.role != "admin" and "*" not in self.adapters:
            allowed = re.compile("|".join(map(fnmatch.translate, self.adapters)))
        admin, highest = self.role == "admin", self.max_priority
        if highest is None and not admin:
            highest = 0
        return Caller(self.tenant, admin, self.role != "user", allowed, highest, self.id)


class Limits(Struct, forbid_unknown_fields=True, frozen=True):
    """What all keys of a tenant may use together. None is no limit.

    Attributes:
        concurrent: completions that run or wait; by themselves, other calls under way; and, together with the
            completions, calls for more of them whose message is on its way.
        queued_tokens: prompt tokens of requests that have no token of output yet.
        requests_per_s: calls, without aborts and an admin's; a second's worth may come at once.
    """

    concurrent: Annotated[int, Meta(ge=1)] | None = None
    queued_tokens: Annotated[int, Meta(ge=1)] | None = None
    requests_per_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None


class _File(Struct, forbid_unknown_fields=True, frozen=True):
    keys: list[Key]
    tenants: dict[Tenant, Limits] = {}


@dataclass(frozen=True, slots=True)
class Keys:
    """A file that has been read.

    Attributes:
        known: id -> the key's hash and who calls with it.
        limits: by tenant.
    """

    known: Mapping[str, tuple[bytes, Caller]]
    limits: Mapping[str, Limits]

    def caller(self, key: str) -> Caller:
        """Who owns the key. Raises Unauthenticated. The secret is compared in constant time."""
        prefix, _, rest = key.partition("-")
        found = self.known.get(rest.partition("-")[0]) if prefix == PREFIX and len(key) <= MAX_KEY else None
        if found is None or not hmac.compare_digest(found[0], _digest(key)):
            raise Unauthenticated("authorization: the server does not know this key")
        return found[1]


def read(path: str) -> Keys:
    """Reads the file of `serve.keys`. Raises ConfigError, which names the entry."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"serve.keys = {path!r}: must have at most {MAX_BYTES} bytes")
        if not content.strip():  # perhaps an editor writes it just now
            raise ConfigError(f"serve.keys = {path!r}: is empty; `jlora keys new` makes a key, `keys = []` is for none")
        parsed = msgspec.toml.decode(content, type=_File)
    except OSError as e:
        raise ConfigError(f"serve.keys = {path!r}: {e.strerror}") from e
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:  # ValueError: no UTF-8, or a number too long
        raise ConfigError(f"serve.keys = {path!r}: {e}") from e
    known = {key.id: (bytes.fromhex(key.sha256), key.caller()) for key in parsed.keys}
    if len(known) < len(parsed.keys):
        raise ConfigError(f"serve.keys = {path!r}: two keys have the same id")
    return Keys(known, parsed.tenants)


def new(tenant: str, role: Role, adapters: list[str]) -> tuple[str, str]:
    """A new key, and its entry for the file. Raises ConfigError for a field that is wrong."""
    id = secrets.token_hex(4)
    key = f"{PREFIX}-{id}-{secrets.token_urlsafe(32)}"
    fields = {"id": id, "sha256": _digest(key).hex(), "tenant": tenant, "role": role, "adapters": adapters}
    try:
        msgspec.convert(fields, Key)
    except msgspec.ValidationError as e:
        raise ConfigError(f"tenant = {tenant!r}, adapters = {adapters!r}: {e}") from e
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in fields.items()]
    return key, "\n".join(["[[keys]]", *lines, ""])


def equal(given: str, known: str) -> bool:
    """Compares two secrets in constant time. A client's may hold anything."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), known.encode())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
