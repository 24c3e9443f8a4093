"""The machine and the versions that a number was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("jlora", "jax", "jaxlib", "flax", "numpy", "grpcio")


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system, threads."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter to speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source" if name == "jlora" else "not installed"
    return found


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
    try:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        return ""


def threads() -> int:
    """Cores that this process may use; both sides of a comparison get as many threads."""
    return len(os.sched_getaffinity(0))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")] if cpuinfo.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or "unknown"


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def available_bytes() -> int:
    """Memory that the machine can give without swapping (Linux; elsewhere its free pages)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def spare_bytes() -> int:
    """Memory that this process may still take: of the machine, and of its own limit of address space."""
    most, statm = resource.getrlimit(resource.RLIMIT_AS)[0], Path("/proc/self/statm")
    if most == resource.RLIM_INFINITY or not statm.exists():
        return available_bytes()
    return min(available_bytes(), most - int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
