"""What a server knows of adapters on the disk when it starts again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import grpc
import pytest

from jlora.errors import ConfigError
from jlora.serve.proto import jlora_pb2 as pb
from tests import port
from tests.serve import _library
from tests.serve._library import Tier, ask, on_disk
from tests.serve._server import Served, refused, serve, wait_until


@pytest.fixture(scope="module")
def library(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _library.write(tmp_path_factory.mktemp("library"), text_model)


@pytest.fixture(scope="module")
def expected(text_model: Path, library: Path) -> dict[str, list[int]]:
    return _library.answers(text_model, library)


def lazily(directory: Path, tmp_path: Path) -> dict[str, object]:
    """A server that scans the directory, and remembers it in a registry."""
    registry = str(tmp_path / "adapters.db")
    return {
        "adapters.dir": str(directory),
        "adapters.lazy": True,
        "adapters.registry": registry,
        "engine.warmup": False,
    }


def test_the_registry_outlives_the_server(
    text_model: Path, library: Path, tmp_path: Path, expected: dict[str, list[int]]
):
    mine = tmp_path / "mine"
    for name in ("a0", "a1"):
        shutil.copytree(library / name, mine / name)
    settings = lazily(mine, tmp_path)
    with serve(text_model, settings) as served:
        digest = served.adapters.LoadAdapter(
            pb.LoadAdapterRequest(name="more", path=str(library / "a2"), lazy=True)
        ).digest
        served.adapters.PinAdapter(pb.PinAdapterRequest(name="a0", pinned=True))
        uid = served.adapters.GetAdapter(pb.GetAdapterRequest(name="more")).uid
        with pytest.raises(ConfigError, match=r"adapters\.registry = .*another server"):
            with serve(text_model, settings):
                pass
    shutil.copyfile(mine / "a0" / "adapter_model.safetensors", mine / "a1" / "adapter_model.safetensors")
    shutil.copytree(library / "a3", mine / "A-new")  # found before all that the registry knows
    shutil.copytree(library / "a3", mine / os.fsdecode(b"A\xff"))  # left out
    with serve(text_model, settings) as served:
        info = served.adapters.GetAdapter(pb.GetAdapterRequest(name="more"))
        assert (info.uid, info.digest, Tier.Name(info.tier)) == (uid, digest, "DISK")
        assert served.adapters.GetAdapter(pb.GetAdapterRequest(name="a0")).pinned
        answers = {"A-new": "a3", "a0": "a0", "more": "a2"}
        assert {name: ask(served, name) for name in answers} == {n: expected[of] for n, of in answers.items()}
        listed = served.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
        assert len({info.uid for info in listed}) == len(listed) == 3  # the changed a1 is left out


def test_a_restart_forgets_no_digest(text_model: Path, library: Path, tmp_path: Path, expected: dict[str, list[int]]):
    mine, away = tmp_path / "mine", tmp_path / "away"
    shutil.copytree(library / "a0", mine / "a0")
    settings = lazily(mine, tmp_path)
    with serve(text_model, settings) as served:
        assert ask(served, "a0") == expected["a0"]  # pins its digest
        digest = served.adapters.GetAdapter(pb.GetAdapterRequest(name="a0")).digest
    mine.joinpath("a0").rename(away)
    shutil.copytree(library / "a1", mine / "a0")
    with serve(text_model, {**settings, "adapters.max_rank": 32}) as served:  # so all headers are read again
        port.look(served.replica)
        with refused(grpc.StatusCode.NOT_FOUND, "'a0'"):
            ask(served, "a0")
        shutil.rmtree(mine / "a0")
        away.rename(mine / "a0")
        port.look(served.replica)
        assert served.adapters.GetAdapter(pb.GetAdapterRequest(name="a0")).digest == digest
        assert ask(served, "a0") == expected["a0"]


def test_a_start_without_the_disk_forgets_no_digest_and_what_is_removed_is_forgotten(
    text_model: Path, library: Path, tmp_path: Path
):
    mine, away, registry = tmp_path / "mine", tmp_path / "away", str(tmp_path / "adapters.db")
    for name in ("a0", "a1"):
        shutil.copytree(library / name, mine / name)
    settings = {
        "adapters.dir": str(mine), "adapters.lazy": True, "adapters.registry": registry, "engine.warmup": False,
    }  # fmt: skip
    with serve(text_model, settings) as served:
        digests = {}
        for name in ("a0", "a1"):
            ask(served, name)
            digests[name] = served.adapters.GetAdapter(pb.GetAdapterRequest(name=name)).digest
        served.adapters.PinAdapter(pb.PinAdapterRequest(name="a1", pinned=True))
    mine.rename(away)
    mine.mkdir()
    with serve(text_model, settings) as served:
        assert not on_disk(served)
        mine.rmdir()
        away.rename(mine)
        port.look(served.replica)
        assert "a0" in on_disk(served)
        wait_until(lambda: served.adapters.GetAdapter(pb.GetAdapterRequest(name="a1")).pinned)
        assert served.adapters.GetAdapter(pb.GetAdapterRequest(name="a0")).digest == digests["a0"]
    shutil.rmtree(mine / "a0")
    with serve(text_model, settings) as served:
        listed = served.adapters.ListAdapters(pb.ListAdaptersRequest()).adapters
        assert [(info.name, info.pinned) for info in listed] == [("a1", True)]
    shutil.copytree(library / "a2", mine / "a0")  # another adapter of that name
    with serve(text_model, settings) as served:
        assert on_disk(served) == ["a0"]
        assert served.adapters.GetAdapter(pb.GetAdapterRequest(name="a0")).digest == ""


def test_a_pin_that_has_no_room_after_the_disk_comes_back_is_tried_again_by_the_next_start(
    text_model: Path, library: Path, tmp_path: Path
):
    mine, away = tmp_path / "mine", tmp_path / "away"
    shutil.copytree(library / "a1", mine / "a1")
    settings = lazily(mine, tmp_path)

    def pinned(served: Served) -> bool:
        return served.adapters.GetAdapter(pb.GetAdapterRequest(name="a1")).pinned

    with serve(text_model, settings) as served:
        served.adapters.PinAdapter(pb.PinAdapterRequest(name="a1", pinned=True))
    mine.rename(away)
    mine.mkdir()
    full = {"cache.host_blocks": 2, "adapters.paths.other": str(library / "a3")}  # of two blocks, as a1 is
    with serve(text_model, {**settings, **full}) as served:
        served.adapters.PinAdapter(pb.PinAdapterRequest(name="other", pinned=True))
        mine.rmdir()
        away.rename(mine)
        port.look(served.replica)
        assert "a1" in on_disk(served) and not pinned(served)
    with serve(text_model, settings) as served:
        assert pinned(served)
        served.adapters.PinAdapter(pb.PinAdapterRequest(name="a1", pinned=False))
    with serve(text_model, settings) as served:
        assert not pinned(served)


def test_an_adapter_that_was_loaded_and_is_damaged_since_keeps_no_server_from_its_start(
    text_model: Path, library: Path, tmp_path: Path, expected: dict[str, list[int]]
):
    for name in ("a0", "a1"):
        shutil.copytree(library / name, tmp_path / name)
    settings = {"adapters.registry": str(tmp_path / "adapters.db"), "engine.warmup": False}
    with serve(text_model, settings) as served:
        for name in ("a0", "a1"):
            served.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=str(tmp_path / name)))
    weights = tmp_path / "a0" / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    with serve(text_model, settings) as served:
        assert ask(served, "a1") == expected["a1"]
        with refused(grpc.StatusCode.DATA_LOSS, "a0"):
            ask(served, "a0")


def test_pinned_adapters_may_fill_the_host_tier_at_a_start_and_one_without_room_is_told(
    text_model: Path, library: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = {
        "adapters.dir": str(library), "adapters.lazy": True, "adapters.registry": str(tmp_path / "adapters.db"),
        "engine.warmup": False,
    }  # fmt: skip
    with serve(text_model, settings) as served:
        for name in ("a1", "a3", "a5"):
            served.adapters.PinAdapter(pb.PinAdapterRequest(name=name, pinned=True))
    with serve(text_model, {**settings, "cache.host_blocks": 4}) as served:  # two adapters of rank 8
        pinned = {name: served.adapters.GetAdapter(pb.GetAdapterRequest(name=name)).pinned for name in ("a1", "a3")}
        assert pinned == {"a1": True, "a3": True}
        assert "adapter a5 is not pinned: it takes 2 blocks, and 0 of the host tier's 4 are free" in caplog.text


def test_changed_files_are_seen_for_every_name_that_they_have(text_model: Path, library: Path, tmp_path: Path):
    shutil.copytree(library / "a0", tmp_path / "a0")
    weights = tmp_path / "a0" / "adapter_model.safetensors"
    kept = weights.read_bytes()
    paths = {f"adapters.paths.{name}": str(tmp_path / "a0") for name in ("one", "two")}
    with serve(text_model, {**paths, "engine.warmup": False}) as served:
        nodes = port.parts(served.replica).scheduler.manager.adapters.values()
        assert sum(node.backed for node in nodes) == 2
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        port.look(served.replica)
        assert not any(node.backed for node in nodes)
        weights.write_bytes(kept)
        port.look(served.replica)
        assert sum(node.backed for node in nodes) == 2
