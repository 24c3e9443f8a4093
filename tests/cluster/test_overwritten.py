"""A replica first meets a version while the version's path has the files of another one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from jlora.cluster.proto import link_pb2 as link
from jlora.errors import DataLoss, NotFound
from tests import _make
from tests.cluster._links import Loop
from tests.cluster._service import text_spec
from tests.cluster.test_peer import Side, side


@pytest.fixture(scope="module")
def pair(text_model: Path) -> Iterator[tuple[Side, Side]]:
    with closing(Loop()) as loop:
        both = side(loop, text_model), side(loop, text_model)
        yield both
        for one in both:
            one.fetcher.close()
            one.stop()
            one.engine.check_integrity().result(20)
            one.engine.close()


@pytest.mark.parametrize("source", ["files", "peer"])
def test_the_next_request_describes_it_anew(pair: tuple[Side, Side], tmp_path: Path, source: Literal["files", "peer"]):
    giver, taker = pair
    key, path = f"{source}@1", _make.make_adapter(tmp_path / "a", text_spec(), seed=5, r=8)
    digest = giver.engine.load_adapter(key, str(path)).result(60).digest
    expected = giver.generate(key)
    own = path.rename(tmp_path / "own")
    _make.make_adapter(path, text_spec(), seed=6, r=4)
    version = link.Version(key=key, path=str(path), digest=digest)
    taker.adopt(version)
    with pytest.raises(DataLoss):
        taker.generate(key)
    with pytest.raises(NotFound):  # upon which a link adopts it
        taker.generate(key)
    if source == "files":
        shutil.rmtree(path)
        own.rename(path)
    else:
        version.peers.append(giver.address)
    taker.adopt(version)
    assert taker.generate(key) == expected
    assert taker.engine.adapter(key).result(20).digest == digest


def test_a_version_that_was_in_memory_stays_known(pair: tuple[Side, Side], tmp_path: Path):
    """Its description is right, and its files may come back."""
    _, taker = pair
    path = _make.make_adapter(tmp_path / "a", text_spec(), seed=7, r=8)
    taker.engine.load_adapter("b@1", str(path), lazy=True).result(60)
    own = path.rename(tmp_path / "own")
    _make.make_adapter(path, text_spec(), seed=8, r=8)
    for _ in range(2):
        with pytest.raises(DataLoss):
            taker.generate("b@1")
    shutil.rmtree(path)
    own.rename(path)
    assert len(taker.generate("b@1")) == 6
