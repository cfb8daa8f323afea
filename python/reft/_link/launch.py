"""What one process knows about its own launch: its host, the command that it runs, and where that
was started.

Variables of launchers are hints here. None of them says which ranks share a host: they may be
those of an outer job (a shell inside a Slurm allocation), or absent.

Threads: the training thread. Errors: none; what cannot be read is "" or None.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft._link import folders
from reft._link.job_identity import digest
from reft._link.other_process import stat_fields

_TORCH_SPAWN = "torch.multiprocessing.spawn"

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_MOST_VALUES = 10_000  # of the arguments of a function that multiprocessing runs
_DEEPEST = 8


@dataclass(frozen=True)
class Host:
    """Where a process runs, as far as it decides which processes can share an agent.

    Attributes:
        boot: name of the machine and id of its start (copies of a virtual machine share the id).
        pids, mounts: namespaces; an agent watches processes by their ids, and its socket has a
            path.
        user: effective uid; an agent serves one user.
        run_dir: where this process would look for the agent.
        run_dir_id: device and inode of that directory, "" if it cannot be made. Containers with
            mounts of their own may share it.
        group: number that torchrun gave to its group of workers, "" without torchrun.
    """

    boot: str
    pids: str
    mounts: str
    user: int
    run_dir: str
    run_dir_id: str
    group: str


@dataclass(frozen=True)
class Launch:
    """What a process was told to run.

    Attributes:
        command: digest of script, arguments and working directory, and of the function that
            multiprocessing runs; None if it cannot be told whether another process runs the same.
        place: where the command was started: equal for commands that may continue each other.
        label: for people.
    """

    command: str | None
    place: str
    label: str


def attempt(env: Mapping[str, str]) -> int:
    """How often the launcher has started the ranks before."""
    return number(env, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def restarts_left(env: Mapping[str, str]) -> int:
    """How often the launcher would start the ranks again."""
    return max(0, number(env, "TORCHELASTIC_MAX_RESTARTS") - attempt(env))


def is_last_start(env: Mapping[str, str]) -> bool:
    """Whether the launcher is known not to start the ranks again, whatever happens."""
    return "TORCHELASTIC_MAX_RESTARTS" in env and restarts_left(env) == 0


def number(env: Mapping[str, str], *names: str) -> int:
    """The first of these variables that holds a number of at most nine digits; 0 if none does."""
    for name in names:
        value = env.get(name, "")
        if value.isascii() and value.isdigit() and len(value) <= 9:
            return int(value)
    return 0


def boot() -> str:
    """The host by name and boot: containers of one machine may differ in their names."""
    return f"{platform.node()} {_text('/proc/sys/kernel/random/boot_id')}"


def host_of_agents() -> str:
    """As agents name their host in their welcome: equal for this process's node's."""
    return f"{boot()} {_link('/proc/self/ns/pid')}"


def host(run_dir: Path, env: Mapping[str, str]) -> Host:
    """Of this process."""
    _make(run_dir)
    return Host(
        boot=boot(),
        pids=_link("/proc/self/ns/pid"),
        mounts=_link("/proc/self/ns/mnt"),
        user=os.geteuid(),
        run_dir=str(run_dir),
        run_dir_id=identity_of(run_dir),
        group=env.get("GROUP_RANK", "")[:16] if "TORCHELASTIC_RUN_ID" in env else "",
    )


def launch(env: Mapping[str, str]) -> Launch:
    """Of this process, which is rank 0."""
    place, name = _place(env)
    script = Path(sys.argv[0] if sys.argv else "").stem
    return Launch(_command(), place, name or re.sub(r"\W+", "_", script).strip("_") or "job")


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def identity_of(directory: Path) -> str:
    """Device and inode of a directory, "" if there is none."""
    try:
        found = directory.stat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def _make(directory: Path) -> None:
    if directory.is_absolute():  # the agent reports another one
        with contextlib.suppress(OSError):  # the agent reports why
            folders.make_private(directory)


def start_ticks() -> int:
    """When this process began, in clock ticks since boot; 0: unknown."""
    return int(_process_start(os.getpid()))


def _process_start(pid: int) -> str:
    """Start time of a process in clock ticks: with the pid it names one process for good."""
    return _stat(pid)[19]


def _session_around(pid: int) -> int:
    """The session that a process was started in: of a terminal, of a batch script. That its parent
    is `timeout` or a script makes no difference."""
    while True:
        parent, session = (int(_stat(pid)[field]) for field in (1, 3))
        if session != pid or parent <= 0:
            return session
        pid = parent  # it leads a session of its own


def _stat(pid: int) -> list[str]:
    """As `stat_fields`; zeros if there is no such process."""
    return stat_fields(pid) or ["0"] * 20


def _place(env: Mapping[str, str]) -> tuple[str, str]:
    """Where this process's command was started, and how that is called, if it has a name."""
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    if run_id not in ("", "none") and not _UUID.fullmatch(
        run_id
    ):  # torchrun --standalone draws one
        return f"run {run_id}", f"run-{run_id}"
    if env.get("SLURM_JOB_ID"):
        step = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
        return f"slurm {step}", f"slurm-{step}"
    launcher = os.getpid()
    if multiprocessing.parent_process() is not None or "TORCHELASTIC_RUN_ID" in env:
        launcher = os.getppid()
    session = _session_around(launcher)
    return f"session {session} {_process_start(session)}", ""


def _command() -> str | None:
    """Digest of what this process runs."""
    try:
        folder = os.getcwd()
    except OSError:
        return None
    if multiprocessing.parent_process() is None:
        has_script = getattr(sys.modules.get("__main__"), "__file__", None) is not None
        # Else the program is typed in: the kernel of a notebook, an interactive shell, a pipe.
        return digest(folder, *sys.orig_argv[1:]) if has_script or "-c" in sys.orig_argv else None
    process: Any = multiprocessing.current_process()
    if type(process).__name__ == "ForkProcess":
        return None  # it has the variables of a program in mid-run, which nobody can compare
    target, args = process._target, process._args
    if getattr(target, "__module__", "") == _TORCH_SPAWN and len(args) == 4:
        target, _, args, _ = args  # torch: (function, its number, its arguments, a temporary file)
    values: list[str] = []
    if not _plain((target, args, process._kwargs), values, 0):
        return None
    return digest(folder, *sys.argv, *values)


def _plain(value: Any, values: list[str], depth: int) -> bool:
    """Appends what tells two values apart; False if that cannot be told."""
    if len(values) > _MOST_VALUES or depth > _DEEPEST:
        return False
    kind = type(value)
    values.append(kind.__qualname__)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        values.append(repr(value))
        return True
    if kind in (tuple, list):
        values.append(str(len(value)))
        return all(_plain(item, values, depth + 1) for item in value)
    if kind is dict:
        values.append(str(len(value)))
        return all(_plain(pair, values, depth + 1) for pair in value.items())
    if callable(value) and hasattr(value, "__code__") and not value.__closure__:
        values.append(f"{value.__module__}.{value.__qualname__}")
        return True
    if kind.__module__ == "argparse" and kind.__name__ == "Namespace":
        return _plain(vars(value), values, depth + 1)
    if isinstance(value, os.PathLike):
        values.append(os.fsdecode(value))
        return True
    return False
