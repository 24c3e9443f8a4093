"""Loading of adapters while the server runs, for every front."""

from __future__ import annotations

import asyncio
import logging

from jlora.adapters.names import check_key
from jlora.errors import AlreadyExists, InvalidArgument, JloraError
from jlora.replica import Load, Replica
from jlora.serve.status import shortened
from jlora.types import AdapterInfo

MAX_PATH = 4096  # characters: as many bytes as Linux takes

log = logging.getLogger(__name__)


async def load_adapter(replica: Replica, load: Load) -> AdapterInfo:
    """Loads a PEFT directory on the server's disk; done when requests can use it.

    Raises InvalidArgument, AlreadyExists (also for the base's name) and what the replica raises.
    """
    name, path = load.name, load.path
    if check_key(name) == replica.info.model:
        raise AlreadyExists(f"name = {name!r}: is the base model's name")
    if not path:
        raise InvalidArgument("path: is empty, must name a directory on the server")
    if len(path) > MAX_PATH:
        raise InvalidArgument(f"path = {path[:32] + '…'!r}: must have at most {MAX_PATH} characters, got {len(path)}")
    if load.lazy and load.pinned:
        raise InvalidArgument("lazy = true: a pinned adapter is on the device; leave out lazy or pinned")
    try:
        return await asyncio.wrap_future(replica.load_adapter(name, path, load.pinned, load.replace, load.lazy))
    except JloraError as e:
        # The client's message names a file by its directory and name; only the log has the whole path.
        log.warning("adapter %s is not loaded from %.4096r: %s", name, path, shortened(str(e)))
        raise
