"""A server of adapters that act in attention only: equal answers, smaller programs, and others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jlora.errors import InvalidArgument
from jlora.model import step
from tests.engine.test_engine import mixed, running, serve, tokens


@pytest.mark.slow
def test_adapters_of_attention_answer_as_in_a_server_of_all(
    tiny_model: Path, tiny_adapters: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    asked, adapted = [request for request in mixed() if request.adapter != "large"], []
    make = step.build

    def build(*args: Any) -> step.Programs:
        adapted.append(args[-1].adapted)
        return make(*args)

    monkeypatch.setattr(step, "build", build)
    served = {name: path for name, path in tiny_adapters.items() if name != "large"}
    with running(tiny_model, served, adapters__target_modules="attention") as service:
        got = serve(service, asked)
        assert {name: tokens(events) for name, events in got.items()} == {r.id: expected[r.id] for r in asked}
        with pytest.raises(InvalidArgument, match=r"large: target_modules has down, gate, up: must be of q, k, v, o"):
            service.load_adapter("large", str(tiny_adapters["large"]))
        assert [info.name for info in service.adapters()] == ["middle", "small"]
    assert adapted == [("q", "k", "v", "o")]
