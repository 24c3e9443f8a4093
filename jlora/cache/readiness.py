"""Whether a lease's next step can run while copies are under way: the one place that decides it. No jax."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

from jlora.cache.forecast import Forecast
from jlora.cache.lease import Lease
from jlora.cache.tree import ADAPTER, KV, AdapterNode


class Readiness(Enum):
    """What a lease's next step may do."""

    WAIT = auto()  # nothing: it reads data that is on its way
    AHEAD = auto()  # compute the tokens before its activated LoRA acts; the adapter's copy may be under way
    HOST = auto()  # run whole; the host computes its adapter's part as long as the adapter's copy is under way
    STREAM = auto()  # run whole; its layers wait for their part of the copies under way
    READY = auto()  # run whole


# (adapter, seconds until a step could use its copy, tokens of the step) -> whether the host is to help meanwhile
Helps = Callable[[AdapterNode, float, int], bool]
# The same -> seconds to the first token, by `ColdStart`
Predicts = Callable[[AdapterNode, float, int], Mapping[str, float]]


class Gate:
    """Decides readiness, and keeps what each lease waited for.

    Attributes:
        helps: decides where the host helps; None: it never does.
        predicts: what that decision is made of, if it is one; to be compared with what comes.
    """

    def __init__(self, forecast: Forecast, clock: Callable[[], float]):
        self.helps: Helps | None = None
        self.predicts: Predicts | None = None
        self._forecast = forecast
        self._clock = clock

    def decide_by(self, helps: Helps, predicts: Predicts | None) -> None:
        """Lets the host help from now on."""
        self.helps, self.predicts = helps, predicts

    def readiness(self, lease: Lease, tokens: int, unadapted: int) -> Readiness:
        """What the lease's next step may do.

        A step runs ahead of its activated LoRA if it ends before the adapter acts anyway, or if computing
        up to there takes less time than the adapter's copy.

        Args:
            tokens: of the step.
            unadapted: of what is left to compute, tokens that its activated LoRA does not act on.
        """
        if unadapted and lease.coming and tokens <= unadapted:
            return self._ahead(lease, tokens)
        if self.predicts and lease.adapter.coming and not (lease.predicted or unadapted) and tokens >= lease.left:
            left_s = self._forecast.usable_s(lease.adapter, tokens)
            lease.predicted, lease.predicted_at = self.predicts(lease.adapter, left_s, tokens), self._clock()
        outlasts = self._forecast.outlasts(lease.adapter, unadapted)
        if not outlasts and self._helped(lease, tokens):
            return Readiness.HOST
        found = self._arrived(lease, (ADAPTER, KV), tokens)
        if found is not Readiness.WAIT:
            lease.ahead = False
            return found
        return self._ahead(lease, unadapted) if outlasts else found

    def could_help(self, adapter: AdapterNode, tokens: int) -> bool:
        """Whether the host would compute the adapter's part of so many tokens while the adapter comes."""
        return self.helps is not None and self.helps(adapter, self._forecast.usable_s(adapter, tokens), tokens)

    def stall(self, lease: Lease) -> None:
        """The lease waits for its copies again, from now on."""
        lease.ahead, lease.since = False, self._clock()

    def _helped(self, lease: Lease, tokens: int) -> bool:
        """Whether the host helps in the lease's next step; its prefix must be there, or come in time."""
        lease.helped = lease.adapter.coming and self.could_help(lease.adapter, tokens)
        lease.helped = lease.helped and self._arrived(lease, (KV,), tokens) is not Readiness.WAIT
        if lease.helped:
            lease.adapter_s = 0.0 if lease.ahead else self._clock() - lease.since
            lease.ahead, lease.cold_start = False, "cpu"
        return lease.helped

    def _ahead(self, lease: Lease, tokens: int) -> Readiness:
        lease.ahead = self._arrived(lease, (KV,), tokens) is not Readiness.WAIT
        return Readiness.AHEAD if lease.ahead else Readiness.WAIT

    def _arrived(self, lease: Lease, kinds: Collection[int], tokens: int) -> Readiness:
        """Whether what a lease needs of these kinds is there, or can be streamed into a step of so many tokens."""
        if not lease.coming:
            return Readiness.READY
        needed = [node for node in lease.coming if node.kind in kinds]
        left = [node for node in needed if node.coming]
        streamed = bool(left) and self._forecast.fits_in_step(left, tokens)
        if len(left) < len(needed) or streamed:
            waited = self._clock() - lease.since
            landed = {node.kind for node in needed} - {node.kind for node in left if not streamed}
            if ADAPTER in landed:
                lease.adapter_s = 0.0 if lease.ahead else waited
                lease.cold_start = "stream" if lease.adapter.coming else "wait"
            if KV in landed:
                lease.kv_s = waited
            lease.coming = [node for node in lease.coming if node.kind not in kinds] + left
        if not left:
            return Readiness.READY
        return Readiness.STREAM if streamed else Readiness.WAIT
