"""A directory of adapters, and what tests ask a server of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.serve._server import Served, request, serve

COUNT = 10
Tier = pb.AdapterInfo.Tier


def write(directory: Path, text_model: Path) -> Path:
    """Adapters a0, a1, ... of ranks 4 and 8."""
    from jlora.model import checkpoint

    spec = checkpoint.read_spec(text_model, "auto", 0)
    for i in range(COUNT):
        _make.make_adapter(directory / f"a{i}", spec, seed=i, r=4 + 4 * (i % 2), targets=("q", "v"))
    return directory


def answers(text_model: Path, library: Path) -> dict[str, list[int]]:
    """Every adapter's answer, from a server that holds all of them in memory."""
    with serve(text_model, {"adapters.dir": str(library)}) as served:
        listed = served.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
        assert {Tier.Name(info.tier) for info in listed} <= {"HBM", "HOST", "LOADING"}  # small: all are read at start
        return {f"a{i}": ask(served, f"a{i}") for i in range(COUNT)}


def ask(served: Served, name: str, **fields: Any) -> list[int]:
    return list(served.generate(request(model=name, **fields)).outputs[0].token_ids)


def tier(served: Served, name: str) -> str:
    return Tier.Name(served.adapters.GetAdapter(pb.GetAdapterRequest(name=name)).tier)


def on_disk(served: Served) -> list[str]:
    listed = served.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
    return [info.name for info in listed if Tier.Name(info.tier) == "DISK"]
