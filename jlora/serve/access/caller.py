"""The caller of a call, and its rights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from jlora.errors import NotFound, PermissionDenied
from jlora.types import AdapterInfo


class Need(Enum):
    """The key that a call needs, on a server with keys. A call that no table names needs `ADMIN`.

    Attributes:
        NOTHING: no key: health.
        KEY: any key.
        END: any key, also beyond the tenant's rate, because the call ends work.
        SIGHT: a key of the role `viewer` or `admin`, because the answer counts what all tenants do: metrics, the
            dashboard, the state of the cache.
        ADMIN: a key of the role `admin`.
    """

    NOTHING = "nothing"
    KEY = "a key"
    END = "a key, at any rate"
    SIGHT = "a key of the role viewer or admin"
    ADMIN = "a key of the role admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        tenant: None on a server without keys: the client says it.
        sight: it may see what all tenants do.
        adapters: matches the names of the adapters that the caller may use and see; None: all.
        max_priority: of its requests; None: any.
        key: the id of the key, for the log.
    """

    tenant: str | None
    admin: bool
    sight: bool
    adapters: re.Pattern[str] | None = None
    max_priority: int | None = None
    key: str = ""

    def check(self, need: Need, what: str) -> None:
        """Raises PermissionDenied unless the caller may do `what`."""
        if (need is Need.ADMIN and not self.admin) or (need is Need.SIGHT and not self.sight):
            raise PermissionDenied(f"{what}: needs {need.value}")

    def sees(self, adapter: str) -> bool:
        """Whether the caller may use the adapter, if there is one of that name."""
        return self.adapters is None or self.adapters.fullmatch(adapter) is not None

    def check_adapter(self, adapter: str) -> None:
        """Raises PermissionDenied, also for an adapter that does not exist: the answer tells nothing about others'."""
        if not self.sees(adapter):
            raise PermissionDenied(f"adapter {adapter!r}: the key is not for it")

    def check_priority(self, priority: int | None, lower_first: bool = False) -> int:
        """A request's priority, of which higher ones run first; `lower_first`: the client's has the other sign.

        One that names none, or 0, gets the highest that the key has up to 0.

        Raises PermissionDenied for one above the key's.
        """
        most = self.max_priority
        if not priority:
            return 0 if most is None else min(0, most)
        given = -priority if lower_first else priority
        if most is not None and given > most:
            bound = f"at least {-most} (lower runs first)" if lower_first else f"at most {most}"
            raise PermissionDenied(f"priority = {priority}: must be {bound}; the key's max_priority is {most}")
        return given

    def seen(self, info: AdapterInfo) -> AdapterInfo:
        """An adapter as this caller may see it: without the counters of other tenants' requests."""
        if self.sight:
            return info
        return replace(info, running=0, waiting=0, hits=0, last_used_s=0.0, merged=False)

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


ANYBODY = Caller(tenant=None, admin=True, sight=True)  # on a server without keys
