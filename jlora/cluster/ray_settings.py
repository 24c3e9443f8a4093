"""What Ray reads from the environment while it is imported, so this comes before `ray_fleet`."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from jlora.config import ClusterConfig
from jlora.errors import ConfigError

# By default Ray lets in whoever reaches its ports, sends statistics, and ends every replica a minute after its head.
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
# A Ray of our own listens on the loopback alone.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def prepare(section: ClusterConfig) -> str:
    """Sets Ray's environment; returns the new folder of a Ray of our own, "" for one that runs already.

    The secret of a Ray that runs already comes from `cluster.ray_token_file`, or from RAY_AUTH_TOKEN, as KubeRay
    sets it. Raises ConfigError without one.
    """
    if section.ray_address:
        if not (section.ray_token_file or os.environ.get("RAY_AUTH_TOKEN")):
            raise ConfigError("cluster.ray_token_file is not set: cluster.ray_address needs Ray's own secret")
        path = {"RAY_AUTH_TOKEN_PATH": section.ray_token_file} if section.ray_token_file else {}
        os.environ.update(SETTINGS, **path)
        return ""
    folder = tempfile.mkdtemp(prefix="jlora-ray-")  # short: Ray puts sockets below it
    os.environ.update(SETTINGS, **LOOPBACK, RAY_AUTH_TOKEN_PATH=write(Path(folder), secrets.token_urlsafe(32)))
    return folder


def write(folder: Path, secret: str) -> str:
    """The path of a new file with the secret, for its owner alone."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secret, encoding="ascii")
    return str(path)
