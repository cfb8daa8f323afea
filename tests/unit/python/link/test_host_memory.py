"""Memory that vaults could take, on machines and in containers that a folder stands for."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from reft._link import host_memory, vault_place


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


def group(root: Path, folder: str, **files: str) -> None:
    """Files of a control group; `_` in their names stands for `.`, the first one."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name.replace("_", ".", 1)).write_text(text)


def test_the_first_version_counts_too(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO)
    (root / "proc/self/cgroup").write_text("4:cpu,memory:/slurm/job_1\n1:name=x:/\n0::/\n")
    group(
        root, "sys/fs/cgroup/memory", memory_limit_in_bytes="9223372036854771712", memory_usage_in_bytes="99"
    )
    group(root, "sys/fs/cgroup/memory/slurm", memory_limit_in_bytes="5000", memory_usage_in_bytes="4000")
    group(
        root,
        "sys/fs/cgroup/memory/slurm/job_1",
        memory_limit_in_bytes="9000",
        memory_usage_in_bytes="100",
    )
    assert host_memory.available_bytes(root=root) == 1000
    found = host_memory.tightest(root)
    assert found is not None and found.what == "memory.limit_in_bytes of the control group"


def test_page_cache_that_can_be_dropped_is_not_taken(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "a", {"a": ("5000", "4000")})
    group(root, "sys/fs/cgroup/a", memory_stat="anon 100\ninactive_file 2500\n")
    assert host_memory.available_bytes(root=root) == 3500
    first = machine(tmp_path / "first", MEMINFO)
    (first / "proc/self/cgroup").write_text("4:memory:/\n")
    stat = "inactive_file 1\ntotal_inactive_file 200\n"
    group(
        first,
        "sys/fs/cgroup/memory",
        memory_limit_in_bytes="1000",
        memory_usage_in_bytes="900",
        memory_stat=stat,
    )
    assert host_memory.available_bytes(root=first) == 300


def test_what_throttles_counts_like_what_kills(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "a/b", {"a": ("9000", "1000"), "a/b": ("max", "1000")})
    group(root, "sys/fs/cgroup/a", memory_high="1500\n")
    group(root, "sys/fs/cgroup/a/b", memory_high="max\n")
    assert host_memory.available_bytes(root=root) == 500


def test_a_path_of_the_host_stands_for_the_groups_own_mount(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "", {"": ("3000\n", "1000\n")})
    (root / "proc/self/cgroup").write_text("0::/kubepods/pod1\n")
    assert host_memory.available_bytes(root=root) == 2000


def test_some_of_a_bound_is_left_for_growth(tmp_path: Path) -> None:
    found = host_memory.tightest(machine(tmp_path, MEMINFO, "a", {"a": ("1000", "100")}))
    assert found is not None and (found.left, found.usable) == (900, 850)
    assert host_memory.Room(10, 1000, "").usable == 0
    assert host_memory.Room(1 << 40, 2 << 40, "").usable == (1 << 40) - (8 << 30)


def test_what_a_process_has_given_back_since_its_peak(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO)
    assert host_memory.growth_bytes(root) == 0
    (root / "proc/self/status").write_text("Name:\tpython\nVmHWM:\t  900 kB\nVmRSS:\t  600 kB\n")
    assert host_memory.growth_bytes(root) == 300 * 1024
    (root / "proc/self/status").write_text("VmHWM:\nVmRSS: 1 kB\n")
    assert host_memory.growth_bytes(root) == 0


def test_kills_of_both_versions_are_counted(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "a/b", {"a/b": ("max", "1")})
    assert host_memory.oom_mark(root) == 0
    group(root, "sys/fs/cgroup/a/b", memory_events="low 0\noom 3\noom_kill 2\n")
    before = host_memory.oom_mark(root)
    assert before and not host_memory.oom_killed_since(before, root)
    group(root, "sys/fs/cgroup/a/b", memory_events="low 0\noom 3\noom_kill 3\n")
    assert host_memory.oom_killed_since(before, root)
    assert not host_memory.oom_killed_since(0, root)
    (root / "proc/self/cgroup").write_text("4:memory:/b\n0::/\n")
    group(root, "sys/fs/cgroup/memory/b", memory_oom_control="under_oom 0\noom_kill 5\n")
    assert not host_memory.oom_killed_since(before, root)  # another group
    before = host_memory.oom_mark(root)
    group(root, "sys/fs/cgroup/memory/b", memory_oom_control="under_oom 0\noom_kill 6\n")
    assert host_memory.oom_killed_since(before, root)


def test_memory_is_short_before_none_is_left(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO, "a", {"a": ("100000", "97000")})
    assert not host_memory.is_short(root)
    group(root, "sys/fs/cgroup/a", memory_current="99000")
    assert host_memory.is_short(root)
    group(root, "sys/fs/cgroup/a", memory_stat="inactive_file 5000\n")
    assert not host_memory.is_short(root)


def test_waiting_for_memory_counts_where_none_is_left(tmp_path: Path) -> None:
    waits = "some avg10=60.00 avg60=1.00 avg300=0.00 total=9\nfull avg10={} avg60=1.00 avg300=0.00 total=9\n"
    root = machine(tmp_path, MEMINFO, "a/b", {"a": ("100000", "97000")})
    assert not host_memory.is_stalled(root)
    group(root, "sys/fs/cgroup/a", memory_pressure=waits.format("9.50"))
    assert not host_memory.is_stalled(root)
    group(root, "sys/fs/cgroup/a", memory_pressure=waits.format("10.50"))
    assert host_memory.is_stalled(root)
    group(root, "sys/fs/cgroup/a", memory_current="50000")
    assert not host_memory.is_stalled(root), "it waits for page cache"
    group(root, "sys/fs/cgroup/a", memory_current="97000", memory_pressure="full avg10=much\n")
    assert not host_memory.is_stalled(root)
    (root / "proc/pressure").mkdir()
    (root / "proc/pressure/memory").write_text(waits.format("40.00"))
    assert host_memory.is_stalled(root)


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert host_memory.available_bytes(root=tmp_path) is None
    assert host_memory.available_bytes(root=machine(tmp_path / "odd", "MemAvailable:\n")) is None


def test_a_vault_on_a_disk_is_limited_by_the_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert abs(host_memory.of_disk(str(tmp_path)).left - free) < 1 << 30


def test_files_on_tmpfs_take_memory(tmp_path: Path) -> None:
    assert vault_place.in_memory("")
    assert vault_place.in_memory("/dev/shm/reft/not-yet/there")
    assert vault_place.in_memory("/dev/shm/")
    assert not vault_place.in_memory("/proc")


def test_any_bound_that_is_nearly_reached_makes_memory_short(tmp_path: Path) -> None:
    """Two bounds leave nothing to take: the smaller one may be the one that the kernel enforces."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemAvailable: {2560 << 10} kB\n"
    limits = {"pod": (str(60 << 30), str((60 << 30) - (10 << 20)))}
    root = machine(tmp_path, meminfo, "pod", limits)
    assert host_memory.is_short(root)
    found = host_memory.tightest(root)
    assert found is not None and found.what == "memory.max of the control group"


def test_the_address_space_of_the_process_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO)
    (root / "proc/self/status").write_text("Name:\tpython\nVmSize:\t    3000 kB\n")
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = 1 << 46  # more than this process has mapped
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        rooms = [r for r in host_memory._rooms(root) if "address space" in r.what]
        assert [(room.left, room.most) for room in rooms] == [(most - 3000 * 1024, most)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not [r for r in host_memory._rooms(root) if "address space" in r.what]


def test_this_machine_has_some() -> None:
    found = host_memory.available_bytes()
    assert found is not None and found > 0
