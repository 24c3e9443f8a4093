"""The prompts that a router has sent: where their blocks may be cached, and what a policy knows of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from jlora.cluster.directory import Version
from jlora.cluster.prefixes import Prefixes, shared
from jlora.cluster.requests import Routed
from jlora.cluster.routing.policy import Ask
from jlora.types import Request

BLOCKS = 1024  # of a prompt that the router remembers


class Prompts:
    """Remembers nothing until it knows the size of the replicas' blocks. For one thread."""

    def __init__(self) -> None:
        self._prefixes: Prefixes | None = None
        self._tokens = 0  # of a prompt that are remembered

    def begin(self, block_tokens: int) -> None:
        """Replicas with blocks of this size have come; only the first call counts."""
        if self._prefixes is None:
            self._prefixes, self._tokens = Prefixes(block_tokens), BLOCKS * block_tokens

    def chain(self, request: Request, version: Version | None) -> Sequence[int]:
        """The request's prompt, for `cached` and `sent`."""
        if self._prefixes is None or request.bypass_prefix_cache:
            return ()
        key, invocation = (None, ()) if version is None else (version.key, version.alora_invocation_tokens)
        tokens, origin = shared(request.prompt, key, invocation)
        return self._prefixes.chain(tokens[: self._tokens], (request.salt, origin))

    def cached(self, chain: Sequence[int]) -> Mapping[str, int]:
        """Replica -> tokens of the prompt that may be in its cache."""
        return {} if self._prefixes is None else self._prefixes.cached(chain)

    def sent(self, name: str, chain: Sequence[int]) -> None:
        """A replica computes a prompt."""
        if self._prefixes is not None:
            self._prefixes.sent(name, chain)

    def answered(self, routed: Routed) -> None:
        """A request ends where it is; the next turn of a chat begins with its prompt and its answer."""
        for done in routed.resumed().done[:1]:
            whole = replace(routed.request, prompt=routed.request.prompt + done.tokens)
            self.sent(routed.replica, self.chain(whole, routed.version))

    def left(self, name: str) -> None:
        """A replica has lost its cache."""
        if self._prefixes is not None:
            self._prefixes.left(name)


def ask_of(
    request: Request, version: Version | None, cached: Mapping[str, int] = MappingProxyType({}), outputs: float = 0.0
) -> Ask:
    """What a policy knows of a request; `outputs`: see `Ask`."""
    tokens = len(request.prompt) + sum(len(part.tokens) for part in request.done)
    key, rank = (None, 0) if version is None else (version.key, version.rank)
    session = f"{request.tenant}\0{request.session}" if request.session else ""
    return Ask(key, rank, tokens, session, cached, outputs)
