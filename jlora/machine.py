"""The machine and the versions that a number was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # of control groups of version 1
UNLIMITED = 1 << 60  # bytes: version 1 has a number for no limit
PACKAGES = ("jlora", "jax", "jaxlib", "flax", "numpy", "grpcio")
PLUGINS = tuple(f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt"))  # where installed

# Of a GPU's memory that jax takes, by its new name and by the old one: jax refuses both together.
GPU_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
GPU_SHARE = "0.92"  # jax's own default leaves a quarter unused


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system, threads."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def age_s() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def versions() -> dict[str, str]:
    """Of Python, of the packages that matter to speed, and of NVIDIA's driver where there is one."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = version(name) or ("from source" if name == "jlora" else "not installed")
    found |= {name: plugin for name in PLUGINS if (plugin := version(name))}
    return found | ({"driver": driver} if (driver := nvidia_driver()) else {})


def version(package: str) -> str:
    """Of an installed package, else ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nvidia_driver(system: Path = Path("/")) -> str:
    """The version of NVIDIA's driver; "" where there is none, or none that says so."""
    try:
        told = (system / "proc/driver/nvidia/version").read_text()
    except OSError:
        told = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.search(r"\d+\.\d+(\.\d+)*", told)
    return found[0] if found else ""


def commit() -> str:
    """Of the checkout that jlora runs from, with "+" if its files were changed since; "" outside of one."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    head, changed = _git(root, "rev-parse", "--short", "HEAD"), _git(root, "status", "--porcelain", "-uno", "jlora")
    return head + ("+" if changed else "")


def command(program: str) -> str:
    """The command line of `program`, without folders of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    name = program.rpartition(" ")[2]
    return " ".join([program, *(words[1:] if words[:1] == [name] else words)])


def _git(root: Path, *words: str) -> str:
    return _run("git", "-C", str(root), *words)


def _run(*command: str) -> str:
    """What a program prints; "" where there is none, or it hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def threads() -> int:
    """Cores that this process may use; both sides of a comparison get as many threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name, as its maker gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")] if cpuinfo.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or "unknown"


def python_path() -> str:
    """PYTHONPATH for a child process, so that it runs this copy of jlora."""
    return os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH"))))


def gpu_share(environment: Mapping[str, str]) -> dict[str, str]:
    """What jax must find in the environment, when it first looks for devices, to take most of a GPU's memory.

    Nothing if the environment says how much. Only a GPU's plugin reads it.
    """
    return {} if any(map(environment.get, GPU_SHARES)) else {GPU_SHARES[0]: GPU_SHARE}


def resident_bytes(pid: int | str = "self") -> int:
    """Memory that a process holds now; 0 where the system does not say, or the process has ended."""
    statm = Path(f"/proc/{pid}/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def available_bytes() -> int:
    """Memory that machine and container can give without swapping (Linux; elsewhere the machine's free pages)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *container_bytes()])


def container_bytes(system: Path = Path("/")) -> list[int]:
    """What each control group around this process can still give, versions 1 and 2; none where nothing limits it.

    File pages that the kernel can drop count as free. Within a container its own group may be the root.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[int] = []
    for _, controllers, place in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            root = system / "sys/fs/cgroup" / controllers
            names = ("memory.max", "memory.current") if not controllers else V1_NAMES
            groups = {root, *(root / part for part in (place[1:], *map(str, Path(place[1:]).parents)))}
            found += [spare for group in groups if (spare := _spare(group, names)) is not None]
    return found


def _spare(group: Path, names: tuple[str, str]) -> int | None:
    """Of one control group; None without a limit."""
    try:
        limit, used = ((group / name).read_text().strip() for name in names)
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        high = group / "memory.high"  # of version 2: above it the kernel slows the process down, and tells nobody
        limits = [limit, high.read_text().strip()] if high.exists() else [limit]
        bound = min(UNLIMITED if limit == "max" else int(limit) for limit in limits)
        return None if bound >= UNLIMITED else max(0, bound - int(used) + _droppable(stat))
    except (OSError, ValueError):  # no such files, or not as the kernel writes them
        return None


def _droppable(stat: Mapping[str, str]) -> int:
    """Bytes of file pages that the kernel can drop: those read once, and those read again but not mapped."""

    def count(first: str, second: str) -> int:
        return int(stat.get(first, stat.get(second, 0)))

    again = count("total_active_file", "active_file") - count("total_mapped_file", "file_mapped")
    return count("total_inactive_file", "inactive_file") + max(0, again)


def spare_bytes() -> int:
    """Memory that this process may still take: of machine and container, and of its own limit of address space."""
    most, statm = resource.getrlimit(resource.RLIMIT_AS)[0], Path("/proc/self/statm")
    if most == resource.RLIM_INFINITY or not statm.exists():
        return available_bytes()
    return min(available_bytes(), most - int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
