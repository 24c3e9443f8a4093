"""An adapter's own chat template and end token, which jlora does not use: it says so."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from jlora.engine.sources import Reader, read_adapter
from jlora.layout import PoolLayout
from jlora.model.own_chat import MOST, OwnChat
from jlora.ports import DiskFiles
from tests import _make

SPEC = _make.tiny_spec()


def write(directory: Path, template: str | None = None, older: dict[str, Any] | None = None, **config: Any) -> Path:
    """A directory with the files of a tokenizer."""
    directory.mkdir(exist_ok=True)
    _make.write_json(directory / "tokenizer_config.json", config)
    if older is not None:
        _make.write_json(directory / "special_tokens_map.json", older)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base", eos_token="</s>", chat_template="{{ messages }}")


@pytest.mark.parametrize(
    "own, said",
    [
        ({}, []),
        ({"eos_token": {"content": "</s>"}, "template": "{{ messages }}\n"}, []),
        ({"chat_template": [{"name": "default", "template": "{{ messages }}"}]}, []),
        ({"template": "{{ bos_token }}"}, ["chat template"]),
        ({"chat_template": "{{ bos_token }}"}, ["chat template"]),
        ({"eos_token": "<|im_end|>"}, ['eos_token is "<|im_end|>", the base\'s is "</s>"', "stop_token_ids"]),
        ({"eos_token": "</s>", "older": {"eos_token": "<|im_end|>"}}, ["<|im_end|>"]),
        ({"eos_token": "<|x|>", "template": "{{ x }}"}, ["chat template", "<|x|>"]),
    ],
)
def test_what_differs_is_told_once(tmp_path: Path, base: Path, caplog, own: dict[str, Any], said: list[str]):
    own_chat = OwnChat(base, DiskFiles())
    for _ in range(2):
        own_chat.compare("mine", str(write(tmp_path / "a", **own)), "digest")
    assert len(caplog.records) == bool(said)
    assert all(part in caplog.text for part in said)
    assert not said or "mine" in caplog.text
    own_chat.compare("mine", str(tmp_path / "a"), "another version")
    assert len(caplog.records) == 2 * bool(said)


def test_what_the_base_does_not_have_is_told_too(tmp_path: Path, caplog):
    own_chat = OwnChat(write(tmp_path / "base"), DiskFiles())
    own_chat.compare("mine", str(write(tmp_path / "a", template="{{ x }}", eos_token="<|x|>")), "digest")
    assert "the base has none, so chats are refused" in caplog.text and "of which the base has none" in caplog.text


@pytest.mark.parametrize("broken", ["json", "long", "bytes", "deep", "pipe", "absent", "roots"])
def test_what_cannot_be_read_is_no_error(tmp_path: Path, base: Path, caplog, broken: str):
    path = write(tmp_path / "a", template="{{ other }}")
    config, template = path / "tokenizer_config.json", path / "chat_template.jinja"
    match broken:
        case "json":
            config.write_text("{")
        case "long":
            template.write_text(" " * (MOST + 1))
        case "bytes":
            template.write_bytes(b"\xff")
        case "deep":
            config.write_text('{"x": ' + "[" * 100_000)
        case "pipe":
            template.unlink()
            os.mkfifo(template)
        case "absent":
            path = tmp_path / "nowhere"
        case _:
            template.unlink()
            template.symlink_to(write(tmp_path / "outside", template="{{ other }}") / "chat_template.jinja")
    roots = (str(path),) if broken == "roots" else ()
    OwnChat(base, DiskFiles(roots)).compare("mine", str(path), "digest")
    assert not caplog.records


def test_an_adapter_is_compared_when_it_is_read(tmp_path: Path, base: Path, caplog):
    path, files = _make.make_adapter(tmp_path / "a", SPEC), DiskFiles()
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    layout, own_chat = PoolLayout.of(SPEC, 64, 16), OwnChat(base, files)
    reader = Reader(SPEC, layout, 64, ("tiny",), files, time.monotonic, own_chat=own_chat)
    for _ in range(2):
        read_adapter("mine", str(path), reader)
    (record,) = caplog.records
    assert "adapter mine" in record.getMessage() and "<|im_end|>" in record.getMessage()
