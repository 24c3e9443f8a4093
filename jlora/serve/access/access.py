"""Accepts or refuses each call of both fronts, before its message is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from jlora.config import ServeConfig
from jlora.errors import Unauthenticated
from jlora.ports import Threads
from jlora.serve.access import keys
from jlora.serve.access.caller import ANYBODY, Caller, Need
from jlora.serve.access.keys import Keys
from jlora.serve.access.tenants import Tenants
from jlora.serve.access.watched import Watched

log = logging.getLogger(__name__)

SCHEME = "bearer "


class Access:
    """The keys of a server, and what their tenants use. For the event loop's thread only.

    Without keys everybody may do everything, and clients name their tenant.
    """

    def __init__(self, config: ServeConfig | None = None, token: str = "", threads: Threads | None = None):
        """Reads `serve.keys`. A client with `token` may do everything, too; "" is no token. Raises ConfigError."""
        self._token = token
        self.tenants = Tenants()
        path = config.keys if config is not None else ""
        self._keys = Watched([path], lambda: keys.read(path), threads) if path else None
        self._limited: Keys | None = None

    def admit(self, need: Need, authorization: Sequence[str], what: str) -> Caller:
        """Who makes the call `what` with these authorization headers.

        Raises:
            Unauthenticated: the call needs a key, and the client gives none that is known.
            PermissionDenied: the key is not for this call.
            LimitReached: the key's tenant asks too often.
        """
        if need is Need.NOTHING or not (self._keys or self._token):
            return ANYBODY
        if self._token and keys.equal(_bearer(authorization), self._token):
            return ANYBODY
        if self._keys is None:
            raise Unauthenticated("authorization: the server does not know this key")
        known = self._keys.current()
        if known is not self._limited:
            self.tenants.limit(known.limits)
            self._limited = known
        caller = known.caller(_bearer(authorization))
        caller.check(need, what)
        if need not in (Need.END, Need.ADMIN):
            self.tenants.arrive(caller.tenant)
        if need is Need.ADMIN:
            log.info("key %s of tenant %s calls %s", caller.key, caller.tenant, what)
        return caller

    def call(self, caller: Caller, completes: bool) -> AbstractContextManager[None]:
        """Counts a call, from before its message to its end. Raises LimitReached.

        An admin's calls have no limit, except completions: they may be what ends the work of others.
        """
        free = caller.admin and not completes
        return self.tenants.call(None if free else caller.tenant, completes)


def _bearer(authorization: Sequence[str]) -> str:
    if len(authorization) != 1 or not authorization[0].lower().startswith(SCHEME):
        raise Unauthenticated("authorization: must be given once, as `Bearer KEY`")
    return authorization[0][len(SCHEME) :].strip()
