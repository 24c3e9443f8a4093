"""Where a model lies on this machine. No jax: a router needs its tokenizer only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jlora.errors import NotFound

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def local(name: str) -> Path | None:
    """The directory of that path; None for what can only be a hub id. Raises NotFound for what is neither."""
    path = Path(os.path.expanduser(name))
    try:
        if name and path.is_dir():
            return path
        if name and path.exists():
            raise NotFound(f"model.path = {name!r}: is a file; name the directory that it is in")
    except OSError as e:  # this user may not enter the directory above, or the path is too long
        raise NotFound(f"model.path = {name!r}: {e.strerror}") from e
    if not _HUB_ID.fullmatch(name) or path.suffix == ".safetensors":
        raise NotFound(f"model.path = {name!r}: is not a directory")
    return None


def resolve(path_or_id: str | Path) -> Path:
    """The model's directory: `path_or_id` itself, or a download of that hub id. Raises NotFound if it is neither."""
    name = str(path_or_id)
    if (directory := local(name)) is not None:
        return directory
    # Imported here, because a local path does not need its HTTP stack.
    import huggingface_hub

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
    other_formats = ["*/*", "consolidated*"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=other_formats))
    except Exception as e:  # also those of its HTTP library, as a proxy's
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise NotFound(f"model.path = {name!r}: is not a directory, and the hub download failed: {reason}") from e
