"""A server in a container: its memory is a control group's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests import _make
from tests.serve._process import process, ready
from tests.serve._server import request, wait_until, write_text_model

CODE = grpc.StatusCode
ADAPTERS, SOME = 64, 8
RANK, EVERY = 32, tuple(_make.MODULES)  # 4.5 MB each
WIDE = {"width": 512, "mlp": 1024, "layers": 4, "heads": 8, "kv_heads": 8, "head_dim": 64}
SETTINGS = ("model.max_model_len=512", "engine.max_seqs=8", "serve.compile_cache=auto")
TIGHT = 1.2  # times the working set


@dataclass(frozen=True)
class Group:
    """A control group for memory.

    Attributes:
        limit, used: the names of its files in this version of control groups.
        kills: the file that counts the processes that the kernel has killed here.
    """

    path: Path
    limit: str
    used: str
    kills: str

    def used_bytes(self) -> int:
        """Without file pages that the kernel can drop."""
        stat = self._lines("memory.stat")
        again = stat.get("total_active_file", stat.get("active_file", 0))
        mapped = stat.get("total_mapped_file", stat.get("file_mapped", 0))
        once = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        return int((self.path / self.used).read_text()) - once - max(0, again - mapped)

    def killed(self) -> int:
        return self._lines(self.kills)["oom_kill"]

    def bound(self, most: int) -> None:
        (self.path / self.limit).write_text(str(most))

    def within(self) -> tuple[str, ...]:
        """The command that runs another one in this group."""
        return ("sh", "-c", f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"', "sh")

    def _lines(self, name: str) -> dict[str, int]:
        return {key: int(value) for key, value in map(str.split, (self.path / name).read_text().splitlines())}


@pytest.fixture
def group() -> Iterator[Group]:
    """Where this machine lets a test make one."""
    for root, *files in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "memory.events"),
    ):
        made = Group(root / f"jlora-test-{os.getpid()}", *files)
        with suppress(OSError):
            made.path.mkdir()
            if (made.path / made.limit).exists():
                yield made
                made.path.rmdir()
                return
            made.path.rmdir()
    pytest.skip("may not make a control group for memory")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_at_its_containers_limit_refuses_and_lives(group: Group, tmp_path: Path):
    """The limit is 1.2 times what a server takes that has all programs and has served a few adapters."""
    model, loras = tmp_path / "model", tmp_path / "loras"
    spec = write_text_model(model, **WIDE)
    adapters = [_make.make_adapter(loras / f"a{i}", spec, i, r=RANK, targets=EVERY) for i in range(ADAPTERS)]
    with in_group(group, model) as (server, channel):
        expected = rpc.InferenceStub(channel).Generate(request("Hello")).outputs
        assert asyncio.run(crowd(server, adapters[:SOME])) == {CODE.OK: 2 * SOME}
        wait_until(lambda: not programs_left(channel), 300)
        roomy, needed = host_blocks(channel), group.used_bytes()
    group.bound(int(TIGHT * needed))
    with in_group(group, model) as (server, channel):
        told = asyncio.run(crowd(server, adapters))
        assert told.keys() <= {CODE.OK, CODE.RESOURCE_EXHAUSTED}, told
        assert told[CODE.OK] > ADAPTERS, told
        assert host_blocks(channel) < roomy
        assert rpc.InferenceStub(channel).Generate(request("Hello")).outputs == expected
    assert group.killed() == 0


@contextmanager
def in_group(group: Group, model: Path) -> Iterator[tuple[str, grpc.Channel]]:
    """A server's address and a channel to it; it must end well."""
    argv = ["--model", str(model), "--port", "0", "--set", *SETTINGS]
    with process(argv, within=group.within()) as server:
        address = ready(server)[1]
        with grpc.insecure_channel(address) as channel:
            yield address, channel
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors


def programs_left(channel: grpc.Channel) -> int:
    """Of those that compile beside the steps."""
    return rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest()).programs_left


def host_blocks(channel: grpc.Channel) -> int:
    """Of the host tier."""
    return rpc.ControlStub(channel).GetCacheState(pb.GetCacheStateRequest()).host.total


async def crowd(server: str, adapters: Sequence[Path]) -> Counter[grpc.StatusCode]:
    """Loads all adapters, and asks each that was loaded for an answer; how often each status came."""
    told: Counter[grpc.StatusCode] = Counter()

    async def tell(call: grpc.aio.UnaryUnaryCall[Any, Any]) -> None:
        told[await call.code()] += 1

    async with grpc.aio.insecure_channel(server) as channel:
        inference, loads = rpc.InferenceStub(channel), rpc.AdaptersStub(channel)
        for path in adapters:
            await tell(loads.LoadAdapter(pb.LoadAdapterRequest(name=path.name, path=str(path))))
        loaded = (await loads.ListAdapters(pb.ListAdaptersRequest())).adapters
        asked = [request([5 + i] * 300, 8, model=adapter.name) for i, adapter in enumerate(loaded)]
        await asyncio.gather(*(tell(inference.Generate(one)) for one in asked))
    return told
