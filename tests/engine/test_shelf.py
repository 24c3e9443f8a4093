"""What is read from the disk next: a reading without room waits, and one that can have none holds up no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.cache.manager import Sizes
from jlora.engine.records import NewAdapter
from jlora.errors import ResourceExhausted
from jlora.sim.replica import Replica
from jlora.types import Request, SamplingParams
from tests.sim import _sim

HOST, PINNED, LARGE, SMALL = 10, 6, 8, 2  # blocks


def replica(host: int = HOST) -> Replica:
    """Its host tier holds an adapter that may be pinned; two others are on the disk."""
    found = _sim.replica_of(replace(_sim.SPEC, sizes=Sizes(40, host, _sim.BLOCK), adapters=(PINNED,)))
    for name, size in (("large", LARGE), ("small", SMALL)):
        found.engine.adapters.register(NewAdapter(name, "", {}, (), (), ("q",) * size, None, size, 0.0, path="/there"))
    return found


def request(adapter: str) -> Request:
    return Request(adapter, (3, 4, 5), SamplingParams(max_tokens=2, ignore_eos=True), adapter)


def full() -> tuple[Replica, tuple[int, ...]]:
    """A replica whose host tier will have room for all, and the blocks that an adapter takes which is being loaded."""
    made = replica(PINNED + 2 * LARGE - 1)
    held = made.manager.reserve(LARGE)
    assert held is not None
    return made, held


def ask(made: Replica, adapter: str) -> None:
    made.submit(request(adapter), made.clock.now)


def check(made: Replica, adapter: str) -> None:
    made.engine.check(request(adapter))


def hint(made: Replica, *adapters: str) -> None:
    for name in adapters:
        made.engine.adapters.hint(made.engine.adapters.get(name).uid)


def begun(made: Replica) -> list[str]:
    return [reading.record.name for reading in made.engine.adapters.shelf.begin()]


def test_a_reading_that_pins_leave_no_room_for_holds_up_no_other():
    made = replica()
    ask(made, "large")
    made.engine.adapters.pin("0", True)
    ask(made, "small")
    assert begun(made) == ["small"] and begun(made) == []
    made.engine.adapters.pin("0", False)
    assert begun(made) == [], "what has been read stays until its request has run"


def test_what_is_asked_for_later_is_read_behind_a_hint_that_found_no_room():
    """Nothing else happens on an idle server."""
    made = replica()
    uid = made.engine.adapters.get("large").uid
    assert made.engine.adapters.hint(uid) == LARGE
    made.engine.adapters.pin("0", True)
    assert begun(made) == []
    ask(made, "small")
    assert begun(made) == ["small"]


def test_neither_does_one_that_adapters_without_files_leave_no_room_for():
    """They may have their files again, so nobody is refused."""
    made = replica()  # "0" has none
    hint(made, "large", "small")
    ask(made, "large")
    assert begun(made) == ["small"]


def test_a_request_for_what_was_hinted_at_before_goes_before_the_hint_that_found_no_room():
    made, _ = full()
    hint(made, "large", "small")
    assert begun(made) == []
    ask(made, "small")
    assert begun(made) == ["small"]


def test_others_wait_behind_a_reading_that_will_have_room():
    made, held = full()
    ask(made, "large")
    ask(made, "small")
    assert begun(made) == []
    made.manager.cancel(held)
    assert begun(made) == ["large"]  # one at a time


def test_an_adapter_that_pins_leave_no_room_for_is_refused():
    made = replica()
    adapters = made.engine.adapters
    adapters.pin("0", True)
    for ask_for in (ask, check):
        with pytest.raises(ResourceExhausted, match="'large' .* needs 8 blocks .* leave 4 of its 10; unpin"):
            ask_for(made, "large")
    with pytest.raises(ResourceExhausted, match="'large' .* needs 8 blocks"):
        adapters.pin_when_read("large", True)
    assert adapters.hint(adapters.get("large").uid) == 0
    assert begun(made) == [] and not made.busy
    adapters.pin("0", False)
    ask(made, "large")
    assert made.busy
