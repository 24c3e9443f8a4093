"""The calls of a controller at replicas, by address. An answer's error is the replica's own `JloraError`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from jlora.cluster.directory import Version
from jlora.cluster.peer import ALIVE
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as links
from jlora.errors import JloraError, Unavailable
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.status import CODES
from jlora.types import AdapterInfo

LOOK_S = 0.1  # between two looks at whether an answer is still worth waiting for
LOAD_S = 600.0
CALL_S = 60.0
# The connection of a call may be gone without a word while the replica's link lives. Pings end the call in five
# seconds, or in a minute if it has been quiet: then gRPC sends fewer.
OPTIONS = (*ALIVE, ("grpc.use_local_subchannel_pool", 1))
ERRORS: dict[grpc.StatusCode, type[Exception]] = {code: error for error, code in CODES.items()}
TIERS = {number: name for name, number in pb.AdapterInfo.Tier.items()}  # a later one may have more
# What the adapter's message has and its record has not, or the other way round, is left out.
FIELDS = frozenset(pb.AdapterInfo.DESCRIPTOR.fields_by_name) & set(AdapterInfo.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Answer:
    """A call under way at a replica."""

    address: str
    future: Any

    def result(self, wanted: Callable[[], bool] = lambda: True) -> AdapterInfo:
        """Waits as long as `wanted` says so. Raises JloraError; Unavailable if the replica cannot be reached."""
        return record(self.message(wanted))

    def message(self, wanted: Callable[[], bool]) -> Any:
        """As `result`, of a call whose answer is no adapter."""
        while True:
            try:
                return self.future.result(LOOK_S)
            except grpc.FutureTimeoutError:
                if not wanted():
                    self.future.cancel()
                    raise Unavailable(f"the replica at {self.address} has not answered") from None
            except grpc.FutureCancelledError:
                raise Unavailable(f"the call to the replica at {self.address} was given up") from None
            except grpc.RpcError as e:
                raise error_of(e, self.address) from e


def error_of(error: grpc.RpcError, where: str) -> JloraError:
    """The error that the other side raised."""
    kind = ERRORS.get(error.code(), Unavailable)
    told = error.details() or error.code().name
    return kind(told if kind is not Unavailable else f"{where}: {told}")  # pyright: ignore[reportReturnType]


def record(message: pb.AdapterInfo) -> AdapterInfo:
    """The message as the record of `jlora.types`."""
    values: dict[str, Any] = {name: getattr(message, name) for name in FIELDS}
    values |= {
        "ranks": dict(message.ranks),
        "target_modules": tuple(message.target_modules),
        "alora_invocation_tokens": tuple(message.alora_invocation_tokens),
        "tier": TIERS.get(message.tier, "DISK"),
    }
    return AdapterInfo(**values)


class Calls:
    """One channel for each replica. Any thread may call; every method but `pinned` and `close` returns at once."""

    def __init__(self, login: Login | None = None):
        self._login = login or Login()
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def load(self, address: str, message: pb.LoadAdapterRequest) -> Answer:
        return Answer(address, self._stub(address).LoadAdapter.future(message, timeout=LOAD_S))

    def pin(self, address: str, key: str, pinned: bool) -> Answer:
        message = pb.PinAdapterRequest(name=key, pinned=pinned)
        return Answer(address, self._stub(address).PinAdapter.future(message, timeout=LOAD_S))

    def unload(self, address: str, key: str) -> Answer:
        return Answer(
            address, self._stub(address).UnloadAdapter.future(pb.UnloadAdapterRequest(name=key), timeout=CALL_S)
        )

    def get(self, address: str, key: str) -> Answer:
        return Answer(address, self._stub(address).GetAdapter.future(pb.GetAdapterRequest(name=key), timeout=CALL_S))

    def pinned(self, address: str, wanted: Callable[[], bool]) -> list[str]:
        """Keys of the adapters that a replica has pinned. Waits, and raises, as `Answer.result`."""
        keys: list[str] = []
        message = pb.ListAdaptersRequest(view=pb.ListAdaptersRequest.SUMMARY)
        while True:
            call = self._stub(address).ListAdapters.future(message, timeout=CALL_S)
            page = Answer(address, call).message(wanted)
            keys += [info.name for info in page.adapters if info.pinned]
            message.page_token = page.next_page_token
            if not message.page_token:
                return keys

    def hold(self, address: str, version: Version, peers: Sequence[str], lost: bool = False) -> Answer:
        """Has a replica read a version into its host tier; `lost`: its files are gone."""
        message = link.Version(key=version.key, path=version.path, digest=version.digest, peers=peers, lost=lost)
        return Answer(address, links.PeerStub(self._channel(address)).Keep.future(message, timeout=CALL_S))

    def keep(self, addresses: Collection[str]) -> None:
        """Closes the channels to all other replicas."""
        with self._lock:
            gone = [self._channels.pop(address) for address in set(self._channels) - set(addresses)]
        for channel in gone:
            channel.close()

    def close(self) -> None:
        self.keep(())

    def _stub(self, address: str) -> Any:
        return rpc.AdaptersStub(self._channel(address))

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = self._login.channel(address, OPTIONS)
            return self._channels[address]
