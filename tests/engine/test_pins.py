"""Pinned adapters leave room for one longest context and one largest adapter, whatever is pinned and loaded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jlora.cache.inspect import check_integrity
from jlora.cache.manager import Sizes
from jlora.config import CacheConfig
from jlora.engine.loading import Compared
from jlora.engine.records import NewAdapter
from jlora.errors import ResourceExhausted
from jlora.sim.replica import Replica
from jlora.types import Request, SamplingParams
from tests.sim import _sim

LONGEST, BLOCK = 12, _sim.BLOCK  # blocks; tokens of a block


def replica(device: int, *adapters: int, policy: str = "jlora") -> Replica:
    cache = CacheConfig(share=0.45)
    spec = replace(_sim.SPEC, sizes=Sizes(device, 512, BLOCK, LONGEST), adapters=adapters, cache=cache)
    return _sim.replica_of(spec, policy)


def answers(made: Replica, adapter: str | None, tokens: int) -> None:
    """A request of so many tokens for this adapter is admitted and served."""
    prompt = tuple(range(3, 3 + tokens - 2))
    made.submit(Request("whole", prompt, SamplingParams(max_tokens=2, ignore_eos=True), adapter), made.clock.now)
    steps = 1000
    while made.busy:
        made.step(made.clock.now + 10)
        check_integrity(made.manager)
        steps -= 1
        assert steps, "the request is not admitted"


def serves_all(made: Replica) -> None:
    """The longest context runs on the base, and with the largest adapter that is not pinned."""
    longest = min(LONGEST, made.manager.total // 2) * BLOCK
    others = [info for info in made.engine.adapters.all() if not info.pinned]
    answers(made, None, longest)
    if others:
        answers(made, max(others, key=lambda info: info.blocks).name, longest)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["jlora", "lru", "vllm-fair"])
def test_after_any_pins_and_loads_the_longest_request_and_the_largest_adapter_are_served(seed: int, policy: str):
    draw = random.Random(seed)
    made = replica(draw.choice([20, 24]), 2, 5, 3, policy=policy)
    refused = names = 0
    for _ in range(100):
        infos = made.engine.adapters.all()
        name = draw.choice([info.name for info in infos]) if infos else ""
        try:
            match draw.choice(["pin", "pin", "pin", "unpin", "load", "load", "replace", "unload"]):
                case "load":
                    names += 1
                    made.engine.adapters.add(new(f"n{names}", draw.randint(1, 9)), pinned=draw.random() < 0.5)
                case "replace" if name:
                    made.engine.adapters.add(new(name, draw.randint(1, 9)), draw.random() < 0.5, replace=True)
                case "unload" if name:
                    made.engine.adapters.remove(name)
                case "unpin" if name:
                    made.engine.adapters.pin(name, False)
                case "pin" if name:
                    made.engine.adapters.pin(name, True)
        except ResourceExhausted:
            refused += 1
        serves_all(made)
    assert refused


def test_adapters_whose_files_changed_stay_until_they_fill_their_share_of_the_host():
    made = replica(30)  # 512 blocks on the host: 128 for such
    adapters = made.engine.adapters
    for i in range(20):
        adapters.add(replace(new(f"a{i}", 9), path="/there", stamp=(1,)))
    records = sorted(adapters.records(), key=lambda record: record.node.uid)
    adapters.compared([Compared(record, (2,), own=False) for record in records])
    assert [record.node.backed for record in records] == [False] * 14 + [True] * 6
    adapters.compared([Compared(records[0], (3,), own=True)])
    adapters.compared([Compared(records[-1], (2,), own=False)])
    assert records[0].node.backed and records[0].stamp == (3,) and not records[-1].node.backed
    adapters.compared([Compared(record, None, own=False) for record in records])  # the disk does not answer
    assert not any(record.node.backed for record in records)


def test_an_adapter_is_renewed_only_while_it_is_as_it_was_found():
    made = replica(30)
    adapters, found = made.engine.adapters, replace(new("a", 2), path="/there")
    adapters.register(found)
    (stale,) = adapters.records()
    adapters.renew(stale, replace(found, header="next"))
    (record,) = adapters.records()
    assert (record.header, record.node.uid) == ("next", stale.node.uid + 1)
    adapters.renew(stale, replace(found, header="late"))  # somebody else has replaced it
    assert adapters.records() == [record]
    adapters.remove("a")
    adapters.renew(record, replace(found, header="late"))
    assert not adapters.records()


def new(name: str, size: int) -> NewAdapter:
    return NewAdapter(name, "", {}, (), (), ("q",) * size, data=None, bytes=size, read_s=0.0)


def test_the_refusal_names_the_numbers_and_changes_nothing():
    made = replica(30, 6, 6, 7)
    made.engine.adapters.pin("0", True)
    with pytest.raises(ResourceExhausted, match=r"'1' of 6 blocks.* 12 blocks.*adapter 7.*context 12,.*30 .*unpin one"):
        made.engine.adapters.pin("1", True)
    with pytest.raises(ResourceExhausted, match=r"'big' of 13 blocks.* 6 blocks.*adapter 13.*context 12"):
        made.engine.adapters.add(new("big", 13))
    with pytest.raises(ResourceExhausted, match="'0' of 20 blocks"):
        made.engine.adapters.add(new("0", 20), pinned=True, replace=True)
    assert [(i.name, i.blocks, i.pinned) for i in made.engine.adapters.all()] == [
        ("0", 6, True), ("1", 6, False), ("2", 7, False),
    ]  # fmt: skip
    made.engine.adapters.pin("0", False)
    assert made.engine.adapters.add(new("big", 13)).blocks == 13  # without pins, as far as the pool goes
    serves_all(made)


def test_a_request_that_pins_leave_no_room_for_is_told_so():
    made = replica(24, 6, 4)  # the longest context is as large as half of the pool
    tokens = 15 * BLOCK
    answers(made, None, tokens)
    made.engine.adapters.pin("0", True)
    with pytest.raises(ResourceExhausted, match=r"76 tokens .*24 blocks beside the 6 blocks.*; unpin one, or"):
        answers(made, "1", tokens + 4 * BLOCK)
    with pytest.raises(ResourceExhausted, match=r"pool of 24 blocks; raise cache.hbm_blocks"):
        answers(made, "0", tokens + 4 * BLOCK)  # its own blocks are not in its way as pinned ones
