"""Tells of adapters that come with another tokenizer than the base's. No jax.

    own_chat = OwnChat(Path("llama"), files)
    own_chat.compare("sql", "adapters/sql", digest)     # logs a warning, once for each digest

TRL, axolotl and unsloth save a tokenizer and its chat template beside an adapter. jlora uses the base's for all.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jlora.errors import JloraError
from jlora.model import token_names
from jlora.model.fields import short
from jlora.ports import DiskFiles, Files, Folder

logger = logging.getLogger(__name__)

MOST = 1 << 20  # bytes of a file; Llama 3's largest of these has 50,000


@dataclass(frozen=True, slots=True)
class _Chat:
    """The default chat template, and the token at the end of a turn; None where the directory has none."""

    template: str | None
    end: str | None


class OwnChat:
    """Compares adapters' directories with the base's. Thread-safe."""

    def __init__(self, base: Path, files: Files):
        """`files` opens adapters' directories."""
        self._files = files
        self._base = _read(DiskFiles().folder(str(base)))
        self._told: set[str] = set()

    def compare(self, name: str, path: str, digest: str) -> None:
        """Logs a warning if the adapter in directory `path` has another chat template or end token than the base."""
        own, base = _read(self._files.folder(path)), self._base
        if own is None or base is None or digest in self._told:
            return
        found: list[str] = []
        if own.template is not None and _shown(own.template) != _shown(base.template):
            instead = "the base has none, so chats are refused" if base.template is None else "chats use the base's"
            found.append(f"its own chat template is not used: {instead}")
        if own.end is not None and own.end != base.end:
            other = "of which the base has none" if base.end is None else f"the base's is {short(base.end)}"
            found.append(
                f"its own eos_token is {short(own.end)}, {other}: unless it is among the base's end tokens, answers "
                "do not end there; send stop_token_ids"
            )
        if found:
            self._told.add(digest)
            logger.warning("adapter %s: %s", name, "; ".join(found))


def _shown(template: str | None) -> str:
    """Without the line end that jinja2 leaves out."""
    return (template or "").rstrip("\n")


def _read(directory: AbstractContextManager[Folder]) -> _Chat | None:
    """None if a file cannot be read: jlora does not need it."""
    try:
        with directory as folder:
            own = _file(folder, token_names.TEMPLATE)
            trees = [_object(_file(folder, name)) for name in (token_names.CONFIG, token_names.MAP)]
        settings = token_names.merged(*trees)
        template = token_names.chat_template(None if own is None else own.decode(), settings)
        return _Chat(template, token_names.specials(settings).get("eos_token"))
    except (OSError, ValueError, RecursionError, JloraError):
        return None


def _file(folder: Folder, name: str) -> bytes | None:
    """Its content; None if there is no such file. Raises ValueError if it is too long."""
    try:
        with folder.open(name) as file:
            if file.size > MOST:
                raise ValueError(f"{name}: {file.size} bytes: must be at most {MOST}")
            return file.read(file.size).tobytes()
    except FileNotFoundError:
        return None


def _object(data: bytes | None) -> dict[str, Any]:
    return msgspec.json.decode(data or b"{}", type=dict[str, Any])
