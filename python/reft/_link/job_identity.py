"""Which job, node and attempt this rank belongs to, by the variables that launchers set."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
ID_CHARS = 100  # so that the path of a socket has room for the rest


@dataclass(frozen=True)
class Job:
    """Identity of a rank.

    Attributes:
        id: equal on all ranks of the job and in all its restarts, different for two jobs at a time.
        node: number of the node among the job's nodes.
        attempt: how often the launcher has started the ranks before.
        restarts_left: how often it would start them again.
    """

    id: str
    node: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    attempt: int
    restarts_left: int

    @property
    def nodes(self) -> int:
        return max(1, -(-self.world // max(1, self.local_world)))


def _number(env: Mapping[str, str], *names: str, default: int) -> int:
    for name in names:
        value = env.get(name, "")
        if value.isdigit():
            return int(value)
    return default


def _process_start(pid: int) -> str:
    """Start time of a process in clock ticks: with the pid it names one process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "0"


def safe_id(text: str) -> str:
    """A job's name as folders and the agent can have it.

    One that has to be changed for that ends with a hash of what it was: two jobs do not become one.
    """
    safe = _UNSAFE.sub("_", text).lstrip(".")[:ID_CHARS] or "job"
    if safe == text:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{safe[: ID_CHARS - len(digest) - 1]}-{digest}"


def identify(rank: int, world: int, job_id: str, env: Mapping[str, str] | None = None) -> Job:
    """Reads the launcher's variables.

    Args:
        job_id: value of REFT_JOB_ID, "" if not set.
        env: for tests; default: the process environment.
    """
    env = os.environ if env is None else env
    local_world = _number(
        env,
        "LOCAL_WORLD_SIZE",
        "SLURM_NTASKS_PER_NODE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        default=world,
    )
    local_rank = _number(
        env,
        "LOCAL_RANK",
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        default=rank % max(1, local_world),
    )
    node = _number(env, "GROUP_RANK", "SLURM_NODEID", default=rank // max(1, local_world))
    attempt = _number(env, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", default=0)
    restarts_left = max(0, _number(env, "TORCHELASTIC_MAX_RESTARTS", default=0) - attempt)
    if not job_id:
        run_id = env.get("TORCHELASTIC_RUN_ID", "")
        if run_id not in ("", "none"):
            job_id = f"run-{run_id}"
        elif env.get("SLURM_JOB_ID"):
            job_id = f"slurm-{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
        else:
            # All ranks of a node share their parent, which stays the same over restarts of the
            # ranks.
            parent = os.getppid()
            address = f"{env.get('MASTER_ADDR', 'local')}-{env.get('MASTER_PORT', '0')}"
            job_id = f"{address}-{parent}-{_process_start(parent)}"
    return Job(safe_id(job_id), node, rank, world, local_rank, local_world, attempt, restarts_left)


def default_run_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where sockets and reports go without REFT_RUN_DIR."""
    env = os.environ if env is None else env
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "reft"
    return Path(tempfile.gettempdir()) / f"reft-{os.getuid()}"
