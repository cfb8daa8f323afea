"""Starts the ranks of `short_training.py`, or of scripts that use it, one process each and without a
launcher; and reads what they say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import forked_processes
from tests.support.forked_processes import ForkedProcess
from tests.support.launchers import agent_pids, free_port, job_environment, kill_all

TRAINING = Path(__file__).with_name("short_training.py")
_SEC = 120.0


@dataclass
class Bench:
    """A run directory and what all jobs in it have in their environment.

    Attributes:
        forked: whether `ranks()` forks a process that has torch already.
    """

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    forked: bool = False

    def ranks(self, *arguments: str, world: int = 2, script: Path = TRAINING, **env: str) -> str:
        """Runs ranks to their end. A rank that is killed ends the others. Returns what they said."""
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        begin = self._fork if self.forked else self.start
        started = [
            begin(script, *arguments, **address, RANK=str(rank), WORLD_SIZE=str(world), **env)
            for rank in range(world)
        ]
        return said_by(started)

    def run(self, script: Path, *arguments: str, **env: str) -> str:
        """Runs one process to its end. Returns what it said."""
        return said_by([self.start(script, *arguments, **env)])

    def start(self, script: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return self.start_command([sys.executable, str(script), *arguments], **env)

    def _fork(self, script: Path, *arguments: str, **env: str) -> ForkedProcess:
        words = [str(script), *arguments]
        return forked_processes.start(words, self._environment(env), self.folder)

    def start_command(self, command: list[str], **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env=self._environment(env),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return self.env | {"KILLED": str(self.folder / "killed")} | dict(more)


@contextmanager
def bench(forked: bool = False, **settings: str) -> Iterator[Bench]:
    """Jobs here get the name that reft gives them, unless `settings` has REFT_JOB_ID."""
    folder = Path(tempfile.mkdtemp(prefix="reft-id-"))  # short: a socket's path has 107 bytes
    env = job_environment(folder, REFT_AGENT_LINGER_SEC="60", OMP_NUM_THREADS="1", **settings)
    if "REFT_JOB_ID" not in settings:
        del env["REFT_JOB_ID"]
    for name in list(env):  # of whatever runs the tests
        foreign = re.match("SLURM_|TORCHELASTIC_|MASTER_|LOCAL_|GROUP_|RANK$|WORLD_SIZE$", name)
        if foreign and name not in settings:
            del env[name]
    env["PYTHONPATH"] = os.pathsep.join([str(TRAINING.parent), env["PYTHONPATH"]])
    try:
        yield Bench(folder, env, forked)
    finally:
        kill_all(agent_pids(folder / "run"))
        shutil.rmtree(folder, ignore_errors=True)


def said_by(started: Sequence[subprocess.Popen[str] | ForkedProcess]) -> str:
    """What processes said, when all have ended."""
    said = []
    try:
        for process in started:
            said.append(process.communicate(timeout=_SEC)[0])
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return "\n".join(said)


def losses(said: str, rank: int = 0) -> list[str]:
    """Losses of a rank, in the order in which it printed them."""
    return re.findall(rf"^r{rank} \d+ (\S+)$", said, re.MULTILINE)


def committed(said: str) -> list[int]:
    """Newest committed steps that ranks named at their end."""
    return [
        int(step) for step in re.findall(r"^r\d+ final \S+, committed (-?\d+)$", said, re.MULTILINE)
    ]


def job_ids(said: str) -> list[str]:
    """Names of the jobs that have started."""
    return re.findall(r"^reft: job (\S+): \d+ ranks?", said, re.MULTILINE)


def resumed_at(said: str) -> list[int]:
    return [int(step) for step in re.findall(r"resumed at step (\d+)", said)]
