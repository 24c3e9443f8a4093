"""Where a model lies on this machine. No jax: a router needs its tokenizer only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jlora.errors import NotFound

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve(path_or_id: str | Path) -> Path:
    """The model's directory: `path_or_id` itself, or a download of that hub id. Raises NotFound if it is neither."""
    name = str(path_or_id)
    path = Path(os.path.expanduser(name))
    try:
        if name and path.is_dir():
            return path
    except OSError as e:  # this user may not enter the directory above, or the path is too long
        raise NotFound(f"model.path = {name!r}: {e.strerror}") from e
    if not _HUB_ID.fullmatch(name):
        raise NotFound(f"model.path = {name!r}: is not a directory")
    # Imported here, because a local path does not need its HTTP stack.
    import huggingface_hub

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
    other_formats = ["*/*", "consolidated*"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=other_formats))
    except Exception as e:  # also those of its HTTP library, as a proxy's
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise NotFound(f"model.path = {name!r}: is not a directory, and the hub download failed: {reason}") from e
