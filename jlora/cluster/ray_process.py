"""The fleet of a Ray cluster, whose driver is a process of its own.

Ray's library takes the signals of its process, aborts it at times, and ends it when Ray's head is gone. The router
must live through all of that, and it needs nothing of Ray but addresses: the driver writes them, a line for each
change. When its input ends, the driver ends too; only after "stop" does it end the replicas of a Ray that runs on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path

from jlora.cluster.child import ENV, REPLICA, STOP_S, flags_of
from jlora.cluster.fleet import BACKOFF_S, Places, Watch
from jlora.cluster.scratch import Scratch
from jlora.config import ClusterConfig, Config
from jlora.errors import ConfigError, Unavailable
from jlora.ports import OsThreads, Thread, Threads

log = logging.getLogger(__name__)

END_S = 30.0  # for Ray's own processes, beyond the replicas' drain
# By default Ray lets in whoever reaches its ports, sends statistics, ends every replica a minute after its head, gives
# up its own start after 30 s, though a busy machine needs longer, and lets any other program go before replicas.
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_niceness": "0",
}
# A Ray of our own listens on the loopback alone.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def write(folder: Path, secret: str) -> str:
    """The path of a new file with the secret, for its owner alone."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secret, encoding="ascii")
    return str(path)


def check(section: ClusterConfig) -> None:
    """Raises ConfigError without the secret of a Ray that runs already. KubeRay sets RAY_AUTH_TOKEN."""
    if section.ray_address and not (section.ray_token_file or os.environ.get("RAY_AUTH_TOKEN")):
        raise ConfigError("cluster.ray_token_file is not set: cluster.ray_address needs Ray's own secret")


def environment(section: ClusterConfig, scratch: Scratch | None) -> dict[str, str]:
    """Of the driver; `scratch` is the folder of a Ray of our own."""
    if scratch is not None:
        token = write(scratch.path, secrets.token_urlsafe(32))
        return {**os.environ, **SETTINGS, **LOOPBACK, "RAY_AUTH_TOKEN_PATH": token}
    token = {"RAY_AUTH_TOKEN_PATH": section.ray_token_file} if section.ray_token_file else {}
    return {**os.environ, **SETTINGS, **token}


class RayFleet:
    """Replicas r0, r1, ... on the Ray cluster of the configuration, or on a Ray of this process's own."""

    def __init__(self, config: Config, module: str = REPLICA, threads: Threads | None = None):
        """`module`: what each replica's process runs, see `child`. Raises ConfigError without Ray's secret."""
        check(config.cluster)
        self._config, self._module, self._threads = config, module, threads or OsThreads()
        self._stop_s = config.serve.drain_s + STOP_S + END_S
        self._places = Places()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._driver: subprocess.Popen[str] | None = None
        self._thread: Thread | None = None

    def start(self, watch: Watch) -> None:
        """Starts the driver, which connects to Ray, places the replicas and waits for them."""
        self._places = Places(watch)
        up: Future[None] = Future()
        self._thread = self._threads.start("jlora-ray", lambda: self._keep(up))
        try:
            up.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Drains and ends the replicas and their placement group; a Ray of our own ends too."""
        self._places.close()
        with self._lock:
            self._stopping.set()
            if self._driver is not None:
                _stop(self._driver, self._stop_s)
        if self._thread is not None:
            self._thread.join()

    def _keep(self, up: Future[None]) -> None:
        """Starts the driver again when it ends; replicas that live on are found by name."""
        wait_s, longest_s = BACKOFF_S
        while not self._stopping.is_set():
            try:
                end = self._drive(up)
            except Exception as e:
                if not isinstance(e, OSError):
                    log.error("Ray's driver has failed", exc_info=e)
                end = f"{type(e).__name__}: {e}"
            if not up.done():
                up.set_exception(Unavailable(end))
                return
            if not self._stopping.is_set():
                log.error("Ray's driver has ended (%s); replicas stay where they are; again in %g s", end, wait_s)
                self._stopping.wait(wait_s)
                wait_s = min(2 * wait_s, longest_s)
        if not up.done():  # stopped before it began
            up.set_exception(Unavailable("the fleet stops"))

    def _drive(self, up: Future[None]) -> str:
        """One life of the driver; why it ended. Raises OSError."""
        section = self._config.cluster
        with ExitStack() as opened:
            scratch = None if section.ray_address else opened.enter_context(closing(Scratch()))
            return self._run(str(scratch.path) if scratch else "", environment(section, scratch), up)

    def _run(self, folder: str, env: dict[str, str], up: Future[None]) -> str:
        """`folder`: of a Ray of our own; "" for one that runs already."""
        with self._lock:
            if self._stopping.is_set():
                return "the fleet stops"
            self._driver = driver = subprocess.Popen(
                [sys.executable, "-m", __name__, folder, self._module, *flags_of(self._config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**env, ENV: json.dumps(dict(self._config.cluster.env))},
                process_group=0,  # of a Ray of its own, too; Ctrl-C reaches the router alone
            )
        assert driver.stdin is not None and driver.stdout is not None
        end = ""
        with driver.stdin, driver.stdout:
            for line in driver.stdout:
                said = json.loads(line)
                end = said.get("error", end)
                if "addresses" in said:
                    self._places.replace(said["addresses"])
                    if not up.done():
                        up.set_result(None)
        code = driver.wait()
        if folder:
            _kill(driver)  # a Ray of its own would outlive it
        return end or f"its exit code was {code}"


def _stop(driver: subprocess.Popen[str], limit_s: float) -> None:
    """Asks the driver to end everything; it is killed if it takes too long."""
    assert driver.stdin is not None
    try:
        driver.stdin.write("stop\n")
        driver.stdin.flush()
    except (OSError, ValueError):  # it has ended
        return
    timer = threading.Timer(limit_s, _kill, (driver,))
    timer.daemon = True
    timer.start()


def _kill(driver: subprocess.Popen[str]) -> None:
    """Ends what is left of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)


if __name__ == "__main__":
    from jlora.cluster.ray_fleet import main

    sys.exit(main(sys.argv[1:]))
