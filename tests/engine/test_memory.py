"""Memory is given to work under way once, and kept for what comes and goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from jlora import config
from jlora.engine import build
from jlora.engine.sources import READING, Reader, read_adapter, scan_adapter
from jlora.layout import PoolLayout
from jlora.memory import KEPT_BYTES, Memory
from jlora.model.spec import ModelSpec
from jlora.pallas.cases import LLAMA3_8B
from jlora.ports import DiskFiles, DiskFolder, System
from tests import _make
from tests.serve._server import wait_until

SPEC = _make.tiny_spec()
LAYOUT = PoolLayout.of(SPEC, 64, 16)
BLOCK = LAYOUT.block_bytes


def test_what_is_promised_is_not_given_again():
    memory, short = Memory(lambda: 1000), pytest.raises(MemoryError, match="^two takes up to 0 MiB, and 0 are left$")
    with memory.promised(600, "one"):
        assert memory.beside(100) == 300
        with short, memory.promised(401, "two", wait_s=0.0):
            pass
        with memory.promised(400, "three"):
            assert memory.beside(0) == 0
    assert memory.beside(100) == 900
    with pytest.raises(MemoryError), memory.promised(1001, "too much, and nobody to wait for"):
        pass


class Held(DiskFiles):
    """A disk on which what has been read stands still until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.going, self.lock, self.here, self.most = threading.Semaphore(0), threading.Lock(), 0, 0

    @contextmanager
    def folder(self, directory: str) -> Iterator[DiskFolder]:
        with super().folder(directory) as folder:
            yield folder
            with self.lock:
                self.here += 1
                self.most = max(self.most, self.here)
            assert self.going.acquire(timeout=20)
            with self.lock:
                self.here -= 1


def test_an_adapter_is_read_when_others_have_left_memory_for_it(tmp_path: Path):
    path, disk = str(_make.make_adapter(tmp_path / "a", SPEC, r=8)), Held()
    need = READING * scan_adapter("a", path, Reader(SPEC, LAYOUT, 64, ("tiny",), DiskFiles(), float)).blocks
    memory = Memory(lambda: (need + need // 2) * BLOCK)
    reader = Reader(SPEC, LAYOUT, 64, ("tiny",), disk, lambda: 0.0, memory=memory)
    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read_adapter, "a", path, reader) for _ in range(4)]
        for _ in reads:
            wait_until(lambda: disk.here == 1)
            time.sleep(0.05)  # the others would come as far now
            disk.going.release()
        assert {one.result(20).blocks for one in reads} == {need // READING}
    assert disk.most == 1 and memory.beside(0) == (need + need // 2) * BLOCK


def host_blocks(spec: ModelSpec, spare: int, adapter: int = 0) -> int:
    """Blocks of the host tier, after a look, with so much memory left and an adapter of so many blocks on the disk."""
    registry = SimpleNamespace(largest=adapter)
    settings, system = config.load(None, {"engine.max_seqs": 64}), System(memory=Memory(lambda: spare))
    manager = build.make_manager(settings, LAYOUT, 1 << 20, spec, registry, system)  # type: ignore[arg-type]
    manager.tend(0.0, 0)
    return manager.host.total


def test_on_a_cpu_the_host_tier_leaves_memory_to_the_largest_step():
    """Sixty-four samplers of Llama 3's vocabulary take 300 MB beside the weights, in the memory of the host tier."""
    assert host_blocks(SPEC, KEPT_BYTES + 10 * BLOCK) == 10
    assert host_blocks(LLAMA3_8B, 2 * KEPT_BYTES) == 0
    assert host_blocks(LLAMA3_8B, 8 * KEPT_BYTES) > 0


def test_the_host_tier_leaves_memory_to_read_the_largest_adapter():
    """Otherwise every later request for one on the disk would fail, once KV has filled the tier."""
    blocks = 2 * KEPT_BYTES // (READING * BLOCK)
    assert host_blocks(SPEC, 2 * KEPT_BYTES + 9 * BLOCK, adapter=blocks) - blocks <= 9 + READING
    assert host_blocks(SPEC, 2 * KEPT_BYTES + 9 * BLOCK) > 1000
