"""Memory that vaults could take, on machines and in containers that a folder stands for."""

from __future__ import annotations

import shutil
from pathlib import Path

from reft._link import host_memory


def machine(root: Path, meminfo: str | None, group: str = "", limits: dict[str, tuple[str, str]] | None = None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    if meminfo is not None:
        (root / "proc/meminfo").write_text(meminfo)
    (root / "proc/self/cgroup").write_text(f"1:name=x:/\n0::/{group}\n")
    (root / "sys/fs/cgroup" / group).mkdir(parents=True)
    for name, (most, used) in (limits or {}).items():
        (root / "sys/fs/cgroup" / name / "memory.max").write_text(most)
        (root / "sys/fs/cgroup" / name / "memory.current").write_text(used)
    return root


MEMINFO = "MemTotal: 16000 kB\nMemAvailable:    8000 kB\n"


def test_without_a_limit_the_kernels_figure_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "", {"": ("max\n", "5\n")})
    assert host_memory.available_bytes(root=root) == 8000 * 1024


def test_the_root_groups_limit_counts_in_a_container(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "", {"": ("3000\n", "1000\n")})
    assert host_memory.available_bytes(root=root) == 2000


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    limits = {"a": ("5000", "1000"), "a/b": ("9000", "10"), "a/b/c": ("max", "7")}
    assert host_memory.available_bytes(root=machine(tmp_path, MEMINFO, "a/b/c", limits)) == 4000


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "a", {"a": ("100", "200")})
    assert host_memory.available_bytes(root=root) == 0


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert host_memory.available_bytes(root=tmp_path) is None
    assert host_memory.available_bytes(root=machine(tmp_path / "odd", "MemAvailable:\n")) is None


def test_a_vault_on_a_disk_is_limited_by_the_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    found = host_memory.available_bytes(str(tmp_path))
    assert found is not None and abs(found - free) < 1 << 30


def test_this_machine_has_some() -> None:
    found = host_memory.available_bytes()
    assert found is not None and found > 0
