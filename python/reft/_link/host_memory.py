"""How much of this node vaults could take.

The kernel ends a process when a control group has no memory left, not only when the machine has
none. So the limits of this process's group and of all groups above it count, of both versions:
`memory.max` and `memory.high` (2), `memory.limit_in_bytes` (1). Page cache that the kernel can drop
does not. The address space of a process may be limited, too (RLIMIT_AS).
"""

from __future__ import annotations

import resource
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

# A process that grows by more than the kernel can reclaim at once dies even below its limit.
_LIMIT_SHARE, _LIMIT_BYTES = 0.05, 8 << 30
# That little left, and snapshots give their memory back.
_SHORT_SHARE, _SHORT_BYTES = 0.02, 1 << 30
# Likewise where every process of a group waited for memory for that share of the last ten seconds.
_STALLED_PERCENT = 10.0
_COUNTS = 1 << 32
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number


@dataclass(frozen=True)
class Room:
    """What one bound leaves.

    Attributes:
        left: bytes that are free, or can be freed at once.
        most: the bound.
        what: in words.
    """

    left: int
    most: int
    what: str

    @property
    def usable(self) -> int:
        """Bytes that may be taken, so that the rest of the node has some to grow."""
        return max(0, self.left - min(int(_LIMIT_SHARE * self.most), _LIMIT_BYTES))

    @property
    def is_short(self) -> bool:
        """Whether so little is left that the kernel may soon end a process."""
        return self.left < min(_SHORT_SHARE * self.most, _SHORT_BYTES)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory that vaults could take, None if that cannot be read. `root`: where /proc and
    /sys are."""
    found = tightest(root)
    return None if found is None else found.left


def tightest(root: Path = Path("/")) -> Room | None:
    """The bound that leaves the least, None if none can be read."""
    return min(_rooms(root), key=lambda room: (room.usable, room.left), default=None)


def of_disk(folder: str) -> Room:
    """What the file system of a directory leaves; its tmpfs may also be bounded by memory."""
    found = shutil.disk_usage(folder)
    return Room(found.free, found.total, f"file system of {folder}")


def _rooms(root: Path) -> list[Room]:
    return [*_of_machine(root / "proc/meminfo"), *_of_groups(root), *_of_address_space(root)]


def has_room(wanted: int) -> bool:
    """Whether a vault may take so many bytes more now. Asked for each part that it takes, as other
    ranks and other jobs take theirs at the same time."""
    room = tightest()
    return room is None or wanted <= room.usable


def growth_bytes(root: Path = Path("/")) -> int:
    """How much more memory this process has had at its peak than it has now: between two steps,
    activations are free, and the next step takes them again."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
        rows = (line.partition(":") for line in lines)
        sizes = {key: value.split() for key, _, value in rows if key in ("VmHWM", "VmRSS")}
        return max(0, int(sizes["VmHWM"][0]) - int(sizes["VmRSS"][0])) * 1024
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def _of_machine(path: Path) -> list[Room]:
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        sizes = {row[0]: int(row[1]) * 1024 for row in rows if len(row) > 1 and row[1].isdigit()}
    except OSError:
        return []
    left = sizes.get("MemAvailable:")
    return [] if left is None else [Room(left, sizes.get("MemTotal:", left), "memory of the host")]


def _of_address_space(root: Path) -> list[Room]:
    """Of this process: a vault is mapped, so it takes what the script may want to allocate."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    taken = _entry(root / "proc/self/status", "VmSize:") * 1024
    if most == resource.RLIM_INFINITY or not taken:
        return []
    return [Room(max(0, most - taken), most, "limit of the address space (ulimit -v)")]


def _of_groups(root: Path) -> list[Room]:
    """Of each limited group, from this process's up."""
    rooms: list[Room] = []
    for is_first, folder in _folders(root):
        if is_first:
            limits = ["memory.limit_in_bytes"]
            used, cache = _number_in(folder / "memory.usage_in_bytes"), "total_inactive_file"
        else:
            limits = ["memory.max", "memory.high"]
            used, cache = _number_in(folder / "memory.current"), "inactive_file"
        if used is None:
            continue
        for name in limits:
            most = _number_in(folder / name)
            if most is not None and most < _UNLIMITED:
                left = most - max(0, used - _entry(folder / "memory.stat", cache))
                rooms.append(Room(max(0, left), most, f"{name} of the control group"))
    return rooms


def _folders(root: Path) -> list[tuple[bool, Path]]:
    """(whether it is of version 1, folder) of each group with the memory of this process, from its
    own to the topmost."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[bool, Path]] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            found += [(True, f) for f in _upwards(root / "sys/fs/cgroup/memory", path)]
        elif not controllers:
            found += [(False, f) for f in _upwards(root / "sys/fs/cgroup", path)]
    return found


def _upwards(top: Path, path: str) -> list[Path]:
    """The folder of a group and those above it, up to the mount. In a container, the path may be
    the host's and the mount the container's own group: then that one alone is to be seen."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not top.joinpath(*parts).is_dir():
        parts = []
    return [top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, key: str) -> int:
    """A number of a file of lines `key number`, 0 if it has none."""
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == key:
                return int(words[1])
    except (OSError, ValueError):
        pass
    return 0


def oom_mark(root: Path = Path("/")) -> int:
    """The control group of this process, and how many processes the kernel has ended in it for want
    of memory, as one number; 0 if the kernel does not say."""
    for is_first, folder in _folders(root):
        file = folder / ("memory.oom_control" if is_first else "memory.events")
        try:
            is_counted = any(row.startswith("oom_kill ") for row in file.read_text().splitlines())
        except OSError:
            continue
        if is_counted:
            count = _entry(file, "oom_kill") % (_COUNTS - 1) + 1
            return zlib.crc32(str(folder).encode()) * _COUNTS + count
    return 0


def oom_killed_since(mark: int, root: Path = Path("/")) -> bool:
    """Whether the kernel has ended a process of this group since `mark` was taken in it."""
    now = oom_mark(root)
    return mark > 0 and now // _COUNTS == mark // _COUNTS and now > mark


def is_short(root: Path = Path("/")) -> bool:
    """Whether one bound leaves so little that the kernel may soon end a process."""
    return any(room.is_short for room in _rooms(root))


def is_stalled(root: Path = Path("/")) -> bool:
    """Whether the processes of this one's groups, or of the machine, spend their time waiting until
    the kernel has made memory free (`full avg10` of its pressure stall information), while none is
    left beyond the part for growth. Where some is, page cache is what they wait for."""
    groups = [folder / "memory.pressure" for is_first, folder in _folders(root) if not is_first]
    files = [*groups, root / "proc/pressure/memory"]
    if all(_stalled_percent(file) < _STALLED_PERCENT for file in files):
        return False
    room = tightest(root)
    return room is not None and not room.usable


def _stalled_percent(path: Path) -> float:
    try:
        for line in path.read_text().splitlines():
            kind, *averages = line.split()
            if kind == "full":
                return float(dict(entry.split("=", 1) for entry in averages)["avg10"])
    except (OSError, ValueError, KeyError):  # an old kernel, or one that was told not to measure
        pass
    return 0.0
