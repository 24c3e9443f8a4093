"""Memory is given to work under way once, and kept for what comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from jlora import config
from jlora.engine import build
from jlora.engine.sources import READING, Reader, read_adapter, scan_adapter
from jlora.layout import PoolLayout
from jlora.memory import KEPT_BYTES, Memory
from jlora.pallas.cases import LLAMA3_8B
from jlora.ports import DiskFiles, DiskFolder, System
from tests import _make

SPEC = _make.tiny_spec()


def test_what_is_promised_is_not_given_again():
    memory = Memory(lambda: 1000, wait_s=0.0)
    with memory.promised(600, "one"):
        assert memory.beside(100) == 300
        with pytest.raises(MemoryError, match="^two takes up to 0 MiB, and 0 are left$"), memory.promised(401, "two"):
            pass
        with memory.promised(400, "three"):
            assert memory.beside(0) == 0
    assert memory.beside(100) == 900
    with pytest.raises(MemoryError), memory.promised(1001, "too much, and nobody to wait for"):
        pass


class Held(DiskFiles):
    """A disk on which reads stand still until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.going, self.open = threading.Semaphore(0), 0

    @contextmanager
    def folder(self, directory: str) -> Iterator[DiskFolder]:
        with super().folder(directory) as folder:
            yield folder
            self.open += 1
            assert self.going.acquire(timeout=20)


def test_an_adapter_is_read_when_others_have_left_memory_for_it(tmp_path: Path):
    path, disk = str(_make.make_adapter(tmp_path / "a", SPEC, r=8)), Held()
    layout = PoolLayout.of(SPEC, 64, 16)
    need = READING * scan_adapter("a", path, Reader(SPEC, layout, 64, ("tiny",), DiskFiles(), float)).blocks
    memory = Memory(lambda: (need + need // 2) * layout.block_bytes)
    reader = Reader(SPEC, layout, 64, ("tiny",), disk, lambda: 0.0, memory=memory)
    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read_adapter, "a", path, reader) for _ in range(4)]
        for read in range(4):
            disk.going.release()
            assert sum(one.done() for one in reads) <= read + 1
        assert {one.result(20).blocks for one in reads} == {need // READING}
    assert memory.beside(0) == (need + need // 2) * layout.block_bytes


def test_on_a_cpu_the_host_tier_leaves_memory_to_the_largest_step():
    """Sixty-four samplers of Llama 3's vocabulary take 300 MB beside the weights, in the memory of the host tier."""
    settings, layout = config.load(None, {"engine.max_seqs": 64}), PoolLayout.of(SPEC, 64, 16)

    def blocks(spec, spare: int) -> int:
        system = System(memory=Memory(lambda: spare))
        manager = build.make_manager(settings, layout, 1 << 20, spec, system)
        manager.tend(0.0, 0)
        return manager.host.total

    assert blocks(SPEC, KEPT_BYTES + 10 * layout.block_bytes) == 10
    assert blocks(LLAMA3_8B, 2 * KEPT_BYTES) == 0
    assert blocks(LLAMA3_8B, 8 * KEPT_BYTES) > 0
