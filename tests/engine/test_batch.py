"""Which adapter acts on which token of a launch, and which adapters' blocks it reads."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import jax
import pytest

from jlora.cache.lease import Lease
from jlora.cache.tree import AdapterNode
from jlora.config import EngineConfig
from jlora.engine.batch import SETS, BatchBuilder, Buckets, Form, Launch, Lists
from jlora.engine.plan import ROW, Sequence, StepPlan, Work
from jlora.layout import PoolLayout
from jlora.model.spec import PROJECTIONS
from jlora.model.step import Fields
from jlora.types import Request, SamplingParams
from tests._make import tiny_spec

PROMPT = 70
BASE = AdapterNode(0, 0)


def adapter(uid: int) -> AdapterNode:
    node = AdapterNode(uid, 2)
    node.device = (10 * uid, 10 * uid + 1)
    return node


@pytest.fixture
def builder() -> BatchBuilder:
    spec = tiny_spec()
    config = EngineConfig(max_seqs=4, max_step_tokens=256)
    return BatchBuilder(PoolLayout.of(spec, 100, 8), config, spec, lambda uid: ("q", "v"))


def work(node: AdapterNode, start: int, count: int, activation: int | None = None) -> Work:
    request = Request(f"r{node.uid}", tuple(range(PROMPT)), SamplingParams(max_tokens=4))
    sequence = Sequence(request, 0, node.uid, 0, node, 0.0, None, activation)
    return Work(sequence, start, count, samples=False)


def fields(launch: Launch) -> Fields:
    return launch.batch.fields(8)


def owners(launch: Launch, works: list[Work]) -> list[list[int]]:
    """For each work, the uid of the adapter that acts on each of its tokens; 0 is none."""
    chunk, found, row = launch.form.chunk, [], 0
    uids = [0, *dict.fromkeys(w.sequence.adapter.uid for w in works if w.adapted)]
    of_token = fields(launch).adapters.reshape(-1, chunk)
    for w in works:
        rows = -(-w.count // chunk)
        found.append([uids[i + 1] for i in of_token[row : row + rows].reshape(-1)[: w.count]])
        row += rows
    return found


def active(launch: Launch) -> dict[str, list[int]]:
    """Blocks read, by projection."""
    ends, blocks = fields(launch).offsets, launch.batch.lists[0]
    return {name: blocks[ends[i] : ends[i + 1]].tolist() for i, name in enumerate(PROJECTIONS)}


def test_a_row_may_hold_base_and_activated_tokens(builder: BatchBuilder):
    works = [work(adapter(1), 0, PROMPT, activation=40), work(adapter(2), 0, 20), work(BASE, 0, 5)]
    launch = builder.launch(works, 8, ROW)
    assert owners(launch, works) == [[0] * 40 + [1] * 30, [2] * 20, [0] * 5]
    assert active(launch)["q"] == [10, 20] and active(launch)["v"] == [11, 21]


@pytest.mark.parametrize(("start", "count", "acting"), [(0, 40, 0), (8, 33, 1), (40, 30, 30), (41, 4, 4)])
def test_a_chunk_of_an_activated_lora_is_adapted_from_the_invocation_on(
    builder: BatchBuilder, start: int, count: int, acting: int
):
    works = [work(adapter(1), start, count, activation=40)]
    launch = builder.launch(works, 3, ROW)
    assert owners(launch, works) == [[0] * (count - acting) + [1] * acting]
    assert works[0].adapted == (acting > 0)


def test_tokens_before_the_invocation_read_no_adapter(builder: BatchBuilder):
    launch = builder.launch([work(adapter(1), 0, 40, activation=40)], 2, ROW)
    assert not fields(launch).offsets.any() and (fields(launch).adapters == -1).all()


def test_decoding_rows_of_activated_and_plain_loras_and_the_base_are_told_apart(builder: BatchBuilder):
    works = [work(adapter(1), 60, 1, activation=0), work(BASE, 30, 1), work(adapter(2), 9, 1)]
    launch = builder.launch(works, 4, 1)
    assert launch.works == (works[0], works[2], works[1]), "rows of one adapter follow each other; the base is last"
    assert fields(launch).adapters.tolist() == [0, 1, -1, -1]


def test_decoding_without_adapters_takes_a_program_without_them_where_there_is_one():
    spec = tiny_spec()
    config = EngineConfig(max_seqs=24, max_step_tokens=64)
    builder = BatchBuilder(PoolLayout.of(spec, 100, 8), config, spec, lambda uid: ("q", "v"), bare=True)
    assert builder.buckets.decode == (2, 4, 8, 16, 24) and builder.buckets.bare == (2, 8, 24)
    base = [work(BASE, 30 + i, 1) for i in range(3)]
    waiting = work(adapter(1), 30, 1, activation=40)  # its invocation is still to come
    for works, rows in ((base, 8), ([*base, waiting], 8), ([*base, work(adapter(1), 60, 1)], 4)):
        (launch,) = builder.launches(StepPlan(tuple(works), (), ()))
        assert launch.form == (rows, 1, rows == 8)
        assert (launch.batch.lists.shape[1] == 0) == (rows == 8)
    (prompt,) = builder.launches(StepPlan((), (work(BASE, 0, 20),), ()))
    assert prompt.batch.lists.shape[1] == 100
    builder.compiled = replace(builder.buckets, bare=(2,), decode=(24,))  # larger ones still compile
    (launch,) = builder.launches(StepPlan(tuple(base), (), ()))
    assert launch.form == (24, 1, False) and launch.batch.lists.shape[1] == 100


@pytest.mark.parametrize("bare", [False, True])
def test_the_first_programs_serve_every_launch_and_one_without_adapters_as_such(bare: bool):
    buckets = Buckets.of(EngineConfig(max_seqs=24, max_step_tokens=512), bare)
    decode = [Form(24, 1), Form(24, 1, bare=True)][: 1 + bare]
    assert [form for form in buckets.largest.forms() if form.chunk == 1] == decode
    assert set(buckets.largest.forms()) <= set(buckets.forms())


def running(slot: int, blocks: tuple[int, ...], node: AdapterNode = BASE) -> Work:
    """A sequence that decodes; its last token is on the device only."""
    decoding = work(node, PROMPT, 1)
    decoding.sequence.slot, decoding.sequence.lease = slot, Lease(decoding.sequence.origin, True, blocks=blocks)
    return replace(decoding, samples=True)


def test_a_slots_page_table_follows_its_lease(builder: BatchBuilder):
    one, other = running(2, tuple(range(1, 10))), running(0, tuple(range(20, 29)))
    for table in (tuple(range(1, 10)), tuple(range(1, 11)), (40, *range(2, 11))):  # grown, then a block exchanged
        assert one.sequence.lease is not None
        one.sequence.lease.blocks = table
        found = fields(builder.launch([one, other], 2, 1))
        assert found.table[0, : len(table)].tolist() == list(table)
        assert found.table[1, :9].tolist() == list(range(20, 29))
        assert found.write_rows.tolist() == [table[PROMPT // 8], 28] and found.source.tolist() == [2, 0]


def test_a_launch_made_from_the_last_one_says_what_a_new_one_says(builder: BatchBuilder):
    nodes = adapter(2), BASE, adapter(2)
    works = tuple(running(slot, tuple(range(10 * slot, 10 * slot + 9)), node) for slot, node in enumerate(nodes))
    for one in works:
        builder.slots.set(one.sequence)

    def check() -> list[int]:
        (launch,) = builder.launches(StepPlan(works, (), ()))
        fresh = builder.launch(works, launch.form.rows, 1)
        assert launch.sampling is not None and fresh.sampling is not None
        assert launch.works == fresh.works and launch.form == fresh.form and launch.lists is fresh.lists
        assert launch.record.words.tolist() == fresh.record.words.tolist()
        assert launch.sampling.words.tolist() == fresh.sampling.words.tolist()
        return fields(launch).starts[:3].tolist()

    assert check() == [PROMPT] * 3
    works = tuple(replace(one, start=one.start + 1) for one in works)  # a step later
    assert check() == [PROMPT + 1] * 3
    works[1].sequence.tokens += [5, 6]  # the host knows the last token, as after a preemption
    assert check()
    assert works[2].sequence.lease is not None
    works[2].sequence.lease.blocks += (77,)
    assert check()
    works[0].sequence.slot = 3  # it was preempted, and is back
    builder.slots.set(works[0].sequence)
    assert check()
    works = works[1:]
    assert check()[:2] == [PROMPT + 1] * 2


def test_the_arrays_of_a_launch_on_its_way_are_never_written_again(builder: BatchBuilder):
    one, steps = running(0, tuple(range(9))), range(4)
    launches = [builder.launches(StepPlan((replace(one, start=PROMPT + step),), (), ()))[0] for step in steps]
    assert [fields(launch).starts[0] for launch in launches] == [PROMPT + step for step in steps]
    drawn = [launch.sampling.fields()["position"][0] for launch in launches if launch.sampling is not None]
    assert drawn == [PROMPT + step + 1 for step in steps]


def test_what_the_host_says_of_a_launch_is_two_arrays_and_the_lists_of_its_adapters_are_kept(builder: BatchBuilder):
    decode, prompt = [work(adapter(1), 60, 1)], [work(adapter(2), 0, 40)]
    launches = [builder.launch(works, rows, chunk) for works, rows, chunk in 2 * [(decode, 2, 1), (prompt, 2, ROW)]]
    assert launches[0].lists is launches[2].lists and launches[1].lists is launches[3].lists
    (launch,) = builder.launches(StepPlan((running(1, tuple(range(1, 10))),), (), ()))
    assert len(jax.tree.leaves((launch.record, launch.sampling))) == 2


def test_only_the_lists_of_the_last_sets_of_adapters_are_kept(builder: BatchBuilder):
    def lists(uid: int) -> Lists:
        return builder.launch([work(adapter(uid), 5, 1)], 2, 1).lists

    first, second = lists(1), lists(2)
    for uid in range(3, SETS + 1):
        lists(uid)
    assert lists(1) is first  # it is the last used now, and the second set leaves before it
    lists(SETS + 1)
    assert lists(1) is first and lists(2) is not second


def test_nothing_keeps_the_lists_of_an_engine_that_is_gone():
    spec = tiny_spec()
    config = EngineConfig(max_seqs=4, max_step_tokens=256)
    made = BatchBuilder(PoolLayout.of(spec, 100, 8), config, spec, lambda uid: ("q", "v"))
    made.launch([work(adapter(1), 5, 1)], 2, 1)
    gone = weakref.ref(made)
    gc.disable()  # a cycle would wait for the collector, and arrays of the device with it
    try:
        del made
        assert gone() is None
    finally:
        gc.enable()


def test_programs_without_adapters_are_fewer_than_those_with_them():
    buckets = Buckets.of(EngineConfig(max_seqs=64, max_step_tokens=512), bare=True)
    assert buckets.bare == (4, 16, 32, 64) and buckets.bare[-1] == buckets.decode[-1]
    assert 4 * len(buckets.bare) <= len(buckets.shapes)
    assert Buckets.of(EngineConfig(max_seqs=64, max_step_tokens=512)).bare == ()


def test_a_prompts_launch_samples_from_no_more_rows_than_there_are_sequences(builder: BatchBuilder):
    """A sampler's row takes megabytes with a large vocabulary, and a launch of 8,192 tokens has 256 rows."""
    assert builder.buckets.decode[-1] == 4
    assert [len(fields(builder.blank(rows, ROW)).last) for rows in (1, 4, 8)] == [2, 4, 4]
