"""The state that the fronts share: the replica once it is loaded, and the model's tokenizer.

The ports open before the weights are read, so a call may arrive while there is no replica.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from jlora.adapters.invocation import NotInvoked
from jlora.adapters.names import check_length
from jlora.errors import InvalidArgument, Unavailable
from jlora.gaps import Gaps
from jlora.ports import OsThreads, Threads
from jlora.replica import Replica
from jlora.serve.access.access import Access
from jlora.serve.access.caller import Caller
from jlora.serve.gate import BURST, Gate, Room
from jlora.serve.observed import Ended, Observed
from jlora.serve.pauses import Pauses
from jlora.serve.recent import Recent
from jlora.serve.strip import Strip
from jlora.serve.tokenizer import Tokenizer
from jlora.serve.workers import Workers
from jlora.validation import MAX_COMPLETIONS

if TYPE_CHECKING:  # it needs an extra
    from jlora.serve.tracing import Tracing


@dataclass
class Backend:
    """The replica behind the fronts. Only the event loop sets these fields.

    Attributes:
        replica: None while loading.
        tokenizer: None while loading, and for a model that serves token ids only.
        serving: what health says: loaded, not draining, and the engine moves. The gRPC server's watch sets it.
        live: what health's service `live` says: nothing has been seen to stand. Likewise.
        draining: True once new requests are refused for good.
        started: `time.monotonic()` when the process began to load; process: a name that no other has.
        most: completions that the gRPC server is made for; at least `BURST`, so that bursts are answered.
        tracing: makes spans of answers; None without `serve.otlp_endpoint`.
        gaps: of the event loop.
        access: the keys, and what their callers may do.
        threads: what the fronts start threads by; the launcher ends the process when one of them fails.
        stall_s: seconds by which a stream's reader may be behind, as `serve.stall_s` says.
        pauses: of the streams, as `serve.coalesce_s` says; None: there are none.
        leaving: requests whose client has gone, until the engine has ended them.
        at_stop: what ends streams that have no end of their own, when the gRPC server stops.
    """

    replica: Replica | None = None
    tokenizer: Tokenizer | None = None
    serving: bool = False
    live: bool = True
    draining: bool = False
    most: int = BURST
    started: float = field(default_factory=time.monotonic)
    process: str = field(default_factory=partial(secrets.token_hex, 8))
    recent: Recent = field(default_factory=Recent)
    strip: Strip = field(default_factory=Strip)
    observed: Observed = field(default_factory=Observed)
    tracing: Tracing | None = None
    gaps: Gaps = field(default_factory=Gaps)
    gate: Gate = field(default_factory=Gate)
    workers: Workers = field(default_factory=Workers)
    access: Access = field(default_factory=Access)
    threads: Threads = field(default_factory=OsThreads)
    stall_s: float = 30.0
    pauses: Pauses | None = None
    leaving: set[asyncio.Future[None]] = field(default_factory=set)
    at_stop: list[Callable[[], None]] = field(default_factory=list)

    @property
    def loaded(self) -> Replica:
        """The replica. Raises Unavailable while the model loads."""
        if self.replica is None:
            raise Unavailable("the server is loading its model; health turns SERVING when it is ready")
        return self.replica

    @property
    def room(self) -> Room:
        """Completions that may run or wait at once. Raises Unavailable while the model loads."""
        engine = self.loaded.info.config.engine
        return Room(engine.max_seqs, engine.max_queue).within(self.most)

    def left(self, ended: Ended) -> None:
        """Ends an answer that has failed, or whose client has gone: it has a trace, and its times do not count."""
        if self.tracing is not None:
            self.tracing.answered(ended, self.loaded)

    def ended(self, ended: Ended) -> None:
        """Tells metrics and traces that an answer has ended."""
        self.observed.answered(ended)
        if ended.usage.completion_tokens:  # otherwise there was no first token
            self.recent.add(ended.timing.ttft, ended.timing.tpot)
        self.left(ended)

    @contextmanager
    def admitted(self, caller: Caller, n: int, prompts: int = 1) -> Iterator[None]:
        """Counts completions until their call ends. Raises Busy before anything is tokenized."""
        count = prompts * min(max(1, n), MAX_COMPLETIONS)
        whose = caller.tenant
        with self.gate.completions(self.room, count, whose), self.access.tenants.completions(whose, count):
            yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around a request: a refusal for its activated LoRA says what the tokens that it lacks read as."""
        try:
            yield
        except NotInvoked as e:
            if self.tokenizer is None:
                raise
            raise NotInvoked(e.adapter, e.tokens, self.tokenizer.decode(e.tokens, skip_special=False)) from None

    def adapter_of(self, caller: Caller, model: str) -> str | None:
        """The adapter, loaded or not, that `model` (base, adapter, base:adapter or empty) names; None is the base.

        Raises PermissionDenied if the caller may not use it.
        """
        base = self.loaded.info.model
        if model in ("", base):
            return None
        name = model.removeprefix(base + ":")
        if not name:
            raise InvalidArgument(f"model = {model!r}: names no adapter after the colon")
        caller.check_adapter(check_length(name, "model"))
        return name
