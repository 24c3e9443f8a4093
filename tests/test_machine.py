"""What memory is left: of the machine, and of the container around this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from jlora import machine

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, stat: str, names: tuple[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{stat}\n")


def told(system: Path, lines: str) -> list[int]:
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text(lines)
    return sorted(machine.container_bytes(system))


NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: gcc 12.3.0\n"


def test_the_driver_is_told_by_the_kernel_or_by_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(NVRM)
    assert machine.nvidia_driver(tmp_path) == "580.65.06"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia_driver(tmp_path / "none") == ""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 575.57.08\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert machine.nvidia_driver(tmp_path / "none") == "575.57.08"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    assert machine.nvidia_driver(tmp_path / "none") == ""


def test_versions_name_the_plugin_of_jax_that_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "version", {"jax": "0.11.2", "jax-cuda13-plugin": "0.11.2"}.get)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "580.65.06")
    found = machine.versions()
    assert (found["jax"], found["jaxlib"], found["jax-cuda13-plugin"]) == ("0.11.2", "not installed", "0.11.2")
    assert found["driver"] == "580.65.06" and "jax-cuda12-plugin" not in found


def test_every_group_above_the_process_limits_it_and_droppable_pages_are_free(tmp_path: Path):
    names, root = ("memory.max", "memory.current"), tmp_path / "sys/fs/cgroup"
    group(root / "pods", str(64 * MIB), 60 * MIB, f"inactive_file {MIB}", names)
    group(root / "pods/jlora", str(32 * MIB), 16 * MIB, f"inactive_file {2 * MIB}", names)
    group(root / "pods/jlora/serve", "max", 16 * MIB, "inactive_file 0", names)
    assert told(tmp_path, "0::/pods/jlora/serve\n") == [5 * MIB, 18 * MIB]


def test_in_a_container_the_own_group_is_the_root(tmp_path: Path):
    group(tmp_path / "sys/fs/cgroup", str(8 * MIB), 9 * MIB, "inactive_file 0", ("memory.max", "memory.current"))
    assert told(tmp_path, "0::/\n") == [0]


def test_groups_of_version_1_count_too_and_their_number_for_no_limit_does_not(tmp_path: Path):
    names, root = ("memory.limit_in_bytes", "memory.usage_in_bytes"), tmp_path / "sys/fs/cgroup/memory"
    group(root, str(2**63 - 4096), 99 * MIB, "total_inactive_file 0", names)
    group(root / "docker/1", str(16 * MIB), 6 * MIB, f"inactive_file 0\ntotal_inactive_file {MIB}", names)
    assert told(tmp_path, "9:cpu:/\n4:memory:/docker/1\n0::/\n") == [11 * MIB]


def test_pages_that_were_read_twice_can_be_dropped_too_unless_they_are_mapped(tmp_path: Path):
    stat = f"inactive_file {MIB}\nactive_file {5 * MIB}\nfile_mapped {2 * MIB}"
    group(tmp_path / "sys/fs/cgroup", str(16 * MIB), 16 * MIB, stat, ("memory.max", "memory.current"))
    assert told(tmp_path, "0::/\n") == [4 * MIB]


@pytest.mark.parametrize(("high", "left"), [("max", [6 * MIB]), (str(12 * MIB), [2 * MIB]), (str(99 * MIB), [6 * MIB])])
def test_memory_above_which_the_kernel_slows_a_process_is_not_there(tmp_path: Path, high: str, left: list[int]):
    root = tmp_path / "sys/fs/cgroup"
    group(root, str(16 * MIB), 10 * MIB, "inactive_file 0", ("memory.max", "memory.current"))
    (root / "memory.high").write_text(f"{high}\n")
    assert told(tmp_path, "0::/\n") == left


@pytest.mark.parametrize(("limit", "stat"), [("", "inactive_file 0"), ("many", "inactive_file 0"), ("9", "odd")])
def test_a_group_of_another_form_limits_nothing(tmp_path: Path, limit: str, stat: str):
    group(tmp_path / "sys/fs/cgroup", limit, 1, stat, ("memory.max", "memory.current"))
    assert told(tmp_path, "0::/\n") == []


def test_a_machine_without_groups_has_no_limit(tmp_path: Path):
    assert machine.container_bytes(tmp_path) == []


def test_what_is_available_is_the_least_of_machine_and_container(monkeypatch: pytest.MonkeyPatch):
    whole = machine.available_bytes()
    monkeypatch.setattr(machine, "container_bytes", lambda: [MIB, whole * 2])
    assert machine.available_bytes() == MIB
    assert machine.spare_bytes() <= MIB


def test_jax_takes_most_of_a_gpu_unless_the_environment_says_how_much():
    assert machine.gpu_share({"XLA_CLIENT_MEM_FRACTION": ""}) == {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    for name in machine.GPU_SHARES:  # jax refuses both together
        assert machine.gpu_share({name: "0.5"}) == {}
