"""Other processes of this machine: their stacks, through the programs in reft/bin, and those of the
same launch.

These programs read memory from outside, and need neither torch nor the other process's consent
beyond the right to read it (`hang_detect/stacks/remote_stack.h`).

Threads: any. Errors: `OSError` and `ValueError` if the program does not run or answer; else none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft._link import bounded_json

_READ_SEC = 20
_MOST_OUTPUT = 64 << 20  # bytes
_MOST_ENVIRONMENT = 1 << 20  # bytes
# Variables in which launchers number the ranks, and how many there are; the first pair that fits
# this process counts.
_RANK_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
# Variables that name a launch. All its ranks have them alike, and no rank of another has.
_LAUNCH_NAMES = (
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)
_ALIKE = (
    *_LAUNCH_NAMES,
    "MASTER_ADDR",
    "WORLD_SIZE",
    "SLURM_STEP_ID",
    # What an earlier attempt has left behind is no rank of this one.
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
)


def read_stacks(pid: int, native: bool = False) -> dict[str, Any]:
    """As `reft-agent --stack` prints them, or with native frames, `reft-unwind` in its folder.

    Raises:
        subprocess.TimeoutExpired: its memory cannot be read in time.
    """
    agent = Path(
        os.environ.get("REFT_AGENT_PATH")
        or Path(__file__).resolve().parent.parent / "bin" / "reft-agent"
    )
    unwinder = agent.with_name("reft-unwind")
    can_unwind = native and unwinder.exists()
    command: list[str | Path] = [unwinder, str(pid)] if can_unwind else [agent, "--stack", str(pid)]
    reader = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        output, _ = reader.communicate(timeout=_READ_SEC)
    except subprocess.TimeoutExpired:
        reader.kill()  # and it is not waited for: it may be where no signal reaches it
        raise
    read = bounded_json.loads(output, limit=_MOST_OUTPUT)
    if not isinstance(read, dict):
        raise ValueError(f"{command[0]} prints no JSON object")
    if native and not can_unwind:
        read["native"] = {"threads": [], "error": f"there is no {unwinder}, so no native frames"}
    return read


@dataclass(frozen=True)
class Use:
    """What a process has used since its start.

    Attributes:
        cpu_sec: processor time, that of its ended children included.
        io_bytes: bytes read and written; None if that cannot be read.
        fault_bytes: pages that a disk had to bring.
        running: whether it runs now. (One that waits for a disk may do so for ever.)
    """

    cpu_sec: float
    io_bytes: int | None
    fault_bytes: int
    running: bool


def use_of(pids: Iterable[int]) -> dict[int, Use]:
    """By pid, of those that still exist."""
    uses: dict[int, Use] = {}
    for pid in pids:
        if fields := stat_fields(pid):
            cpu_sec = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
            faults = int(fields[9]) * os.sysconf("SC_PAGE_SIZE")
            uses[pid] = Use(cpu_sec, _io_bytes(pid), faults, fields[0] == "R")
    return uses


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; [] if there is no such process."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 19 else []


def _io_bytes(pid: int) -> int | None:
    counts = dict(line.split(": ", 1) for line in _text(f"/proc/{pid}/io").splitlines())
    try:
        return int(counts["rchar"]) + int(counts["wchar"])
    except (KeyError, ValueError):
        return None


def siblings(rank: int, size: int) -> dict[int, list[int]]:
    """Processes on this machine that the launch of this process, which is `rank` of `size`, started
    for other ranks, and their descendants: pids by rank, a parent before its children.

    They are known by their variables, as they were at their start; so ranks that a program has
    forked are not found. {} if this process has no such variables. If children of this process's
    own parent are among a rank's processes, only they and theirs are returned: others may be left
    over from an attempt that has the same variables.
    """
    own = _environment(os.getpid())
    here = [str(rank), str(size)]
    fitting = (names for names in _RANK_NAMES if [own.get(name) for name in names] == here)
    number, count = next(fitting, ("", ""))
    if not number or not any(own.get(name) for name in _LAUNCH_NAMES):
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
        other = _rank(env.get(number, ""), size)
        same = all(env.get(name) == own.get(name) for name in (*_ALIKE, count))
        if same and other is not None and other != rank:
            parents[pid] = _parent(pid)
            found.setdefault(other, []).append(pid)
    above = _ancestors(os.getpid())
    launcher = _parent(os.getpid())
    by_rank: dict[int, list[int]] = {}
    for one, pids in found.items():
        chains = {pid: _ancestors(pid, parents) for pid in pids if pid not in above}
        beside = {pid: chain for pid, chain in chains.items() if launcher in chain}
        chosen = beside or chains
        by_rank[one] = sorted(chosen, key=lambda pid: (len(chains[pid]), pid))
    return {one: pids for one, pids in by_rank.items() if pids}


def _rank(text: str, size: int) -> int | None:
    fits = text.isascii() and text.isdigit() and len(text) < 9 and int(text) < size
    return int(text) if fits else None


def _ancestors(pid: int, parents: Mapping[int, int] | None = None) -> set[int]:
    """Those of a process, up to the first that is not in `parents`."""
    above: set[int] = set()
    while (pid := _parent(pid) if parents is None else parents.get(pid, 0)) > 0:
        if pid in above:
            break
        above.add(pid)
    return above


def _parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


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
