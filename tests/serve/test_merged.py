"""What clients see of an adapter that is merged into the weights."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from rich.filesize import decimal

from jlora import cli
from jlora.engine import build
from jlora.engine.merging import AdapterCost
from jlora.serve.proto import jlora_pb2 as pb
from tests import port
from tests.serve._server import request, serve, wait_until
from tests.serve.conftest import ADAPTERS


def test_every_place_says_what_is_merged(text_model: Path, capsys: pytest.CaptureFixture[str]):
    paths = {f"adapters.paths.{name}": str(text_model.parent / "adapters" / name) for name in ADAPTERS}
    with serve(text_model, {**paths, "engine.merge": "upper", "engine.merge_starve_s": 0.05}) as served:
        wait_until(lambda: served.stats().merge.share == 1)
        info = served.adapters.GetAdapter(pb.GetAdapterRequest(name="upper"))
        assert info.merged and 0 < info.merge_error <= 1.1 and not info.merge_refusal
        for state in (
            served.control.GetServerInfo(pb.GetServerInfoRequest()).merge,
            served.control.GetCacheState(pb.GetCacheStateRequest()).merge,
        ):
            assert (state.adapter, state.uid, state.share, state.reloads) == ("upper", info.uid, 1.0, 0)
            assert state.switches == 1 and state.host_bytes > 0
            assert (state.alpha, state.beta) == (0, 0), "nothing decides: the configuration names the adapter"
        kept = served.stats().merge.host_bytes
        told = httpx.get(f"{served.http}/metrics").text.splitlines()
        assert 'jlora_merged{adapter="upper"} 1.0' in told and f"jlora_merge_host_bytes {float(kept)}" in told
        assert cli.main(["top", served.address, "--once"]) == 0
        assert f"upper 100 %  1 switches  0 weight reloads  {decimal(kept)} of host memory" in capsys.readouterr().out
        for name in ("upper", "lower", ""):
            assert served.generate(request("Hello", 6, model=name)).outputs[0].finish_reason == "length"
        served.check_idle()
        served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="upper"))
        assert served.control.GetServerInfo(pb.GetServerInfoRequest()).merge.adapter == ""


def test_what_decides_a_merge_is_told(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build, "adapter_cost", lambda *_: AdapterCost(0.25))
    with serve(text_model, {"engine.merge": "auto"}) as served:
        wait_until(lambda: served.stats().merge.adapters_cost == 0.25, timeout_s=60)  # every program is there
        policy = port.switching(port.engine(served.replica)).policy
        policy.alpha, policy.beta = 1.25, 0.75
        for state in (
            served.stats().merge,
            served.control.GetServerInfo(pb.GetServerInfoRequest()).merge,
            served.control.GetCacheState(pb.GetCacheStateRequest()).merge,
        ):
            assert (state.adapters_cost, state.alpha, state.beta) == (0.25, 1.25, 0.75)
        told = httpx.get(f"{served.http}/metrics").text.splitlines()
        assert "jlora_merge_adapters_cost 0.25" in told
        assert {'jlora_merge_threshold{of="alpha"} 1.25', 'jlora_merge_threshold{of="beta"} 0.75'} <= {*told}
        assert cli.main(["top", served.address, "--once"]) == 0
        assert "adapters cost 25.0 % of a step  in above 1.25, out below 0.75 of the batch" in capsys.readouterr().out
