"""Names and versions, and what a prompt invokes."""

from __future__ import annotations

import difflib

import pytest

from jlora.adapters import near
from jlora.adapters.registry import AdapterRegistry, Record
from jlora.cache.tree import AdapterNode
from jlora.errors import AlreadyExists, InvalidArgument, NotFound
from jlora.types import Invocation


def record(name: str = "check", invocation: tuple[int, ...] = (), uid: int = 1) -> Record:
    return Record(name, "digest", {"layers.0.self_attn.q_proj": 2}, ("q",), invocation, ("q",), 64, node(uid), 0.1)


def node(uid: int) -> AdapterNode:
    return AdapterNode(uid, 1)


def test_a_lora_needs_no_invocation():
    registry, plain = AdapterRegistry(), record()
    registry.add(plain)
    assert registry.resolve("check", (1, 2)) == (plain, None)


def test_a_prompt_without_the_invocation_is_refused_by_adapter_and_sequence_or_left_to_the_base():
    strict, lenient = AdapterRegistry(), AdapterRegistry("base")
    known = record(invocation=(70, 80))
    for registry in (strict, lenient):
        registry.add(known)
        assert registry.resolve("check", (1, 70, 80)) == (known, 1)
    with pytest.raises(InvalidArgument, match=r"'check'.*alora_invocation_tokens = \[70, 80\].*alora_missing"):
        strict.resolve("check", (70, 8, 80))
    assert lenient.resolve("check", (70, 8, 80)) == (None, None)


def test_a_long_invocation_is_shown_by_its_beginning():
    registry = AdapterRegistry()
    registry.add(record(invocation=tuple(range(1000))))
    with pytest.raises(InvalidArgument, match=r"= \[0, 1, .*, 15, … 1000 tokens\]; ") as error:
        registry.resolve("check", (70,))
    assert len(str(error.value)) < 400


def test_what_a_search_has_found_is_taken_unless_the_name_stands_for_another_invocation_by_now():
    registry = AdapterRegistry()
    registry.add(record(invocation=(70, 80)))
    prompt = (70, 80, 5, 70, 90)
    assert registry.resolve("check", prompt, Invocation((70, 80), 7))[1] == 7  # not looked at again
    assert registry.resolve("check", prompt, Invocation((70, 90), 3))[1] == 0
    with pytest.raises(InvalidArgument, match=r"\[70, 80\]"):
        registry.resolve("check", prompt, Invocation((70, 80), None))


def test_unknown_names_and_names_in_use_are_said():
    registry = AdapterRegistry()
    registry.add(record("check"))
    with pytest.raises(NotFound, match="'chek'.*did you mean 'check'"):
        registry.resolve("chek", (1,))
    with pytest.raises(AlreadyExists, match="'check'"):
        registry.check_free("check")


def test_versions_stay_reachable_until_they_are_gone():
    registry = AdapterRegistry()
    old, new = record(uid=registry.new_uid()), record(uid=registry.new_uid())
    registry.add(old)
    registry.remove("check")
    registry.add(new)
    assert registry.get("check") is new and registry.by_uid(1) is old and registry.versions("check") == [1, 2]
    registry.purge({2: new.node})
    assert registry.versions("check") == [2]


def test_a_version_is_live_while_its_name_stands_for_it():
    registry = AdapterRegistry()
    old, new = record(uid=registry.new_uid()), record(uid=registry.new_uid())
    registry.add(old)
    assert registry.live(1) is old and "check" in registry
    registry.remove("check")
    assert registry.live(1) is None and registry.live(7) is None and "check" not in registry
    registry.add(new)
    registry.remove("check")
    registry.add(old)  # a load that failed gives the name back
    assert registry.live(1) is old and registry.versions("check") == [1, 2]
    registry.purge({1: old.node})
    assert registry.live(2) is None and registry.versions("check") == [1]


class Counted(str):
    """Counts the comparisons with it."""

    compared = 0

    def __lt__(self, other: str) -> bool:
        Counted.compared += 1
        return str.__lt__(self, other)


def test_pages_are_in_order_of_name_and_take_no_time_by_the_other_names():
    registry = AdapterRegistry()
    for i in (i * 7 % 1000 for i in range(1000)):
        registry.add(record(f"tenant-{i:04d}", uid=registry.new_uid()))
    for i in range(0, 1000, 2):
        registry.remove(f"tenant-{i:04d}")
    names = [f"tenant-{i:04d}" for i in range(1, 1000, 2)]
    assert [r.name for r in registry.all()] == names
    assert [r.name for r in registry.all(Counted("tenant-0500"), 3)] == names[250:253]
    assert 0 < Counted.compared <= 10
    assert [r.name for r in registry.all(names[-2], 3)] == names[-1:] and registry.all(names[-1]) == []


@pytest.mark.parametrize(
    "wrong, right",
    [("chek", "check"), ("sql-adaptor", "sql-adapter"), ("rench", "french"), ("fr_ench", "french"),
     ("FRENCH", "french"),
     ("frecnh", "french"), ("french-v", "french"), ("oen", "one")],
)  # fmt: skip
def test_a_slip_finds_the_name(wrong: str, right: str):
    names = near.NearNames()
    for name in ("check", "sql-adapter", "french", "one", *(f"tenant-{i}" for i in range(50))):
        names.add(name)
    assert names.of(wrong) == [right]
    assert names.of("of-another-kind") == []
    names.remove(right)
    assert names.of(wrong) == []


def test_the_work_for_an_unknown_name_does_not_grow_with_the_names(monkeypatch: pytest.MonkeyPatch):
    """Nor does a new name, a known one, or a removal compare names at all."""
    compared: list[str] = []
    likeness = near.likeness
    monkeypatch.setattr(near, "likeness", lambda a, b: compared.append(b) or likeness(a, b))
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args, **kwargs: pytest.fail("compares all names"))
    registry, counts = AdapterRegistry(), []
    for size in (20, 200, 2000):
        for i in range(len(registry.all()), size):
            registry.add(record(f"tenant-{i:04d}", uid=registry.new_uid()))
        registry.remove("tenant-0011")
        registry.add(record("tenant-0011", uid=registry.new_uid()))
        assert "tenant-0007" in registry and registry.get("tenant-0007").name == "tenant-0007" and not compared
        with pytest.raises(NotFound, match="did you mean 'tenant-0007'"):
            registry.get("tenant-007")
        counts.append(len(compared))
        compared.clear()
    assert max(counts) <= 4 * near.REACH
