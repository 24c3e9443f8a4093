"""The secret that the processes of one service share: whoever has it may send requests past every key and quota."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from jlora.errors import ConfigError
from jlora.serve.access.keys import equal

LEAST = 16  # characters


@dataclass(frozen=True, slots=True)
class Secret:
    """A token in the metadata of every call between processes. The empty one lets everybody in."""

    token: str = ""

    @classmethod
    def read(cls, path: str) -> Secret:
        """The first line of a file; without a path, the empty secret. Raises ConfigError."""
        if not path:
            return cls()
        try:
            token = Path(path).read_text(encoding="ascii").partition("\n")[0].strip()
        except (OSError, ValueError) as e:
            raise ConfigError(f"cluster.token_file = {path}: {getattr(e, 'strerror', None) or e}") from e
        if len(token) < LEAST or not token.isprintable() or " " in token:
            raise ConfigError(
                f"cluster.token_file = {path}: must hold {LEAST} or more visible ASCII characters on its first line"
            )
        return cls(token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a caller sends."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    async def check(self, context: grpc.aio.ServicerContext) -> None:
        """Ends a call without the token as UNAUTHENTICATED. It comes before the first message is read."""
        sent = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
        if self.token and not (len(sent) == 1 and equal(sent[0], f"Bearer {self.token}")):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call needs the token of cluster.token_file")
