"""How much of this node vaults could take."""

from __future__ import annotations

import shutil
from pathlib import Path


def available_bytes(vault_dir: str = "", root: Path = Path("/")) -> int | None:
    """Bytes that vaults could take: free space of `vault_dir`, or without one, available memory.

    Memory is what the kernel reports as available, or less if this process's control group, or one
    above it, limits it. None if neither can be read. `root`: where /proc and /sys are.
    """
    if vault_dir:
        return shutil.disk_usage(vault_dir).free
    found = [*_from_meminfo(root / "proc/meminfo"), *_from_control_groups(root)]
    return min(found, default=None)


def _from_meminfo(path: Path) -> list[int]:
    try:
        lines = path.read_text().splitlines()
        return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return []


def _from_control_groups(root: Path) -> list[int]:
    """What each limited control group (version 2), from this process's up to the root, has left."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    group, left = top / own, []
    for folder in [group, *group.parents]:
        limit, used = _number_in(folder / "memory.max"), _number_in(folder / "memory.current")
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
        if folder == top:
            break
    return left


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
