"""Who calls, and what a caller may do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from jlora.errors import NotFound, PermissionDenied


class Need(Enum):
    """What a call needs, on a server with keys. What no table names needs `ADMIN`.

    Attributes:
        NOTHING: no key: health.
        KEY: any key.
        END: any key, also beyond the tenant's rate, because the call ends work.
        SIGHT: a key that may use every adapter, because the answer names them all: metrics, the dashboard.
        ADMIN: a key of the role `admin`.
    """

    NOTHING = "nothing"
    KEY = "a key"
    END = "a key, at any rate"
    SIGHT = "a key for all adapters"
    ADMIN = "a key of the role admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        tenant: None on a server without keys: the client says it.
        adapters: matches the names of the adapters that the caller may use and see; None: all.
        key: the id of the key, for the log.
    """

    tenant: str | None
    admin: bool
    adapters: re.Pattern[str] | None = None
    key: str = ""

    def check(self, need: Need, what: str) -> None:
        """Raises PermissionDenied unless the caller may do `what`."""
        if (need is Need.ADMIN and not self.admin) or (need is Need.SIGHT and self.adapters is not None):
            raise PermissionDenied(f"{what}: needs {need.value}")

    def sees(self, adapter: str) -> bool:
        """Whether the caller may use the adapter, if there is one of that name."""
        return self.adapters is None or self.adapters.fullmatch(adapter) is not None

    def check_adapter(self, adapter: str) -> None:
        """Raises PermissionDenied, also for an adapter that does not exist: the answer tells nothing about others'."""
        if not self.sees(adapter):
            raise PermissionDenied(f"adapter {adapter!r}: the key is not for it")

    def tenant_of(self, named: str) -> str:
        """The tenant of a request whose client names one, or "". Raises PermissionDenied for another's."""
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise PermissionDenied(f"tenant = {named!r}: the key is of another tenant; leave the field empty")
        return self.tenant

    def told(self, error: BaseException) -> BaseException:
        """The error as this caller may read it: without names of adapters that it does not see."""
        if isinstance(error, NotFound) and error.near:
            return NotFound(error.message, [name for name in error.near if self.sees(name)])
        return error


ANYBODY = Caller(tenant=None, admin=True)  # on a server without keys
