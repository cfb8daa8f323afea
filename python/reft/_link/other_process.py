"""Other processes of this machine: their stacks, through the agent's binary, and those of the same
launch.

The binary reads memory from outside, and needs neither torch nor the other process's consent beyond
the right to read it (`hang_detect/stacks/remote_stack.h`).

Threads: any. Errors: `OSError` and `ValueError` if the binary does not run or answer; else none.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READ_SEC = 20
_MOST_ENVIRONMENT = 1 << 20  # bytes
# Variables in which launchers number the ranks; the first that fits this process counts.
_RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# Variables that name a launch. All its ranks have them alike, and no rank of another has.
_LAUNCH_NAMES = (
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)
_ALIKE = (*_LAUNCH_NAMES, "MASTER_ADDR", "WORLD_SIZE", "SLURM_STEP_ID")


def read_stacks(pid: int, native: bool = False) -> dict[str, Any]:
    """As `reft-agent --stack` prints them.

    Raises:
        subprocess.TimeoutExpired: its memory cannot be read in time.
    """
    binary = (
        os.environ.get("REFT_AGENT_PATH")
        or Path(__file__).resolve().parent.parent / "bin" / "reft-agent"
    )
    command = [binary, "--stack", str(pid), *(["--native"] if native else [])]
    reader = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        output, _ = reader.communicate(timeout=_READ_SEC)
    except subprocess.TimeoutExpired:
        reader.kill()  # and it is not waited for: it may be where no signal reaches it
        raise
    read: dict[str, Any] = json.loads(output)
    if native:
        read.setdefault(
            "native", {"threads": [], "error": f"this version of {binary} has no native frames"}
        )
    return read


@dataclass(frozen=True)
class Use:
    """What processes have used together since their starts.

    Attributes:
        cpu_sec: processor time.
        io_bytes: bytes read and written.
        running: whether one of them runs, or waits for a disk.
    """

    cpu_sec: float
    io_bytes: int
    running: bool


def use_of(pids: Iterable[int]) -> Use:
    """Of those that still exist."""
    cpu, moved, running = 0.0, 0, False
    for pid in pids:
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) > 15:
            cpu += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
            running = running or fields[0] in "RD"
        for line in _text(f"/proc/{pid}/io").splitlines():
            name, _, count = line.partition(": ")
            moved += int(count) if name in ("rchar", "wchar") else 0
    return Use(cpu, moved, running)


def siblings(rank: int) -> dict[int, list[int]]:
    """Processes on this machine that the launch of this process, which is `rank`, started for other
    ranks, and their descendants: pids by rank, a parent before its children.

    They are known by their variables, as they were at their start; so ranks that a program has
    forked are not found. {} if this process has no such variables.
    """
    own = _environment(os.getpid())
    number = next((name for name in _RANK_NAMES if own.get(name) == str(rank)), None)
    if number is None or not any(own.get(name) for name in _LAUNCH_NAMES):
        return {}
    parents: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.geteuid():
                continue
        env = _environment(pid)
        other = env.get(number, "")
        same = all(env.get(name) == own.get(name) for name in _ALIKE)
        if same and other.isascii() and other.isdigit() and len(other) < 9 and int(other) != rank:
            parents[pid] = _parent(pid)
            found.setdefault(int(other), []).append(pid)
    above = _ancestors(os.getpid())
    return {
        other: sorted(
            (pid for pid in pids if pid not in above),
            key=lambda pid: (len(_ancestors(pid, parents)), pid),
        )
        for other, pids in found.items()
    }


def _ancestors(pid: int, parents: Mapping[int, int] | None = None) -> set[int]:
    """Those of a process, up to the first that is not in `parents`."""
    above: set[int] = set()
    while (pid := _parent(pid) if parents is None else parents.get(pid, 0)) > 0:
        if pid in above:
            break
        above.add(pid)
    return above


def _parent(pid: int) -> int:
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _environment(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read(_MOST_ENVIRONMENT)
    except OSError:
        return {}
    pairs = (part.partition("=") for part in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
