"""F3, F5 and F19: adapters whose files are damaged, that change in use, and that the device must copy all the time."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.faults.client import Client, Figures, clean, in_parallel, prompt
from jlora.loadgen.server import exactly

FILES = ("adapter_model.safetensors", "adapter_config.json")
REFUSED = {"INVALID_ARGUMENT", "DATA_LOSS", "NOT_FOUND"}
PROMPT = tuple(range(10, 30))
TOKENS = 24
WINDOW = 100  # steps in which F19 wants an admission
COPIES = 2  # of a request's adapter, at most


async def damaged(client: Client, folder: Path, versions: tuple[Path, Path], flips: int) -> Figures:
    """F3: what is refused; what is loaded is another adapter by its digest, or means what it meant before."""
    good, other = versions
    _, digest = await client.load("good", good)
    neighbour = exactly(TOKENS, PROMPT, model="good", logprobs=5)
    before = await client.inference.Generate(neighbour)
    right, ends, wrong = await client.answer(exactly(TOKENS, PROMPT, model="good")), Counter[str](), 0
    for kind, harm in _damages(good, flips):
        bad = _copied(good, folder / "bad")
        harm(bad)
        status, found = await client.load("bad", bad)
        if status == "OK":
            wrong += found == digest and await client.answer(exactly(TOKENS, PROMPT, model="bad")) != right
            status = "loaded, the same digest" if found == digest else "loaded, another digest"
            await client.unload("bad")
        ends[f"{kind}: {status}"] += 1
    for _ in range(max(flips // 25, 2)):
        ends[f"replaced meanwhile: {await _replaced(client, folder, versions)}"] += 1
    after = await client.inference.Generate(neighbour)
    await client.unload("good")
    loaded = {"loaded, another digest", "loaded, the same digest", "loaded, one of the two"}
    known = {key.partition(": ")[2] for key in ends} <= REFUSED | loaded
    same = before.outputs[0] == after.outputs[0]
    return {"injected": sum(ends.values()), **ends, "neighbour_same": same, "holds": known and same and not wrong}


def _damages(good: Path, flips: int) -> Iterator[tuple[str, Callable[[Path], object]]]:
    weights, config = ((good / name).read_bytes() for name in FILES)
    head, rng = 8 + int.from_bytes(weights[:8], "little"), random.Random(3)
    for i in range(64):
        yield "truncated", _write(FILES[0], weights[: len(weights) * i // 64])
    for i in range(flips):
        kind = ("a bit of the header", "a bit of the weights", "a bit of the configuration")[i % 3]
        name, data, begin, end = (
            (FILES[0], weights, 0, head), (FILES[0], weights, head, len(weights)), (FILES[1], config, 0, len(config)),
        )[i % 3]  # fmt: skip
        flipped = bytearray(data)
        flipped[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
        yield kind, _write(name, bytes(flipped))
    for name in FILES:
        yield "empty", _write(name, b"")
        yield "a directory", _in_place(name, os.mkdir)
        yield "a link out of the roots", _in_place(name, lambda path: os.symlink("/etc/hostname", path))
        yield "a FIFO", _in_place(name, os.mkfifo)


def _write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda bad: (bad / name).write_bytes(data)


def _in_place(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def act(bad: Path) -> object:
        (bad / name).unlink()
        return make(bad / name)

    return act


def _copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


async def _replaced(client: Client, folder: Path, versions: tuple[Path, Path]) -> str:
    """Loads a directory whose weights are replaced by a rename, again and again; how that ended."""
    target, contents = _copied(versions[0], folder / "replaced"), [(path / FILES[0]).read_bytes() for path in versions]
    whole = {(await client.load("whole", path, replace=True))[1] for path in versions}
    loading = asyncio.create_task(client.load("bad", target))
    while not loading.done():
        for data in contents:
            (target / "next").write_bytes(data)
            (target / "next").rename(target / FILES[0])
            await asyncio.sleep(0)
    status, found = await loading
    await client.unload("whole")
    if status != "OK":
        return status
    await client.unload("bad")
    return "loaded, one of the two" if found in whole else "MIXED"


async def raced(client: Client, versions: tuple[Path, Path], count: int) -> Figures:
    """F5: an adapter is replaced, or goes and comes, while requests for it begin and run."""
    rng, right = random.Random(5), set()
    for path in versions:
        await client.load("raced", path, replace=True)
        right.add((await client.answer(exactly(TOKENS, PROMPT, model="raced")))[1])
    held = (await client.cache()).host.adapters
    ends: Counter[str] = Counter()

    async def user() -> None:
        await asyncio.sleep(rng.random() * 0.02)
        asked = exactly(TOKENS, PROMPT, model="raced", bypass_prefix_cache=rng.random() < 0.5)
        status, tokens = await client.answer(asked)
        ends["whole answer of one version" if tokens in right else "MIXED" if status == "OK" else status] += 1

    for i in range(count):
        users = [asyncio.create_task(user()) for _ in range(4)]
        await asyncio.sleep(rng.random() * 0.03)
        if i % 2:
            await client.unload("raced")
        await client.load("raced", versions[i % 2], replace=True)
        await asyncio.gather(*users)
    left = await client.left()
    blocks = (await client.cache()).host.adapters - held
    await client.unload("raced")
    well = set(ends) <= {"whole answer of one version", "NOT_FOUND"} and len(right) == 2 and blocks == 0
    return {"injected": count, **ends, **left, "adapter_blocks_left": blocks, "holds": well and clean(left)}


async def storm(client: Client, asked: Sequence[str]) -> Figures:
    """F19: a request for each of these adapters, 256 at a time; "" is the base.

    Some request must be admitted in every `WINDOW` steps. Bytes copied to the device are counted in what the requests
    asked for: above 1, some adapter was copied ahead, and left before any request used it. Above `COPIES` it thrashes.
    """
    rng, stuck, ended = random.Random(19), 0, asyncio.Event()
    begun, before = await client.info(), await client.cache()

    async def one(number: int) -> str:
        return (await client.answer(exactly(4, prompt(rng), model=asked[number])))[0]

    async def watch() -> None:
        nonlocal stuck
        steps, admitted = begun.steps, before.adapter_lookups
        while not ended.is_set():
            await asyncio.sleep(0.05)
            info, cache = await client.info(), await client.cache()
            if cache.adapter_lookups > admitted or not info.live_requests:
                steps, admitted = info.steps, cache.adapter_lookups
            stuck = max(stuck, info.steps - steps)

    watching = asyncio.create_task(watch())
    ends = await in_parallel(len(asked), 256, one)
    ended.set()
    await watching
    info, cache, wanted = await client.info(), await client.cache(), Counter(asked)
    bytes_wanted = sum([count * await client.bytes_of(name) for name, count in wanted.items() if name])
    copied = cache.bytes_swapped_in - before.bytes_swapped_in
    return {
        "injected": len(asked), **ends, **(await client.left()), "steps": info.steps - begun.steps,
        "steps_without_admission": stuck, "preemptions": info.preemptions - begun.preemptions,
        "mib_copied_in": copied / 2**20, "copied_over_asked": copied / bytes_wanted,
        "holds": ends["OK"] == len(asked) and stuck <= WINDOW and copied <= COPIES * bytes_wanted,
    }  # fmt: skip
